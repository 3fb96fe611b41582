"""`accept`: a plan is used once complete updates have shown that it keeps both budgets."""

import dataclasses
import functools
import logging
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from hilore_jax.actions import Policy
from hilore_jax.planning.leave_out import Profiler, without_idle_entries
from hilore_jax.planning.menu import Entry
from hilore_jax.planning.plan import Plan
from hilore_jax.planning.realized import gradient_distance, gradient_norm, predicted_error

_LOG = logging.getLogger("hilore_jax")
LIMIT = 0.015

# Exposures are a sequence or an array.
Gradients = Callable[[tuple[Policy, ...], Any], tuple[Any, Any]]


@dataclasses.dataclass(frozen=True)
class Acceptance:
    """What complete updates said of a plan.

    Attributes:
        accepted: whether it keeps both budgets.
        reason: in words.
        peak: compiled, bytes.
        errors: relative gradient error of each update, after reduction and before clipping.
        predicted: by the plan's risks, for the same updates' exposures and norms; mean.
        removed: names and policies that were taken out because they did not pay.
    """

    accepted: bool
    reason: str
    peak: int
    errors: tuple[float, ...]
    predicted: float
    removed: tuple[str, ...] = ()

    @property
    def error(self) -> float:
        """The mean relative gradient error."""
        return statistics.fmean(self.errors)


def accept(
    plan: Plan,
    gradients: Gradients,
    updates: Sequence[Any],
    *,
    peak: Callable[[tuple[Policy, ...]], int] | None = None,
    entry: Callable[[Policy], Entry] | None = None,
    profile: Profiler | None = None,
    limit: float = LIMIT,
) -> Plan:
    """Tries a plan on complete held-out updates (HiLoRe, arXiv 2609.33570, acceptance).

        accepted:  peak <= M  and  mean_u ||g_L - g|| / ||g|| <= 0.015

    Then each name of each policy is left out in turn; where backward is no slower without it, it
    goes. So does each policy whose blocks might as well recompute everything, where complete
    updates can be measured. What is left is tried again.

    Args:
        plan: the plan.
        gradients: `gradients(policies, update) -> (gradient, exposures)` of a complete update,
            after reduction and before clipping, and the exposure of each microbatch.
        updates: held out: not those of the calibration.
        peak: compiled peak of policies, bytes; None: the plan's own, compiled when it was made.
        entry: figures of a block's policy; None: no name is left out.
        profile: measures complete updates under policies, see
            `hilore_jax.planning.leave_out.without_idle_entries`; None: no policy is left out.
        limit: mean relative gradient error that is accepted.

    Returns:
        The plan with `accepted` and `acceptance` set, and without names that do not pay.

    Raises:
        ValueError: no updates, or one whose exact gradient is 0.
        FloatingPointError: an exact gradient that is not finite.

    Example:
        >>> import functools, jax, jax.numpy as jnp, hilore_jax as hl
        >>> from hilore_jax.planning.accept import accept
        >>> def block(w, x):
        ...     return x + jnp.tanh(jax.ad_checkpoint.checkpoint_name(x @ w, "mlp_gate"))
        >>> def update(policies, w, x):
        ...     return w - jax.grad(lambda w: hl.scan_blocks(block, w, x, policies).sum())(w), {}
        >>> w, x = jnp.ones((4, 16, 16)), jnp.ones((512, 16))
        >>> how = {"blocks": hl.Blocks(block, (w[0], x), 4), "target": "cpu"}
        >>> plan = hl.plan(update, (w, x), budget=hl.Budget("2x gc"), **how)
        >>> @functools.partial(jax.jit, static_argnums=0)
        ... def gradients(policies, x):
        ...     return w - update(policies, w, x)[0], jnp.array([1.0])  # and the exposures
        >>> accept(plan, gradients, [x / 7]).accepted
        True
    """
    if not len(updates):
        raise ValueError("hl.accept needs at least one complete update that was held out.")
    exact = (Policy({}),) * len(plan.policies)
    truth = [gradients(exact, update) for update in updates]
    norms = [_checked(gradient_norm(grads), u) for u, (grads, _) in enumerate(truth)]

    def tried(made: Plan, removed: tuple[str, ...] = ()) -> Acceptance:
        found = []
        for update, (grads, _), norm in zip(updates, truth, norms, strict=True):
            found.append(gradient_distance(gradients(made.policies, update)[0], grads) / norm)
        highest = made.memory.peak if peak is None else peak(made.policies)
        predicted = statistics.fmean(
            predicted_error(made, exposures, norm)
            for (_, exposures), norm in zip(truth, norms, strict=True)
        )
        return _judged(made, highest, tuple(found), predicted, limit, removed)

    result = tried(plan)
    ways: list[Callable[[Plan], tuple[Plan, tuple[str, ...]]]] = []
    if entry is not None:
        ways.append(functools.partial(_without_idle_names, entry=entry))
    if profile is not None:
        ways.append(functools.partial(without_idle_entries, profile=profile))
    for way in ways if result.accepted else ():
        shorter, removed = way(plan)
        if removed:
            again = tried(shorter, (*result.removed, *removed))
            if again.accepted:
                plan, result = shorter, again
            else:
                _LOG.warning("what does not pay stays in the plan: %s", again.reason)
    found = {**dataclasses.asdict(result), "error": result.error, "limit": limit}
    return dataclasses.replace(plan, accepted=result.accepted, acceptance=found)


def _judged(
    plan: Plan,
    peak: int,
    errors: tuple[float, ...],
    predicted: float,
    limit: float,
    removed: tuple[str, ...],
) -> Acceptance:
    mean = statistics.fmean(errors)
    faults = []
    if peak > plan.budget:
        faults.append(f"its peak of {peak:,} bytes exceeds the budget of {plan.budget:,}")
    if not mean <= limit:
        faults.append(f"its mean gradient error of {mean:.4g} exceeds {limit:g}")
    good = (
        f"peak {peak:,} of {plan.budget:,} bytes, mean gradient error {mean:.4g} of {limit:g} over "
        f"{len(errors)} updates, predicted {predicted:.4g}"
    )
    return Acceptance(not faults, " and ".join(faults) or good, peak, errors, predicted, removed)


def _without_idle_names(
    plan: Plan, entry: Callable[[Policy], Entry]
) -> tuple[Plan, tuple[str, ...]]:
    """The plan without names whose absence does not slow backward, and what was taken out."""
    known = {e.policy: e for e in plan.menu}
    order = [e.policy for e in plan.menu]
    replaced: dict[Policy, Policy] = {}
    removed: list[str] = []
    for policy in dict.fromkeys(plan.policies):
        current = policy
        for name in policy:
            less = Policy(
                {n: a for n, a in current.actions if n != name},
                tainted_matmuls=current.tainted_matmuls,
            )
            figures = entry(less)
            if figures.seconds <= known[current].seconds * (1 + 1e-9):
                # Less is compressed than was measured: the risk stays an upper bound.
                known[less] = dataclasses.replace(figures, risk=known[policy].risk)
                removed.append(f"{name} of [{policy}]")
                current = less
        replaced[policy] = current
    added = [p for p in dict.fromkeys(replaced.values()) if p not in order]
    if not removed:
        return plan, ()
    source = {new: old for old, new in replaced.items()}
    risks = plan.block_risks
    if risks is not None:
        places = [order.index(source[p]) for p in added]
        risks = tuple((*row, *(row[i] for i in places)) for row in risks)
    return (
        dataclasses.replace(
            plan,
            policies=tuple(replaced[p] for p in plan.policies),
            menu=(*plan.menu, *(known[p] for p in added)),
            block_risks=risks,
        ),
        tuple(removed),
    )


def _checked(norm: Any, update: int) -> float:
    value = float(norm)
    if not math.isfinite(value):
        raise FloatingPointError(f"the exact gradient of update {update} is not finite: {value}.")
    if value == 0:
        raise ValueError(f"the exact gradient of update {update} is 0: hold out another update.")
    return value
