"""Ratio, clipping and divergence metrics as sums, so that microbatches add up exactly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Num, Shaped

from hilore_jax.grpo.terms import k3, loss_scalars, tangent_exp, token_arrays


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RatioMetrics:
    """Sums over tokens that add up exactly over microbatches; `means()` gives TRL's names.

    Attributes:
        tokens: Optimized tokens, int32.
        kl: Sum of k3 against the reference, nats, float32; None without a reference.
        clip_low: Tokens with `A < 0` and `rho < 1 - clip`, int32.
        clip_high: Tokens with `A >= 0` and `rho > 1 + clip`, int32.
        is_ratio: Sum of rho, float32.
        is_ratio_max: Largest rho, float32; 0 without tokens.
    """

    # Any: JAX also fills a pytree node with batched arrays, axes and its own placeholders.
    tokens: Any
    kl: Any
    clip_low: Any
    clip_high: Any
    is_ratio: Any
    is_ratio_max: Any

    def __add__(self, other: RatioMetrics) -> RatioMetrics:
        """The metrics of both microbatches together."""
        return RatioMetrics(
            self.tokens + other.tokens,
            None if self.kl is None or other.kl is None else self.kl + other.kl,
            self.clip_low + other.clip_low,
            self.clip_high + other.clip_high,
            self.is_ratio + other.is_ratio,
            jnp.maximum(self.is_ratio_max, other.is_ratio_max),
        )

    def means(self) -> dict[str, Array]:
        """Means per token under TRL's names; `kl` is absent without a reference.

        Returns:
            Name -> float32 scalar; 0 without tokens.
        """
        count = jnp.maximum(self.tokens, 1).astype(jnp.float32)
        sums = {
            "kl": self.kl,
            "clip_ratio/low_mean": self.clip_low,
            "clip_ratio/high_mean": self.clip_high,
            "clip_ratio/region_mean": self.clip_low + self.clip_high,
            "is_ratio/mean": self.is_ratio,
        }
        means = {k: v.astype(jnp.float32) / count for k, v in sums.items() if v is not None}
        return means | {"is_ratio/max": self.is_ratio_max}


def ratio_metrics(
    logp: Num[Array | np.ndarray, "..."],
    logp_old: Num[Array | np.ndarray, "..."],
    logp_ref: Num[Array | np.ndarray, "..."] | None,
    advantages: Num[Array | np.ndarray, "..."],
    mask: Shaped[Array | np.ndarray, "..."],
    clip: ArrayLike = 0.2,
    clip_high: ArrayLike | None = None,
) -> RatioMetrics:
    """Ratio, clipping and reference divergence of a microbatch, as sums over its tokens.

    Args:
        logp: As in `loss_and_coefficients`, `[batch, seq]`, nats; likewise the next four.
        logp_old: `[batch, seq]`, nats.
        logp_ref: `[batch, seq]`, nats, or None.
        advantages: `[batch]` or `[batch, seq]`.
        mask: `[batch, seq]`.
        clip: Scalar eps >= 0.
        clip_high: Scalar >= 0, upper eps if it differs.

    Returns:
        `RatioMetrics`, without gradient. Add those of the microbatches, then call `means()`.

    Example:
        >>> import jax.numpy as jnp, hilore_jax as hl
        >>> logp = jnp.log(jnp.array([[1.5, 1.0]]))
        >>> ones = jnp.ones((1, 2))
        >>> metrics = hl.grpo.ratio_metrics(logp, 0 * ones, None, jnp.array([1.0]), ones)
        >>> print(metrics.means()["clip_ratio/high_mean"], metrics.tokens)
        0.5 2
    """
    values, tokens = jax.tree.map(
        jax.lax.stop_gradient, token_arrays(logp, logp_old, logp_ref, advantages, mask)
    )
    scalars = loss_scalars(values.dtype, 1, clip, clip_high, 0.0)
    rho = tangent_exp(values - tokens.logp_old)
    positive = tokens.advantages >= 0

    def total(values: Array) -> Array:
        values = jnp.where(tokens.mask, values, jnp.zeros_like(values))
        return jnp.sum(values, dtype=jnp.int32 if values.dtype == jnp.bool_ else None)

    ratio = jnp.where(tokens.mask, rho, jnp.zeros_like(rho))
    return RatioMetrics(
        tokens=jnp.sum(tokens.mask, dtype=jnp.int32),
        kl=None if tokens.logp_ref is None else total(k3(tokens.logp_ref - values)),
        clip_low=total(jnp.logical_and(jnp.logical_not(positive), rho < scalars.low)),
        clip_high=total(jnp.logical_and(positive, rho > scalars.high)),
        is_ratio=total(rho),
        is_ratio_max=jnp.max(ratio, initial=0.0),
    )
