"""Whether compiled programs recompute what their plans claim, and no more."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hilore_jax.actions import Policy, Store
from hilore_jax.planning.executed import Executed
from hilore_jax.planning.plan import Plan, runs
from hilore_jax.work import Work

PLAIN = Policy(default=Store())  # no rematerialization: what claims are measured against


class Fault(NamedTuple):
    """A claim that does not hold: `unit` claimed to be recomputed, and found so."""

    claimed: int
    found: int
    unit: str

    def __str__(self) -> str:
        return (
            f"it should recompute {self.claimed} {self.unit} in an update, but its compiled "
            f"program runs {self.found} more than the one without rematerialization"
        )

    @property
    def ratio(self) -> int:
        """How many times as much is recomputed as claimed, rounded up: compilers only spare."""
        return math.ceil(self.found / self.claimed) if self.claimed else 0


def claim_fault(
    claimed: Work, plain: Executed, found: Executed, alone: bool = False
) -> Fault | None:
    """Whether what is claimed to be removed is gone from a program, and the rest still there.

    What a program runs beyond the one without rematerialization is recomputation (HiLoRe's
    graph-attributed equations, methods 1.4). It may not exceed the claim. It may fall short of it:
    a compiler merges a recomputed product with an equal one of the gradient, such as attention's
    scores. But where some is claimed, some must be left. FLOPs are compared where both programs
    show them, as compilers also join products; else matmuls.

    Args:
        claimed: what an update should recompute.
        plain: what it runs without rematerialization.
        found: what it runs.
        alone: the first block is scanned by itself. XLA inlines it, and drops the gradient of its
            input, which nobody reads, so that nothing may seem to be recomputed.

    Example:
        >>> claim_fault(Work(2, 120), Executed(3, 180), Executed(5, 300))
        >>> claim_fault(Work(2, 120), Executed(3, 180), Executed(5, 310)).found
        130
        >>> claim_fault(Work(2, 120), Executed(3, 180), Executed(3, 180)).ratio
        0
    """
    if plain.flops is not None and found.flops is not None:
        wanted, extra, unit = claimed.flops, found.flops - plain.flops, "FLOPs of matmuls"
    else:
        wanted, extra, unit = claimed.matmuls, found.matmuls - plain.matmuls, "matmuls"
    if extra > wanted or (extra <= 0 < wanted and not alone):
        return Fault(wanted, extra, unit)
    return None


def check_claims(
    plans: Mapping[str, Plan | Sequence[Policy]],
    executed: Mapping[str, Executed],
    plain: Executed,
    microbatches: int = 1,
) -> None:
    """Refuses plans whose programs do not recompute what their entries say.

    Policies without a plan claim what the menu of a plan beside them says; nothing where none does.

    Args:
        plans: by name; `Plan`s, or policies.
        executed: what each one's program runs.
        plain: what the update runs without rematerialization.
        microbatches: of an update, each of which recomputes what a plan claims.

    Raises:
        ValueError: names the plan, and what is claimed and found.
    """
    menus = {
        name: {entry.policy: Work(entry.matmuls, entry.flops) for entry in plan.menu}
        for name, plan in plans.items()
        if isinstance(plan, Plan)
    }
    known = {PLAIN: Work(0, 0)}
    for menu in menus.values():
        known |= menu
    for name, plan in plans.items():
        policies = plan.policies if isinstance(plan, Plan) else tuple(plan)
        works = known | menus.get(name, {})
        if not all(policy in works for policy in policies):
            continue
        claimed = sum((works[policy] for policy in policies), Work(0, 0)) * microbatches
        fault = claim_fault(claimed, plain, executed[name], starts_alone(policies))
        if fault:
            raise ValueError(
                f"plan {name!r} is not what it claims: {fault}. Was it made for this block, does "
                "the update use its policies, and does it run as many microbatches?"
            )


def starts_alone(policies: Sequence[Policy]) -> bool:
    """Whether the first block is a run by itself.

    Example:
        >>> starts_alone([Policy({})]), starts_alone([Policy({})] * 2)
        (True, False)
    """
    return runs(policies)[0][1] == 1
