"""Exposure before the forward: what the ratio's clip range says about a microbatch."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Bool, Float, Num, Shaped

from hilore_jax.grpo.checks import check_number
from hilore_jax.grpo.exposure import exposure
from hilore_jax.grpo.objective import check_form
from hilore_jax.grpo.terms import (
    LOG_RATIO_LIMIT,
    Ratio,
    Reference,
    Surrogate,
    loss_scalars,
    token_arrays,
)

# omega is rounded three times and the sum once; this covers both with room.
_ROUNDING = 1 + 2.0**-20


class ExposureEstimate(NamedTuple):
    """Exposure foretold without a forward.

    Attributes:
        value: float32 scalar, or `[batch]` per row.
        is_bound: bool, same shape: the exact exposure cannot exceed `value`, whatever the policy.
    """

    value: Array
    is_bound: Array


def estimate_exposure(
    logp_old: Num[Array | np.ndarray, "batch seq"],
    logp_ref: Num[Array | np.ndarray, "batch seq"] | None,
    advantages: Num[Array | np.ndarray, "..."],
    mask: Shaped[Array | np.ndarray, "batch seq"],
    update_tokens: ArrayLike,
    *,
    clip: ArrayLike = 0.2,
    beta: ArrayLike = 1e-3,
    clip_high: ArrayLike | None = None,
    clip_dual: ArrayLike | None = None,
    ratio: Ratio = "token",
    surrogate: Surrogate = "clip",
    reference: Reference = "k3",
    margin: ArrayLike | None = None,
    per_row: bool = False,
) -> ExposureEstimate:
    r"""Exposure of a microbatch whose log-probs under the current policy are not known yet.

    A token with `A >= 0` counts only while `rho <= 1 + clip_high` (arXiv 2609.33570, omega), so

        |omega_t| <= (1 + clip_high) |A_t| / N                              (A_t >= 0, beta 0)

    whatever the policy: a bound. With `A < 0` the ratio has no upper limit, and the reference term
    needs `logp_t = logp_old_t + log rho_t`. There the ratio is taken to lie in
    `[1 / (1 + m), 1 + m]`:

        |omega_t| <= (1 + m) |A_t| / N + beta/N max_r |1 - exp(logp_ref - logp_old) / r|,
                     r = 1/(1+m) or 1+m

    which is an estimate with margin m. Without the reference term it is exceeded only if the mean
    of the active ratios, weighted by `|A|`, exceeds `1 + m`: single tokens may, as long as others
    make up for them. Under the policy that sampled every ratio has mean 1, a clipped update moves
    it by about `clip`, and an active token with `A < 0` is pushed to smaller ratios, so
    `m = clip_high` is the default. The exact exposure is known after the forward; `is_bound` says
    whether it has to be compared.

    Ratios of whole sequences are held in the same way. The surrogate "cispo" holds the ratio for
    both signs, so that it is a bound whatever A is. The reference term "k1" adds exactly beta/N;
    "k2", `|logp - logp_ref|` at the ends of the same range.

    Args:
        logp_old: `[batch, seq]`, nats.
        logp_ref: `[batch, seq]`, nats, or None.
        advantages: `[batch]` or `[batch, seq]`.
        mask: `[batch, seq]`, the optimized tokens.
        update_tokens: Tokens N of the complete update.
        clip: Lower eps, and the upper one where `clip_high` is None.
        beta: Weight of the reference term.
        clip_high: Upper eps.
        clip_dual: As in `loss_and_coefficients`, like the next three.
        ratio: See there.
        surrogate: See there.
        reference: See there.
        margin: m >= 0; None: `clip_high`.
        per_row: One estimate a sequence.

    Returns:
        The estimate and whether it is a bound. NaN where an input under the mask is.

    Raises:
        ValueError: As `loss_and_coefficients`, or a margin that is negative.

    Example:
        >>> import jax.numpy as jnp, hilore_jax as hl
        >>> one, up, down = jnp.ones((1, 2)), jnp.array([1.0]), jnp.array([-1.0])
        >>> made = hl.grpo.estimate_exposure(-one, None, up, one, 4, clip=0.25, beta=0.0)
        >>> print(round(float(made.value), 4), made.is_bound)
        0.625 True
        >>> print(hl.grpo.estimate_exposure(-one, None, down, one, 4).is_bound)
        False
    """
    margin = (clip if clip_high is None else clip_high) if margin is None else margin
    check_number("margin", margin, least=0.0)
    check_form(advantages, clip_dual, ratio, surrogate, reference)
    _, tokens = token_arrays(logp_old, logp_old, logp_ref, advantages, mask)
    dtype = tokens.logp_old.dtype
    scalars = loss_scalars(
        dtype,
        update_tokens,
        len(tokens.mask),
        clip=clip,
        beta=beta,
        clip_high=clip_high,
        clip_dual=clip_dual,
    )
    top = 1.0 + jnp.asarray(margin).astype(dtype)
    held = tokens.advantages >= 0
    if surrogate == "cispo":
        held = jnp.ones_like(held)
    # NaN advantages and log-probs stay visible: neither comparison nor maximum drops them.
    terms = jnp.where(held, scalars.high, top) * jnp.abs(tokens.advantages)
    terms = terms + 0.0 * tokens.logp_old
    certain: Array = held | ~tokens.mask
    if tokens.logp_ref is not None:
        if reference != "k1":
            certain = certain & (scalars.beta == 0)
        terms = terms + scalars.beta * _largest(tokens.logp_ref - tokens.logp_old, top, reference)
    values = exposure(scalars.weight * terms, tokens.mask, per_row=per_row)
    return ExposureEstimate(values * _ROUNDING, jnp.all(certain, axis=-1 if per_row else None))


def _largest(
    gap: Float[Array, "batch seq"], top: Float[Array, ""], reference: Reference
) -> Float[Array, "batch seq"]:
    """The reference term's largest slope for r in `[1 / top, top]`; convex, so at an end."""
    if reference == "k1":
        return jnp.ones_like(gap) + 0.0 * gap
    shift = jnp.log(top)
    if reference == "k2":
        return jnp.abs(gap) + shift
    ends = (jnp.expm1(jnp.minimum(gap + s, LOG_RATIO_LIMIT)) for s in (-shift, shift))
    low, high = (jnp.abs(end) for end in ends)
    return jnp.maximum(low, high)


def dead_rows(
    logp_old: Num[Array | np.ndarray, "batch seq"],
    logp_ref: Num[Array | np.ndarray, "batch seq"] | None,
    advantages: Num[Array | np.ndarray, "..."],
    mask: Shaped[Array | np.ndarray, "batch seq"],
    *,
    beta: ArrayLike = 1e-3,
) -> Bool[Array, "batch"]:
    """Rows whose omega is exactly zero whatever the policy: they cannot matter to the update.

    Fully masked rows, and rows whose advantages are all 0 where there is no reference term
    (`beta = 0` or no reference). A row with a number that is not finite under its mask is kept, so
    that the update can report it.

    Args:
        logp_old: `[batch, seq]`, nats.
        logp_ref: `[batch, seq]`, nats, or None.
        advantages: `[batch]` or `[batch, seq]`.
        mask: `[batch, seq]`, the optimized tokens.
        beta: Weight of the reference term.

    Returns:
        `[batch]` bool.

    Example:
        >>> import jax.numpy as jnp, hilore_jax as hl
        >>> old, mask = jnp.zeros((3, 2)), jnp.array([[1, 1], [1, 1], [0, 0]])
        >>> print(hl.grpo.dead_rows(old, None, jnp.array([0.0, 1.0, 1.0]), mask))
        [ True False  True]
    """
    mask = jnp.asarray(mask) != 0
    advantages = jnp.asarray(advantages)
    advantages = advantages if advantages.ndim == 2 else advantages[:, None]
    still = (advantages == 0) & jnp.isfinite(jnp.asarray(logp_old))
    if logp_ref is not None:
        still = still & jnp.isfinite(jnp.asarray(logp_ref)) & (jnp.asarray(beta) == 0)
    return jnp.all(still | ~mask, axis=-1)
