"""Rotary position embedding in the rotate-half convention of Hugging Face checkpoints."""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from hilore_jax.models.config import DecoderConfig


def frequencies(config: DecoderConfig) -> np.ndarray:
    """Angles per token: `theta^(-2i / head_dim)` (Su et al. 2021, arXiv 2104.09864).

    With `config.rope_scaling`, wavelengths beyond the low-frequency limit are stretched by the
    factor, those under the high-frequency limit are kept, the rest interpolated (Llama 3).

    Args:
        config: head_dim, rope_theta and rope_scaling are read.

    Returns:
        `[head_dim / 2]` float64, radians a token.

    Example:
        >>> config = DecoderConfig(
        ...     vocab_size=8,
        ...     d_model=4,
        ...     d_ff=6,
        ...     n_layers=1,
        ...     n_heads=1,
        ...     n_kv_heads=1,
        ...     head_dim=4,
        ...     rope_theta=100.0,
        ... )
        >>> frequencies(config).tolist()
        [1.0, 0.1]
    """
    exponent = np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim
    freq = config.rope_theta**-exponent
    scaling = config.rope_scaling
    if scaling is None:
        return freq
    turns = scaling.original_max_seq * freq / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return keep * freq + (1 - keep) * freq / scaling.factor


def positions(mask: Bool[Array, "batch seq"]) -> Int[Array, "batch seq"]:
    """Position of each token among the real ones of its row; padding before them gets 0.

    Args:
        mask: True at real tokens.

    Returns:
        int32 positions, tokens.

    Example:
        >>> positions(jnp.array([[False, True, True, True]])).tolist()
        [[0, 0, 1, 2]]
    """
    return jnp.maximum(jnp.cumsum(mask.astype(jnp.int32), axis=-1) - 1, 0)


def cos_sin(
    position: Int[Array, "batch seq"], config: DecoderConfig
) -> tuple[Float[Array, "batch seq half"], Float[Array, "batch seq half"]]:
    """Cosine and sine of the angles of each position, float32.

    Args:
        position: tokens, `[batch, seq]`; batch may be 1 when all rows agree.
        config: head_dim, rope_theta and rope_scaling are read.

    Returns:
        Two arrays `[batch, seq, head_dim / 2]`.

    Example:
        >>> config = DecoderConfig(
        ...     vocab_size=8, d_model=4, d_ff=6, n_layers=1, n_heads=1, n_kv_heads=1, head_dim=4
        ... )
        >>> cos_sin(jnp.zeros((1, 1), jnp.int32), config)[0].tolist()
        [[[1.0, 1.0]]]
    """
    freq = jnp.asarray(frequencies(config), jnp.float32)
    angle = position[..., None].astype(jnp.float32) * freq
    return jnp.cos(angle), jnp.sin(angle)


def rotate(
    x: Float[Array, "batch seq heads head_dim"],
    cos: Float[Array, "#batch seq half"],
    sin: Float[Array, "#batch seq half"],
) -> Float[Array, "batch seq heads head_dim"]:
    """Rotates feature i with feature i + head_dim / 2 by the position's angle.

    Args:
        x: queries or keys by head.
        cos: cosines from `cos_sin`.
        sin: sines from `cos_sin`.

    Returns:
        The rotated array, computed in float32, in the dtype of x.

    Example:
        >>> x = jnp.array([1.0, 2.0]).reshape(1, 1, 1, 2)
        >>> rotate(x, jnp.zeros((1, 1, 1)), jnp.ones((1, 1, 1))).ravel().tolist()
        [-2.0, 1.0]
    """
    left, right = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, :, None, :], sin[:, :, None, :]
    turned = jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)
    return turned.astype(x.dtype)
