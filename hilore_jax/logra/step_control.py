"""The step's size, from the KL that it is predicted to cause and the KL that it may."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float

MISMATCH_WEIGHT = 0.3
"""Weight of an update's mismatch in its moving average (methods 2.3)."""


class StepControl(NamedTuple):
    """What `step_control` decided.

    `alpha` multiplies the proposal, float32; `usable` is False where the predicted KL is negative
    or not finite, or the budget not a number above 0. Then alpha is 0: no update is made.
    """

    alpha: Float[Array, ""]
    usable: Bool[Array, ""]


def step_control(predicted: ArrayLike, budget: ArrayLike, *, alpha_max: float = 3.0) -> StepControl:
    """`alpha = min(alpha_max, sqrt(budget / q))` (LoGRA; methods 2.3).

    KL is quadratic in the step, so that the step which is alpha times the proposal is predicted to
    cause the budget's KL, unless alpha_max holds it back.

    Args:
        predicted: q, the mean predicted KL of the proposal over the probes' response tokens, nats.
        budget: the KL that this update may cause, nats a token, `kl_budget`.
        alpha_max: the most that a proposal is enlarged.

    Returns:
        alpha, 1 where q is 0, and whether q and the budget can be used.

    Raises:
        ValueError: alpha_max, or a budget that is a Python number, is not above 0.

    Example:
        >>> alpha, usable = step_control(4e-4, 1e-4)
        >>> float(alpha), bool(usable)
        (0.5, True)
    """
    if not alpha_max > 0:
        raise ValueError(f"alpha_max is {alpha_max}, expected above 0")
    if isinstance(budget, int | float) and not 0 < budget < math.inf:
        raise ValueError(f"the KL budget is {budget} nats a token, expected a number above 0")
    q = jnp.asarray(predicted, jnp.float32)
    allowed = jnp.asarray(budget, jnp.float32)
    usable = jnp.isfinite(q) & (q >= 0) & jnp.isfinite(allowed) & (allowed > 0)
    moves = usable & (q > 0)
    alpha = jnp.sqrt(allowed / jnp.where(moves, q, 1.0))
    alpha = jnp.where(moves, jnp.minimum(alpha, alpha_max), 1.0)
    return StepControl(jnp.where(usable, alpha, 0.0), usable)


def kl_budget(
    update: ArrayLike, *, first: float = 2e-4, last: float = 2e-5, updates: int = 300
) -> Float[Array, ""]:
    """The KL that an update may cause: a cosine from `first` to `last` (methods 2.3).

    Args:
        update: number of the update, from 1; may be traced.
        first: nats a token, at update 1.
        last: nats a token, at update `updates` and after.
        updates: length of the descent.

    Returns:
        Scalar, nats a token, float32.

    Raises:
        ValueError: a budget is not above 0, or there are fewer than 1 updates.

    Example:
        >>> [round(float(kl_budget(n)) * 1e4, 3) for n in (1, 300, 1000)]
        [2.0, 0.2, 0.2]
    """
    if not (0 < first < math.inf and 0 < last < math.inf and updates >= 1):
        raise ValueError(
            f"a KL budget from {first} to {last} nats a token over {updates} updates; expected "
            "budgets above 0 and at least 1 update"
        )
    done = (jnp.asarray(update, jnp.float32) - 1.0) / max(updates - 1, 1)
    cosine = 0.5 * (1.0 + jnp.cos(jnp.pi * jnp.clip(done, 0.0, 1.0)))
    return last + (first - last) * cosine


def next_mismatch(
    average: ArrayLike, gap: ArrayLike, *, weight: float = MISMATCH_WEIGHT
) -> Float[Array, ""]:
    """The moving average of how far the rollout engine's policy is from the trainer's.

        m = (1 - w) m + w max(0, mean(logp_rollout - logp_trainer))

    Args:
        average: m so far, nats a token; 0 at first.
        gap: the mean over an update's response tokens; one that is not finite does not count.
        weight: w.

    Returns:
        Scalar, float32.

    Example:
        >>> float(next_mismatch(0.0, 1e-3, weight=0.5))
        0.0005000000237487257
    """
    m = jnp.asarray(average, jnp.float32)
    seen = jnp.asarray(gap, jnp.float32)
    following = (1 - weight) * m + weight * jnp.maximum(seen, 0.0)
    return jnp.where(jnp.isfinite(seen), following, m)


def less_mismatch(budget: ArrayLike, mismatch: ArrayLike) -> Float[Array, ""]:
    """The budget that is left when the mismatch has used its part, at least half of it.

    Args:
        budget: nats a token, `kl_budget`.
        mismatch: nats a token, `next_mismatch`.

    Returns:
        Scalar, float32.

    Example:
        >>> [round(float(less_mismatch(2e-4, m)) * 1e4, 6) for m in (5e-5, 1.0)]
        [1.5, 1.0]
    """
    whole = jnp.asarray(budget, jnp.float32)
    return jnp.maximum(whole - mismatch, 0.5 * whole)
