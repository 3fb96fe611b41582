"""The random matrix A of a layer's sketch, from base seed, update number and layer name.

A is never stored: a trainer makes it again where it is needed, and so does whoever applies the
trainer's packets. Every element is a function of a counter alone, so that shards, devices and
jax's PRNG settings do not matter.
"""

from __future__ import annotations

import hashlib
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Integer, UInt32

from hilore_jax.logra.counter import threefry2x32

Kind = Literal["rademacher", "gaussian"]
KINDS: tuple[Kind, ...] = ("rademacher", "gaussian")

# Parts of the counter's first word that say what is drawn, so that no two draws share a counter.
_GAUSSIAN = 1 << 31


def layer_key(seed: int, layer: str) -> UInt32[np.ndarray, "2"]:
    """The key of one layer's projections: a hash of the base seed and the layer's name.

    Args:
        seed: the run's base seed, from 0 to 2^64 - 1.
        layer: the layer's name, `blocks.3.q_proj` say; the same however blocks are stacked.

    Returns:
        Two uint32 words.

    Raises:
        ValueError: the seed is out of range, or the name is empty.

    Example:
        >>> layer_key(0, "blocks.0.q_proj").dtype
        dtype('uint32')
    """
    if not 0 <= seed < 2**64:
        raise ValueError(f"the sketches' seed is {seed}, expected 0 to 2^64 - 1")
    if not layer:
        raise ValueError("a sketched layer's name is empty; its projection is drawn from it")
    digest = hashlib.blake2b(
        layer.encode(), digest_size=8, key=seed.to_bytes(8, "little"), person=b"hilore.logra"
    ).digest()
    return np.frombuffer(digest, "<u4").astype(np.uint32)


def update_key(
    layer: UInt32[Array | np.ndarray, "*n 2"], update: Integer[Array, ""] | int
) -> UInt32[Array, "*n 2"]:
    """The key of the projection that a layer has during one update.

    Args:
        layer: keys of layers, `layer_key`; any leading axes.
        update: number of the update, from 0; may be traced.

    Returns:
        uint32, the shape of `layer`.

    Example:
        >>> update_key(layer_key(0, "blocks.0.q_proj"), 7).shape
        (2,)
    """
    keys = jnp.asarray(layer, jnp.uint32)
    number = jnp.asarray(update, jnp.uint32)
    words = threefry2x32(keys[..., 0], keys[..., 1], number, jnp.uint32(0))
    return jnp.stack(words, axis=-1)


def projection(
    key: UInt32[Array, "2"],
    rank: int,
    width: int,
    kind: Kind = "rademacher",
    dtype: DTypeLike = jnp.float32,
) -> Float[Array, "rank width"]:
    """A of one layer and update: entries of mean 0 and variance 1 / rank (LoGRA; methods 2.1).

    Args:
        key: `update_key` of the layer; may be traced.
        rank: rows r of A.
        width: columns k of A, the layer's inputs.
        kind: "rademacher", entries +-1/sqrt(r), or "gaussian".
        dtype: of the result, bfloat16 or float32. Entries are rounded once, at the end.

    Returns:
        `[rank, width]`. Rademacher's signs are bit-equal everywhere; gaussian entries go through
        log and cos, which differ by rounding between backends.

    Raises:
        ValueError: rank or width below 1, or an unknown kind.

    Example:
        >>> key = update_key(layer_key(0, "blocks.0.q_proj"), 0)
        >>> (projection(key, 4, 3) * 2).astype(int).tolist()
        [[1, -1, -1], [1, -1, -1], [-1, 1, 1], [1, -1, -1]]
    """
    if rank < 1 or width < 1:
        raise ValueError(f"a projection of {rank} x {width} entries, expected at least 1 x 1")
    if kind not in KINDS:
        raise ValueError(f"projection kind is {kind!r}, expected one of {', '.join(KINDS)}")
    draw = _signs if kind == "rademacher" else _normals
    return (draw(key, rank, width) * np.float32(rank**-0.5)).astype(dtype)


def _words(key: Array, rows: int, width: int, tag: int) -> tuple[Array, Array]:
    """Two words for each of `rows x width` counters."""
    row = jax.lax.broadcasted_iota(jnp.uint32, (rows, width), 0) | jnp.uint32(tag)
    column = jax.lax.broadcasted_iota(jnp.uint32, (rows, width), 1)
    return threefry2x32(key[0], key[1], row, column)


def _signs(key: Array, rank: int, width: int) -> Array:
    # A counter gives 64 bits, for 64 rows of a column: hashing costs next to nothing, and columns,
    # over which weights are sharded, stay apart.
    words = jnp.stack(_words(key, -(-rank // 64), width, 0), axis=1)
    bits = jnp.arange(32, dtype=jnp.uint32)[:, None]
    signs = (words[:, :, None, :] >> bits) & jnp.uint32(1)
    return 1.0 - 2.0 * signs.reshape(-1, width)[:rank].astype(jnp.float32)


def _normals(key: Array, rank: int, width: int) -> Array:
    """Box and Muller's transform; 24 bits of the radius, so that its logarithm stays finite."""
    first, second = _words(key, -(-rank // 2), width, _GAUSSIAN)
    uniform = ((first >> 8).astype(jnp.float32) + 0.5) * np.float32(2.0**-24)
    angle = (second >> 8).astype(jnp.float32) * np.float32(2.0 * np.pi * 2.0**-24)
    radius = jnp.sqrt(-2.0 * jnp.log(uniform))
    pairs = jnp.stack([radius * jnp.cos(angle), radius * jnp.sin(angle)], axis=1)
    return pairs.reshape(-1, width)[:rank]
