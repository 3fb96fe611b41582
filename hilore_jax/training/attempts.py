"""Microbatches tried under the plans of their buckets until each one's exposure is allowed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from hilore_jax.actions import Policy
from hilore_jax.planning.buckets import Buckets

Attempt = Callable[[tuple[Policy, ...], Any, int, np.float32], tuple[Any, dict[str, Any]]]


@dataclasses.dataclass(frozen=True)
class Attempts:
    """How the microbatches of one update choose their policies.

    Attributes:
        buckets: exposure edges.
        policies: of each bucket.
        counts: optimized tokens of each microbatch.
        update_tokens: those of the whole update.
        attempt: `attempt(policies, total, micro, limit) -> (total, seen)` adds a microbatch's
            gradient to the sum if its exposure is at most the limit, `seen["accepted"]`.
    """

    buckets: Buckets
    policies: Sequence[tuple[Policy, ...]]
    counts: np.ndarray
    update_tokens: int
    attempt: Attempt

    def all(
        self, total: Any, estimates: np.ndarray
    ) -> tuple[Any, list[int], list[dict[str, Any]], int]:
        """First attempts and repetitions.

        Args:
            total: the sum of no microbatch's gradients.
            estimates: exposure of each microbatch, known before the forward.

        Returns:
            The summed gradient; each microbatch's bucket and what it saw there; attempts that did
            not count.
        """
        pending = [(m, self.bucket(m, float(e))) for m, e in enumerate(estimates)]
        done: dict[int, tuple[int, dict[str, Any]]] = {}
        redone = 0
        while pending:
            seen = []
            for micro, bucket in pending:  # dispatched together, read once
                total, one = self.attempt(
                    self.policies[bucket], total, micro, _at_most(self.limit(micro, bucket))
                )
                seen.append(one)
            again = []
            for (micro, bucket), one in zip(pending, jax.device_get(seen), strict=True):
                exposure = float(one["exposure"])
                if math.isnan(exposure):
                    one["loss"] = np.float32(math.nan)  # refuses the update
                if one["accepted"] or math.isnan(exposure):
                    done[micro] = bucket, one
                else:
                    again.append((micro, max(bucket + 1, self.bucket(micro, exposure))))
            redone += len(again)
            pending = again
        order = sorted(done)
        return total, [done[m][0] for m in order], [done[m][1] for m in order], redone

    def bucket(self, micro: int, exposure: float) -> int:
        """Where an exposure belongs; one that is not a number gets the exact plan."""
        if math.isnan(exposure):
            return len(self.buckets.edges) - 1
        return self.buckets.select(exposure, int(self.counts[micro]), self.update_tokens)

    def limit(self, micro: int, bucket: int) -> float:
        """The largest exposure for which a bucket's plan may be used on a microbatch."""
        return self.buckets.limit(bucket, int(self.counts[micro]), self.update_tokens)


def _at_most(value: float) -> np.float32:
    """The largest float32 that is not above a number."""
    rounded = np.float32(value)
    # As Python numbers: NumPy would round the other one to float32 before it compares.
    return rounded if float(rounded) <= value else np.nextafter(rounded, np.float32(-np.inf))
