"""Keys and values of past tokens, and the two passes over the blocks that use them."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, PyTree

from hilore_jax.models.attention_math import attend


class Cache(NamedTuple):
    """State of decoding; all rows write the same slot, each at its own position.

    Attributes:
        keys: keys after RoPE, compute dtype.
        values: values, compute dtype.
        valid: True at slots that hold a real token.
        position: position of each row's next token, tokens.
        index: slot that the next token is written to.
    """

    keys: Float[Array, "layers batch cache_len kv_width"]
    values: Float[Array, "layers batch cache_len kv_width"]
    valid: Bool[Array, "batch cache_len"]
    position: Int[Array, "batch"]
    index: Int[Array, ""]


def prefill_blocks(
    graphdef: nnx.GraphDef,
    segments: tuple[PyTree, ...],
    x: Float[Array, "batch seq d_model"],
    cos: Float[Array, "#batch seq half"],
    sin: Float[Array, "#batch seq half"],
    mask: Bool[Array, "batch seq"],
    cache_len: int,
) -> tuple[Float[Array, "batch seq d_model"], Cache]:
    """Runs the blocks over a prompt and keeps its keys and values.

    Args:
        graphdef: static part of a block.
        segments: stacked params of each segment.
        x: embedded prompt.
        cos: cosines of the positions.
        sin: sines of the positions.
        mask: True at real tokens.
        cache_len: slots of the cache, tokens.

    Returns:
        The residual stream after the last block, and the cache with `seq` slots written.

    Raises:
        ValueError: the prompt does not fit into the cache.
    """
    seq = mask.shape[1]
    if cache_len < seq:
        raise ValueError(
            f"cache_len is {cache_len} slots, but the prompt has {seq} tokens; "
            "give cache_len = prompt tokens + tokens to decode"
        )

    def body(x, params):
        block = nnx.merge(graphdef, params)
        q, k, v = block.heads(x, cos, sin)
        return block.finish(x, block.attend(q, k, v, mask)), (k, v)

    written = []
    for params in segments:
        x, kept = jax.lax.scan(body, x, params)
        written.append(kept)
    room = ((0, 0), (0, 0), (0, cache_len - seq), (0, 0))
    keys, values = (jnp.pad(jnp.concatenate(part), room) for part in zip(*written, strict=True))
    valid = jnp.pad(mask, room[1:3])
    position = jnp.sum(mask, axis=-1, dtype=jnp.int32)
    return x, Cache(keys, values, valid, position, jnp.asarray(seq, jnp.int32))


def decode_blocks(
    graphdef: nnx.GraphDef,
    segments: tuple[PyTree, ...],
    x: Float[Array, "batch 1 d_model"],
    cos: Float[Array, "batch 1 half"],
    sin: Float[Array, "batch 1 half"],
    cache: Cache,
) -> tuple[Float[Array, "batch 1 d_model"], Cache]:
    """Runs the blocks over one token of each row and writes its keys and values.

    The cache is a scan carry and is updated in place: as a scanned output it would be copied whole
    for every token.

    Args:
        graphdef: static part of a block.
        segments: stacked params of each segment.
        x: embedded token.
        cos: cosines of the positions.
        sin: sines of the positions.
        cache: state before the token; must have a free slot.

    Returns:
        The residual stream after the last block, and the cache with one more slot written.
    """
    ones = jnp.ones((x.shape[0], 1), bool)
    zero = jnp.zeros_like(cache.index)  # indices of one dtype, also under jax_enable_x64
    valid = jax.lax.dynamic_update_slice(cache.valid, ones, (zero, cache.index))

    def body(carry, params):
        x, keys, values, layer = carry
        block = nnx.merge(graphdef, params)
        config = block.config
        q, k, v = block.heads(x, cos, sin)
        at = (layer.astype(zero.dtype), zero, cache.index, zero)
        keys = jax.lax.dynamic_update_slice(keys, k[None], at)
        values = jax.lax.dynamic_update_slice(values, v[None], at)
        by_head = (*valid.shape, config.n_kv_heads, config.head_dim)
        out, _ = attend(
            q.reshape(q.shape[0], 1, config.n_kv_heads, -1, config.head_dim),
            jax.lax.dynamic_index_in_dim(keys, layer, keepdims=False).reshape(by_head),
            jax.lax.dynamic_index_in_dim(values, layer, keepdims=False).reshape(by_head),
            valid[:, None, :],
        )
        return (block.finish(x, out.reshape(q.shape)), keys, values, layer + 1), None

    carry = (x, cache.keys, cache.values, jnp.asarray(0, jnp.int32))
    for params in segments:
        carry, _ = jax.lax.scan(body, carry, params)
    x, keys, values, _ = carry
    return x, Cache(keys, values, valid, cache.position + 1, cache.index + 1)
