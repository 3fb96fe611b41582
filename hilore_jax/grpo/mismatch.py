"""Weights for rollouts that another engine sampled: its log-probs are not quite the trainer's."""

from __future__ import annotations

import typing
from typing import Literal

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Float, Num, Shaped

from hilore_jax.grpo.checks import (
    at_least_float32,
    check_finite,
    check_mask,
    check_number,
    check_shapes,
)
from hilore_jax.grpo.terms import check_choice

Level = Literal["token", "sequence"]
Beyond = Literal["truncate", "mask"]


def mismatch_weights(
    logp_old: Num[Array | np.ndarray, "batch seq"],
    logp_rollout: Num[Array | np.ndarray, "batch seq"],
    mask: Shaped[Array | np.ndarray, "batch seq"],
    *,
    level: Level = "token",
    beyond: Beyond = "truncate",
    cap: ArrayLike = 2.0,
) -> Float[Array, "..."]:
    r"""Importance weights that correct the sampler's policy to the trainer's old one.

        r_t = exp(logp_old_t - logp_rollout_t)             level "token"
        r   = exp(sum_t logp_old_t - logp_rollout_t)       level "sequence"
        weight = min(r, cap)   truncate;   r if r <= cap else 0   mask

    They are >= 0 and known before the forward, so that they multiply the advantages:
    `min(rho w A, clip(rho) w A) = w min(rho A, clip(rho) A)`. The reference term is not weighted.
    With them omega, exposure and risk stay exact.

    Args:
        logp_old: `[batch, seq]`, of the trainer's model before the update, nats.
        logp_rollout: `[batch, seq]`, what the sampler reported, nats.
        mask: `[batch, seq]`, the optimized tokens.
        level: one weight a token or a row.
        beyond: what becomes of a ratio above the cap.
        cap: scalar > 0.

    Returns:
        `[batch, seq]`, or `[batch]` of level "sequence"; float32 (float64 if an input is); 1 where
        the mask is off.

    Raises:
        ValueError: shapes that differ, an unknown word, a cap that is not above 0, or (concrete) a
            number that is not finite under the mask.

    Example:
        >>> import jax.numpy as jnp, hilore_jax as hl
        >>> old, rollout = jnp.log(jnp.array([[0.5, 0.75]])), jnp.log(jnp.array([[0.5, 0.25]]))
        >>> print(hl.grpo.mismatch_weights(old, rollout, jnp.ones((1, 2))))
        [[1. 2.]]
    """
    check_choice("level", level, typing.get_args(Level))
    check_choice("beyond", beyond, typing.get_args(Beyond))
    check_number("cap", cap, above=0.0)
    shape = np.shape(logp_old)
    check_shapes(
        {"logp_rollout": logp_rollout, "mask": mask, "logp_old": logp_old},
        reference="logp_old",
        allowed={"logp_rollout": (shape,), "mask": (shape,)},
    )
    mask = check_mask(mask)
    check_finite("logp_old", logp_old, mask)
    check_finite("logp_rollout", logp_rollout, mask)
    dtype = at_least_float32(logp_old, logp_rollout)
    gaps = jnp.asarray(logp_old).astype(dtype) - jnp.asarray(logp_rollout).astype(dtype)
    gaps = jnp.where(mask, gaps, 0)
    if level == "sequence":
        gaps = jnp.sum(gaps, axis=-1)
    cap = jnp.asarray(cap).astype(dtype)
    held = jnp.exp(jnp.minimum(gaps, jnp.log(cap)))  # never overflows; NaN stays visible
    return jnp.where(gaps > jnp.log(cap), 0 if beyond == "mask" else cap, held)
