"""What a policy means for one model and batch shape: block arguments and saved bytes."""

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
