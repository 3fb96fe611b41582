"""What a policy means for one model and batch shape: block arguments, saved bytes, error."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from hilore_jax.actions import Policy
from hilore_jax.explain import explain
from hilore_jax.models.block import Block, BlockFn
from hilore_jax.models.config import DecoderConfig


def block_and_arguments(
    config: DecoderConfig, rows: int, seq: int
) -> tuple[BlockFn, tuple[Any, ...]]:
    """A block of the model as a pure function, and the shapes of its arguments.

    Args:
        config: the model's shape.
        rows: sequences.
        seq: tokens a sequence.

    Returns:
        `block(params, x, cos, sin, mask)` and its arguments as `jax.ShapeDtypeStruct`s, for
        `hilore_jax.explain(..., argnums=(0, 1))`; nothing is allocated.
    """
    abstract = nnx.eval_shape(lambda: Block(config, rngs=nnx.Rngs(0)))
    graphdef, params = nnx.split(abstract)
    half = jax.ShapeDtypeStruct((rows, seq, config.head_dim // 2), jnp.float32)
    x = jax.ShapeDtypeStruct((rows, seq, config.d_model), config.compute_dtype)
    mask = jax.ShapeDtypeStruct((rows, seq), jnp.bool_)
    return BlockFn(graphdef), (params, x, half, half, mask)


def kept_bytes(
    config: DecoderConfig, policies: Sequence[Policy], rows: int, seq: int
) -> dict[str, int]:
    """Bytes that all blocks keep for one microbatch's backward, by action; counted from shapes.

    Args:
        config: the model's shape.
        policies: one a block.
        rows: sequences of a microbatch.
        seq: tokens a sequence.

    Returns:
        `bytes_H` of stored (high precision), `bytes_L` of compressed (low), `bytes_R` of
        recomputed (always 0) and `bytes_O` of offloaded activations, bytes.
    """
    block, arguments = block_and_arguments(config, rows, seq)
    total = dict.fromkeys(_LETTERS.values(), 0)
    for policy, blocks in Counter(policies).items():
        kept = explain(policy, block, *arguments, argnums=(0, 1)).saved_bytes_by_action
        for action, letter in _LETTERS.items():
            total[letter] += blocks * kept[action]
    return total


_LETTERS = {
    "store": "bytes_H",
    "compress": "bytes_L",
    "recompute": "bytes_R",
    "offload": "bytes_O",
}


def relative_error(found: Any, exact: Any) -> float:
    """`||found - exact|| / ||exact||` over all leaves; NaN where exact is zero.

    Example:
        >>> relative_error({"w": jnp.array([3.0, 5.0])}, {"w": jnp.array([3.0, 4.0])})
        0.20000000298023224
    """
    leaves = zip(jax.tree.leaves(found), jax.tree.leaves(exact), strict=True)
    error = sum((jnp.sum((f - e) ** 2) for f, e in leaves), jnp.float32(0))
    norm = sum((jnp.sum(e**2) for e in jax.tree.leaves(exact)), jnp.float32(0))
    return float(jnp.sqrt(error / norm))
