"""The one way in which a step reaches the weights, for the trainer and for who follows it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt32

from hilore_jax.logra.counter import threefry2x32

ROWS = 1024
"""Rows of a weight that are moved at a time."""
_ROUNDING = 1 << 30  # in the counter's first word, see `projection`


def merge_factor(
    kernel: Float[Array, "d_in d_out"],
    factor: Float[Array, "d_out rank"],
    a: Float[Array, "rank d_in"],
    key: UInt32[Array, "2"] | None = None,
    *,
    rows: int | None = ROWS,
) -> Float[Array, "d_in d_out"]:
    """`W <- W - (F A)^T`, a block of rows at a time (LoGRA; methods 2.3 and 2.4).

    In float32 weights the sum is rounded to nearest. In bfloat16 ones most steps are smaller than
    half a unit in the last place and would be lost: there it is rounded up or down at random, up
    with the probability that makes the mean right, by a counter and the layer's key.

    Args:
        kernel: W, `[in, out]`, float32 or bfloat16.
        factor: F = bf16(alpha D), `[out, rank]`, as it is sent.
        a: the projection, `[rank, in]`.
        key: `update_key` of the layer; needed for bfloat16 weights.
        rows: rows of W at a time; None: all, where rows are sharded over devices.

    Returns:
        The kernel moved, in its dtype. Donate the kernel to have it moved in place.

    Raises:
        ValueError: shapes do not fit, other dtypes of weights, or bfloat16 ones without a key.

    Example:
        >>> kernel, factor, a = jnp.ones((3, 2)), jnp.ones((2, 1), jnp.bfloat16), jnp.ones((1, 3))
        >>> merge_factor(kernel, factor, a).tolist()
        [[0.0, 0.0], [0.0, 0.0], [0.0, 0.0]]
    """
    d_in, d_out = kernel.shape
    if factor.shape[0] != d_out or a.shape != (factor.shape[1], d_in):
        raise ValueError(
            f"merge_factor found a kernel {kernel.shape}, a factor {factor.shape} and a projection "
            f"{a.shape}; expected [in, out], [out, rank] and [rank, in]"
        )
    if kernel.dtype not in (jnp.float32, jnp.bfloat16):
        raise ValueError(f"the kernel is {kernel.dtype}, expected float32 or bfloat16")
    if kernel.dtype != jnp.float32 and key is None:
        raise ValueError(
            "merging into bfloat16 weights rounds at random, which needs the layer's key: "
            "merge_factor(kernel, factor, a, update_key(...)); or keep the weights in float32"
        )
    size = min(rows or d_in, d_in)
    wide_factor = factor.astype(jnp.float32)

    dtype = kernel.dtype
    # XLA's CPU compiler widens updates of bfloat16 slices: all of W would be converted for each
    # block. Words of 16 bits it leaves alone.
    stored = jnp.uint16 if dtype == jnp.bfloat16 else dtype

    def move(start: Array, words: Array, size: int) -> Array:
        part = _read(jax.lax.dynamic_slice_in_dim(words, start, size), dtype)
        columns = jax.lax.dynamic_slice_in_dim(a, start, size, axis=1).astype(jnp.float32)
        step = jnp.einsum("rk,dr->kd", columns, wide_factor, precision="highest")
        moved = part.astype(jnp.float32) - step
        if key is not None and dtype != jnp.float32:
            moved = stochastic_round(moved, key, start)
        return jax.lax.dynamic_update_slice_in_dim(words, _read(moved, stored), start, 0)

    whole = d_in // size
    words = _read(kernel, stored)
    words = jax.lax.fori_loop(0, whole, lambda i, w: move(i * size, w, size), words)
    rest = d_in - whole * size
    words = move(jnp.int32(whole * size), words, rest) if rest else words
    return _read(words, dtype)


def _read(bits: Array, dtype: DTypeLike) -> Array:
    """The same bits as another dtype of as many."""
    return jax.lax.bitcast_convert_type(bits, dtype)


def stochastic_round(
    x: Float[Array, "rows columns"], key: UInt32[Array, "2"], first_row: Array | int = 0
) -> Float[Array, "rows columns"]:
    """Each value as one of its two bfloat16 neighbours, at random, right in the mean.

    Args:
        x: float32.
        key: `update_key` of the layer.
        first_row: number of the first row, where x is a part of a weight.

    Returns:
        bfloat16, the shape of x. The choice depends on the key and on an entry's place alone.

    Example:
        >>> from hilore_jax.logra.projection import layer_key, update_key
        >>> key = update_key(layer_key(0, "q"), 0)
        >>> stochastic_round(jnp.full((1, 5), 1.0 + 2.0**-8), key).tolist()
        [[1.0, 1.0, 1.0, 1.0, 1.0078125]]
    """
    rows, columns = x.shape
    quarter = -(-columns // 4)  # a counter has 64 bits: 16 for each of four columns
    row = jax.lax.broadcasted_iota(jnp.uint32, (rows, quarter), 0)
    row = (row + jnp.asarray(first_row).astype(jnp.uint32)) | jnp.uint32(_ROUNDING)
    column = jax.lax.broadcasted_iota(jnp.uint32, (rows, quarter), 1)
    words = jnp.stack(threefry2x32(key[0], key[1], row, column), axis=-1)
    halves = jnp.stack([words & np.uint32(0xFFFF), words >> 16], axis=-1)
    noise = halves.reshape(rows, 4 * quarter)[:, :columns]
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    rounded = (bits + noise) & np.uint32(0xFFFF0000)
    wide = jax.lax.bitcast_convert_type(rounded, jnp.float32)
    return jnp.where(jnp.isfinite(x), wide, x).astype(jnp.bfloat16)
