"""A ladder tried as training uses it: each microbatch under the plan of its own bucket."""

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from hilore_jax.actions import Policy
from hilore_jax.planning.accept import checked_norm
from hilore_jax.planning.allocate import total_risk
from hilore_jax.planning.ladder import Ladder, compresses
from hilore_jax.planning.out_of_memory import OutOfMemoryError, naming_out_of_memory
from hilore_jax.planning.realized import gradient_distance, gradient_norm, predicted_error

# The gradient of a complete update, with the policies of each of its microbatches.
Mixed = Callable[[tuple[tuple[Policy, ...], ...], Any], Any]


@dataclasses.dataclass(frozen=True)
class Mix:
    """What updates said of a ladder whose microbatches each had their own bucket's plan.

    Attributes:
        errors: relative gradient error of each update in which something is compressed.
        predicted: by the risks of the plans, for the same microbatches; mean; 0 of no update.
        buckets: whose plans compressed something in them, ascending.
        limit: mean error that is accepted.
        fault: why nothing was found; empty where something was.
    """

    errors: tuple[float, ...]
    predicted: float
    buckets: tuple[int, ...]
    limit: float
    fault: str = ""

    @property
    def error(self) -> float:
        """The mean relative gradient error; 0 of no update."""
        return statistics.fmean(self.errors) if self.errors else 0.0

    @property
    def accepted(self) -> bool:
        """Whether the mean error is known and within the limit."""
        return not self.fault and self.error <= self.limit  # NaN is not

    def __str__(self) -> str:
        if not self.errors:
            return "exact, no microbatch's plan compresses anything"
        if self.fault:
            return f"rejected: {self.fault}"
        figures = f"{self.error:.4g} {{}} {self.limit:g} over {len(self.errors)} updates"
        predicted = f"predicted {self.predicted:.4g}"
        if self.accepted:
            return f"accepted: mean gradient error {figures.format('of')}, {predicted}"
        return f"rejected: the mean gradient error of {figures.format('exceeds')}, {predicted}"


def try_mixed(
    ladder: Ladder,
    mixed: Mixed,
    updates: Sequence[Any],
    truth: Sequence[tuple[Any, Any]],
    chosen: Sequence[Sequence[int]],
    limit: float,
) -> Mix:
    """Complete updates under the plans that training would choose for their microbatches.

        mean_u ||g_L - g|| / ||g|| <= limit

    Args:
        ladder: the ladder.
        mixed: the gradient of an update with the policies of each microbatch.
        updates: complete ones, held out.
        truth: exact gradient and exposures of each.
        chosen: the bucket of each microbatch of each.
        limit: mean relative gradient error that is accepted.

    Raises:
        ValueError, FloatingPointError: an exact gradient that is 0 or not finite.
    """
    lossy = {b for b, made in enumerate(ladder.plans) if any(map(compresses, made.policies))}
    used = tuple(sorted(lossy.intersection(set().union(*chosen))))
    errors, predicted, fault = [], [], ""
    for update, buckets in enumerate(chosen):
        if not lossy.intersection(buckets):
            continue
        grads, exposures = truth[update]
        norm = checked_norm(gradient_norm(grads), update)
        pairs = zip(buckets, exposures, strict=True)
        parts = [predicted_error(ladder.plans[b], [e], norm) for b, e in pairs]
        predicted.append(total_risk(parts, paper=ladder.paper))
        try:
            with naming_out_of_memory():
                found = mixed(tuple(ladder.plans[b].policies for b in buckets), updates[update])
                errors.append(gradient_distance(found, grads) / norm)
                del found  # before the next one is computed
        except OutOfMemoryError as error:
            fault = f"out of memory: {error}"
            errors.append(float("inf"))
    mean = statistics.fmean(predicted) if predicted else 0.0
    return Mix(tuple(errors), mean, used, limit, fault)


def with_verdict(ladder: Ladder, mix: Mix) -> Ladder:
    """The ladder, its plans that took part rejected where the mix is."""
    if mix.accepted:
        return ladder
    plans = list(ladder.plans)
    for bucket in mix.buckets:
        made = plans[bucket]
        unknown = {
            "peak": made.memory.peak,
            "errors": mix.errors,
            "predicted": mix.predicted,
            "removed": (),
            "measured": None,
            "error": mix.error,
            "limit": mix.limit,
        }
        own = made.acceptance or unknown
        before = f"{own['reason']}; and " if made.accepted is False else ""
        reason = f"{before}with each microbatch under its own bucket's plan: {mix}"
        found = {**own, "accepted": False, "reason": reason}
        plans[bucket] = dataclasses.replace(made, accepted=False, acceptance=found)
    return dataclasses.replace(ladder, plans=tuple(plans))
