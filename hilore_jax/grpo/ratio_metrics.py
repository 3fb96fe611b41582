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

from hilore_jax.grpo.objective import check_form
from hilore_jax.grpo.terms import (
    Ratio,
    Surrogate,
    k3,
    log_ratios,
    loss_scalars,
    tangent_exp,
    token_arrays,
)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RatioMetrics:
    """Sums over tokens that add up exactly over microbatches; `means()` gives TRL's names.

    Attributes:
        tokens: Optimized tokens, int32.
        kl: Sum of k3 against the reference, nats, float32; None without a reference.
        clip_low: Tokens with `A < 0` and `rho < 1 - clip`, int32.
        clip_high: Tokens with `A >= 0` and `rho > 1 + clip`, int32; of the surrogate "cispo", whose
            ratio was held, of both signs.
        clip_dual: Tokens with `A < 0` and `rho > clip_dual`, int32; None without.
        is_ratio: Sum of rho, float32.
        is_ratio_max: Largest rho, float32; 0 without tokens.
    """

    # Any: JAX also fills a pytree node with batched arrays, axes and its own placeholders.
    tokens: Any
    kl: Any
    clip_low: Any
    clip_high: Any
    clip_dual: Any
    is_ratio: Any
    is_ratio_max: Any

    def __add__(self, other: RatioMetrics) -> RatioMetrics:
        """The metrics of both microbatches together."""
        return RatioMetrics(
            self.tokens + other.tokens,
            None if self.kl is None or other.kl is None else self.kl + other.kl,
            self.clip_low + other.clip_low,
            self.clip_high + other.clip_high,
            None if self.clip_dual is None else self.clip_dual + other.clip_dual,
            self.is_ratio + other.is_ratio,
            jnp.maximum(self.is_ratio_max, other.is_ratio_max),
        )

    def _outside(self) -> Any:
        found = self.clip_low + self.clip_high
        return found if self.clip_dual is None else found + self.clip_dual

    def means(self) -> dict[str, Array]:
        """Means per token under TRL's names; `kl` and `dual_mean` are absent if they have no sense.

        Returns:
            Name -> float32 scalar; 0 without tokens.
        """
        count = jnp.maximum(self.tokens, 1).astype(jnp.float32)
        sums = {
            "kl": self.kl,
            "clip_ratio/low_mean": self.clip_low,
            "clip_ratio/high_mean": self.clip_high,
            "clip_ratio/dual_mean": self.clip_dual,
            "clip_ratio/region_mean": self._outside(),
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
    clip_dual: ArrayLike | None = None,
    ratio: Ratio = "token",
    surrogate: Surrogate = "clip",
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
        clip_dual: As in `loss_and_coefficients`, like the next two.
        ratio: See there.
        surrogate: See there.

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
    check_form(advantages, clip_dual, ratio, surrogate)
    values, tokens = jax.tree.map(
        jax.lax.stop_gradient, token_arrays(logp, logp_old, logp_ref, advantages, mask)
    )
    scalars = loss_scalars(
        values.dtype,
        1,
        len(values),
        clip=clip,
        beta=0.0,
        clip_high=clip_high,
        clip_dual=clip_dual,
    )
    rho = tangent_exp(log_ratios(values, tokens, ratio))
    positive = tokens.advantages >= 0
    negative = jnp.logical_not(positive)
    above, below = rho > scalars.high, rho < scalars.low
    if surrogate == "cispo":
        positive, below = jnp.ones_like(positive), jnp.zeros_like(below)

    def total(values: Array) -> Array:
        values = jnp.where(tokens.mask, values, jnp.zeros_like(values))
        return jnp.sum(values, dtype=jnp.int32 if values.dtype == jnp.bool_ else None)

    shown = jnp.where(tokens.mask, rho, jnp.zeros_like(rho))
    return RatioMetrics(
        tokens=jnp.sum(tokens.mask, dtype=jnp.int32),
        kl=None if tokens.logp_ref is None else total(k3(tokens.logp_ref - values)),
        clip_low=total(negative & below),
        clip_high=total(positive & above),
        clip_dual=None if clip_dual is None else total(negative & (rho > scalars.dual)),
        is_ratio=total(rho),
        is_ratio_max=jnp.max(shown, initial=0.0),
    )
