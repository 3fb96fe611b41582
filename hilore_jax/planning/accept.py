"""`accept`: a plan is used once complete updates have shown that it keeps both budgets."""

import dataclasses
import functools
import logging
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import jax

from hilore_jax.actions import Policy
from hilore_jax.planning.device_memory import DevicePeak
from hilore_jax.planning.leave_names import BlockView, without_idle_names
from hilore_jax.planning.leave_out import Profiler, without_idle_entries
from hilore_jax.planning.memory import Memory
from hilore_jax.planning.out_of_memory import OutOfMemoryError, naming_out_of_memory
from hilore_jax.planning.plan import Plan, Trial
from hilore_jax.planning.realized import gradient_distance, gradient_norm, predicted_error
from hilore_jax.planning.search import describe

_LOG = logging.getLogger("hilore_jax")
LIMIT = 0.015

# Exposures are a sequence or an array.
Gradients = Callable[[tuple[Policy, ...], Any], tuple[Any, Any]]
MemoryOf = Callable[[tuple[Policy, ...]], Memory]
PeakOf = Callable[[tuple[Policy, ...]], DevicePeak | None]


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
        measured: peak on the device, bytes, or a bound of it; None: not measured.
    """

    accepted: bool
    reason: str
    peak: int
    errors: tuple[float, ...]
    predicted: float
    removed: tuple[str, ...] = ()
    measured: int | None = None

    @property
    def error(self) -> float:
        """The mean relative gradient error."""
        return statistics.fmean(self.errors)


def accept(
    plan: Plan,
    gradients: Gradients,
    updates: Sequence[Any],
    *,
    memory: MemoryOf | None = None,
    measured: PeakOf | None = None,
    block: BlockView | None = None,
    profile: Profiler | None = None,
    limit: float = LIMIT,
) -> Plan:
    """Tries a plan on complete held-out updates (HiLoRe, arXiv 2609.33570, acceptance).

        accepted:  peak <= M  and  mean_u ||g_L - g|| / ||g|| <= 0.015

    Then each name of each policy is left out in turn; where backward is no slower without it, it
    goes. So does each policy whose blocks might as well recompute everything, where complete
    updates can be measured. What is left is compiled and tried again, and takes the plan's place
    only if it is accepted too. A plan for which the device has no room is rejected; exact gradients
    wait on the host.

    Args:
        plan: the plan.
        gradients: `gradients(policies, update) -> (gradient, exposures)` of a complete update,
            after reduction and before clipping, and the exposure of each microbatch.
        updates: held out: not those of the calibration.
        memory: compiled memory of the complete update under policies; None: the plan's own,
            compiled when it was made.
        measured: peak of the complete update under policies on the device, see
            `hilore_jax.planning.device_memory`; None: only the compiled peak is compared.
        block: says what leaving out a name changes; None: no name is left out.
        profile: measures complete updates under policies, see
            `hilore_jax.planning.leave_out.without_idle_entries`; None: no policy is left out.
        limit: mean relative gradient error that is accepted.

    Returns:
        The plan with `accepted` and `acceptance` set, and without names that do not pay.

    Raises:
        ValueError: no updates, or one whose exact gradient is 0; something to leave out by and no
            `memory`, without which nothing is known of what is left.
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
        raise ValueError("accept needs at least one complete update that was held out, found none.")
    if memory is None and (block is not None or profile is not None):
        raise ValueError(
            "accept leaves out what does not pay only where it can compile what is left, whose "
            "peak may be another: expected memory=..., found None. Give it, or neither block= nor "
            "profile=."
        )
    memory = memory and functools.cache(memory)
    exact = (Policy({}),) * len(plan.policies)
    # On the host: the device has to hold what a plan's own update needs.
    truth = [jax.device_get(gradients(exact, update)) for update in updates]
    norms = [checked_norm(gradient_norm(grads), u) for u, (grads, _) in enumerate(truth)]

    def tried(made: Plan, removed: tuple[str, ...] = ()) -> Acceptance:
        predicted = statistics.fmean(
            predicted_error(made, exposures, norm)
            for (_, exposures), norm in zip(truth, norms, strict=True)
        )
        found = []
        try:
            with naming_out_of_memory():
                for update, (grads, _), norm in zip(updates, truth, norms, strict=True):
                    planned = gradients(made.policies, update)[0]
                    found.append(gradient_distance(planned, grads) / norm)
                    del planned  # before the next one is computed
                peak = (made.memory if memory is None else memory(made.policies)).peak
                counted = None if measured is None else measured(made.policies)
        except OutOfMemoryError as error:
            reason, unknown = f"out of memory: {error}", (math.inf,) * len(updates)
            return Acceptance(False, reason, made.memory.peak, unknown, predicted, removed)
        return _judged(made, peak, counted, tuple(found), predicted, limit, removed)

    result = tried(plan)
    ways: list[Callable[[Plan], tuple[Plan, tuple[str, ...]]]] = []
    if block is not None:
        ways.append(functools.partial(without_idle_names, block=block))
    if profile is not None:
        ways.append(functools.partial(without_idle_entries, profile=profile))
    for way in ways if result.accepted else ():
        try:
            with naming_out_of_memory():
                shorter, removed = way(plan)
        except OutOfMemoryError as error:
            _LOG.warning("what does not pay is not known, and stays: out of memory: %s", error)
            continue
        if removed and memory is not None:
            again = tried(shorter, (*result.removed, *removed))
            if again.accepted:
                plan, result = _recompiled(plan, shorter, memory), again
            else:
                _LOG.warning("what does not pay stays in the plan: %s", again.reason)
    found = {**dataclasses.asdict(result), "error": result.error, "limit": limit}
    return dataclasses.replace(plan, accepted=result.accepted, acceptance=found)


def _judged(
    plan: Plan,
    peak: int,
    counted: DevicePeak | None,
    errors: tuple[float, ...],
    predicted: float,
    limit: float,
    removed: tuple[str, ...],
) -> Acceptance:
    mean = statistics.fmean(errors)
    faults = []
    if peak > plan.budget:
        faults.append(f"its peak of {peak:,} bytes exceeds the budget of {plan.budget:,}")
    if counted is not None and counted.nbytes > plan.budget:
        faults.append(
            f"its peak on the device, {counted.nbytes:,} bytes measured, exceeds the budget of "
            f"{plan.budget:,}"
            if counted.reached
            else "its peak on the device is not known to keep the budget: the process used more "
            f"before, {counted.nbytes:,} bytes of {plan.budget:,} (accept it in a new process)"
        )
    if not mean <= limit:
        faults.append(f"its mean gradient error of {mean:.4g} exceeds {limit:g}")
    good = (
        f"peak {peak:,} of {plan.budget:,} bytes, {_counted(counted)}, mean gradient error "
        f"{mean:.4g} of {limit:g} over {len(errors)} updates, predicted {predicted:.4g}"
    )
    return Acceptance(
        not faults,
        " and ".join(faults) or good,
        peak,
        errors,
        predicted,
        removed,
        None if counted is None else counted.nbytes,
    )


def _counted(counted: DevicePeak | None) -> str:
    """How the compiled peak compares with one that was measured."""
    if counted is None:
        return "compiled only"
    return f"compiled, and {'' if counted.reached else 'at most '}{counted.nbytes:,} measured"


def verdict(made: Plan) -> str:
    """What was found of a plan that was tried, and what was left out, a line each."""
    assert made.acceptance is not None, "the plan was not tried"
    lines = [f"{'accepted' if made.accepted else 'rejected'}: {made.acceptance['reason']}"]
    if made.acceptance["removed"]:
        lines.append("left out: " + "; ".join(made.acceptance["removed"]))
    return "\n".join(lines)


def _recompiled(plan: Plan, shorter: Plan, memory: MemoryOf) -> Plan:
    """A shorter plan with the memory that is its own, and that as the longer one predicted it."""
    kept = sum(entry.nbytes for entry in shorter.entries)
    predicted, found = round(plan.expected_peak(kept)), memory(shorter.policies)
    fits = found.peak <= plan.budget
    trial = Trial(describe(shorter.policies), predicted, found.peak, fits)
    trials = (*shorter.trials, trial)
    return dataclasses.replace(shorter, memory=found, predicted=predicted, trials=trials)


def checked_norm(norm: Any, update: int) -> float:
    """The norm of an update's exact gradient, refused where no error is relative to it.

    Raises:
        FloatingPointError: it is not finite.
        ValueError: it is 0.
    """
    value = float(norm)
    if not math.isfinite(value):
        raise FloatingPointError(f"the exact gradient of update {update} is not finite: {value}.")
    if value == 0:
        raise ValueError(f"the exact gradient of update {update} is 0: hold out another update.")
    return value
