"""The plans of a ladder: each at its bucket's upper edge."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from hilore_jax.planning import expect
from hilore_jax.planning.budget import Budget
from hilore_jax.planning.plan import Plan
from hilore_jax.planning.solve import Update, plan


def never_slower(plans: Sequence[Plan]) -> tuple[Plan, ...]:
    """Plans by rising exposure, each no slower than the next.

    A plan for more exposure serves less exposure too, at less risk; compiled peaks jump, so that
    the search for the lower bucket may have missed it.
    """
    found = list(plans)
    for i in reversed(range(len(found) - 1)):
        if found[i].recompute_seconds > found[i + 1].recompute_seconds:
            found[i] = found[i + 1]
    return tuple(found)


def planned(plan_at: Callable[[float], Plan], exposure: float) -> Plan:
    """What a user's `plan_at` makes, which must be a plan."""
    made = plan_at(exposure)
    if not isinstance(made, Plan):
        where = f"what hl.plan_ladder(plan_at=...) returns at exposure {exposure:g}, "
        expect.refuse(where, made, "an hl.Plan, as hl.plan returns it")
    return made


def planner(
    update: Update, args: Any, top: float, budget: Budget, **options: Any
) -> Callable[[float], Plan]:
    """`plan_at` by `hilore_jax.plan` within a microbatch's budget.

    Args:
        update: as for `hilore_jax.plan`.
        args: as there.
        top: largest finite edge, at which the exact plan is made too.
        budget: its risk is a microbatch's.
        **options: others of `hilore_jax.plan`.
    """

    def at(exposure: float) -> Plan:
        exact = exposure == math.inf  # nothing that has a risk may be used
        within = dataclasses.replace(budget, risk=0.0) if exact else budget
        chosen: dict[str, Any] = {**options, "exposure": top if exact else exposure}
        made = plan(update, args, budget=within, **chosen)
        if made.measured is not None:  # once for all buckets, and so that they can be compared
            options["cost"] = made.measured
        return made

    return at


def check_finite(risk: float) -> None:
    """Refuses a ladder without a bound: all its buckets would be the same.

    Raises:
        ValueError: R is infinite.
    """
    if risk == math.inf:
        raise ValueError(
            "a ladder's R is infinite: expected a finite relative error, which is what its buckets "
            "differ by. Without a bound on the error make one plan, hl.plan."
        )
