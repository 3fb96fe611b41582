"""What the loss and its metrics share: checked inputs, the extended `exp`, reference terms."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, TypedDict

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike, DTypeLike

from hilore_jax.grpo.checks import (
    at_least_float32,
    check_divisors,
    check_finite,
    check_mask,
    check_number,
    check_shapes,
)

LOG_RATIO_LIMIT = 20.0
"""Log-ratio from which `exp` continues as its tangent line."""


Ratio = Literal["token", "sequence"]
Surrogate = Literal["clip", "cispo"]
Reference = Literal["k1", "k2", "k3"]


class LossOptions(TypedDict, total=False):
    """The keyword arguments of `loss_and_coefficients`, which say what they are."""

    clip: ArrayLike
    beta: ArrayLike
    clip_high: ArrayLike | None
    clip_dual: ArrayLike | None
    ratio: Ratio
    surrogate: Surrogate
    reference: Reference


class TokenArrays(NamedTuple):
    """What a loss compares `logp` with: `[batch, seq]`, float32 or wider, 0 where masked."""

    logp_old: Array
    logp_ref: Array | None
    advantages: Array
    mask: Array  # bool


class LossScalars(NamedTuple):
    """Scalars of one loss, in the dtype of the tokens."""

    weight: Array  # 1 / update_tokens, or 0 without tokens; `[]` or `[batch, 1]`
    low: Array  # 1 - clip
    high: Array  # 1 + clip (or 1 + clip_high)
    dual: Array  # infinite where it is None
    beta: Array


def tangent_exp(x: Array) -> Array:
    """`exp`, continued by its tangent line above the limit."""
    edge = float(np.exp(LOG_RATIO_LIMIT))
    inside = jnp.exp(jnp.minimum(x, LOG_RATIO_LIMIT))
    return jnp.where(x > LOG_RATIO_LIMIT, edge * (1.0 + (x - LOG_RATIO_LIMIT)), inside)


def k3(gap: Array) -> Array:
    """`e(gap) - gap - 1`; `expm1` keeps the digits that `exp(gap) - 1` loses near 0."""
    edge = float(np.exp(LOG_RATIO_LIMIT))
    inside = jnp.expm1(jnp.minimum(gap, LOG_RATIO_LIMIT))
    beyond = edge * (1.0 + (gap - LOG_RATIO_LIMIT)) - 1.0
    return jnp.where(gap > LOG_RATIO_LIMIT, beyond, inside) - gap


def log_ratios(logp: Array, tokens: TokenArrays, ratio: Ratio) -> Array:
    """`logp - logp_old`, or its mean over each row's optimized tokens at all of them."""
    gaps = logp - tokens.logp_old
    if ratio == "token":
        return gaps
    count = jnp.maximum(jnp.sum(tokens.mask, axis=-1, keepdims=True), 1).astype(gaps.dtype)
    total = jnp.sum(jnp.where(tokens.mask, gaps, 0), axis=-1, keepdims=True)
    return jnp.where(tokens.mask, total / count, 0)


def token_arrays(
    logp: Any, logp_old: Any, logp_ref: Any, advantages: Any, mask: Any
) -> tuple[Array, TokenArrays]:
    """`logp` and the rest: checked, widened, and 0 wherever the mask is off."""
    shape = tuple(np.shape(logp))
    if len(shape) != 2:
        raise ValueError(f"logp has shape {shape}; expected [batch, seq].")
    check_shapes(
        {
            "logp": logp,
            "logp_old": logp_old,
            "logp_ref": logp_ref,
            "advantages": advantages,
            "mask": mask,
        },
        reference="logp",
        allowed={
            "logp_old": (shape,),
            "logp_ref": (shape,),
            "mask": (shape,),
            "advantages": (shape[:1], shape),
        },
    )
    mask = check_mask(mask)
    dtype = at_least_float32(logp, logp_old, logp_ref, advantages)

    def masked(name: str, array) -> Array:
        array = jnp.asarray(array).astype(dtype)
        if array.ndim == 1:
            array = jnp.broadcast_to(array[:, None], shape)
        check_finite(name, array, mask)
        # The first of the two wheres ("safe where"): no NaN ever enters the arithmetic.
        return jnp.where(mask, array, jnp.zeros_like(array))

    return masked("logp", logp), TokenArrays(
        masked("logp_old", logp_old),
        None if logp_ref is None else masked("logp_ref", logp_ref),
        masked("advantages", advantages),
        mask,
    )


def loss_scalars(
    dtype: DTypeLike,
    update_tokens: ArrayLike,
    rows: int,
    *,
    clip: ArrayLike = 0.2,
    beta: ArrayLike = 1e-3,
    clip_high: ArrayLike | None = None,
    clip_dual: ArrayLike | None = None,
) -> LossScalars:
    """Check the scalars of a loss and cast them; arguments as in `loss_and_coefficients`."""
    if update_tokens is None:
        raise ValueError(
            "update_tokens is None; expected the number of optimized tokens in the complete "
            "update, over all microbatches and devices (mask.sum(), summed with psum)."
        )
    clip_high = clip if clip_high is None else clip_high
    check_divisors("update_tokens", update_tokens, rows)
    check_number("clip", clip, least=0.0)
    check_number("clip_high", clip_high, least=0.0)
    check_number("beta", beta, least=0.0)
    if clip_dual is not None:
        check_number("clip_dual", clip_dual, above=1.0)
    count = jnp.asarray(update_tokens).astype(dtype)
    # Only an exact 0 gives 0: a NaN count stays visible.
    weight = jnp.where(count == 0, 0.0, 1.0 / jnp.where(count == 0, 1.0, count)).astype(dtype)
    # 1 + clip in the array's own dtype, whether clip is a Python float or traced: same boundary.
    low = 1.0 - jnp.asarray(clip).astype(dtype)
    high = 1.0 + jnp.asarray(clip_high).astype(dtype)
    dual = jnp.asarray(np.inf if clip_dual is None else clip_dual).astype(dtype)
    beta = jnp.asarray(beta).astype(dtype)
    return LossScalars(weight[:, None] if weight.ndim else weight, low, high, dual, beta)


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """Raise unless a setting is one of the known words."""
    if value not in choices:
        raise ValueError(f"{name} is {value!r}; expected one of {', '.join(choices)}.")
