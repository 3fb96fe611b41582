"""Ghat, the norm of an update's gradient to which risks are relative: a moving average."""

import math
from typing import SupportsFloat

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float

# That of LoGRA's average of the policies' mismatch. In two runs of 400 updates, those of
# `experiments/learning_check.py` under GC with seeds 0 and 1, Ghat missed the norm that came by
# 0.78 and 0.89, root mean square of the logarithm of their ratio; no weight was better by more than
# 0.01. Without the bound it is 0.88 and 1.03, with the first updates' norm in all 1.15 and 1.34.
WEIGHT = 0.3
MOST = 2.0  # a norm counts as no more than so many times the average


def first_ghat(norm: float) -> Float[Array, ""]:
    """Ghat of the first update: the mean norm of a calibration's complete updates.

    Args:
        norm: the calibration's.

    Raises:
        ValueError: not a finite float32 above 0.

    Example:
        >>> float(first_ghat(0.5))
        0.5
    """
    return jnp.asarray(_held(norm), jnp.float32)


def next_ghat(
    ghat: ArrayLike, norm: ArrayLike, applied: ArrayLike = True, *, weight: float = WEIGHT
) -> Float[Array, ""]:
    """Ghat of the next update, after one whose gradient had a norm.

        ghat_{n+1} = (1 - w) ghat_n + w min(||g_n||, 2 ghat_n)

    The norm is the complete update's, before clipping. It enters only after its update, as a risk
    has to be known before backward. The bound is for a single huge gradient: risks are divided by
    Ghat, so that an average far above the norms to come would let far too much be compressed. A
    lasting rise is followed by a factor of up to `1 + w` an update.

    Args:
        ghat: scalar, of the update that was done.
        norm: scalar `||g_n||`.
        applied: whether the update counted. Where it did not (refused, or without an optimized
            token), or its norm is 0 or not finite, Ghat stays as it is.
        weight: w, in [0, 1]; 0 keeps the first one.

    Returns:
        Scalar, float32.

    Example:
        >>> [float(next_ghat(1.0, norm, weight=0.5)) for norm in (0.5, 64.0, 0.0)]
        [0.75, 1.5, 1.0]
    """
    old, norm = jnp.asarray(ghat, jnp.float32), jnp.asarray(norm, jnp.float32)
    counts = jnp.asarray(applied) & (norm > 0) & jnp.isfinite(norm)
    new = (1 - weight) * old + weight * jnp.minimum(norm, MOST * old)
    return jnp.where(counts, new, old)


def drift(ghat: SupportsFloat, norm: float) -> float:
    """How far Ghat is from the calibration's: risks shrink, and exposures may grow, by as much.

    Args:
        ghat: scalar float32, on the host.
        norm: the calibration's.

    Returns:
        `ghat / norm`; exactly 1 before the first update.

    Example:
        >>> drift(first_ghat(0.1), 0.1), drift(0.25, 0.5)
        (1.0, 0.5)
    """
    return float(ghat) / float(_held(norm))


def _held(norm: float) -> np.float32:
    """A calibration's norm as float32."""
    held = np.float32(norm)
    if not 0 < held < math.inf:
        raise ValueError(
            f"the gradient norm of a calibration is {norm}: expected a finite number > 0, since "
            "risks are relative to it. Calibrate again."
        )
    return held
