"""Decoders whose linear maps have sketched gradients: LoGRA on the library's own blocks."""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Integer, UInt32

from hilore_jax.logra.projection import layer_key, update_key
from hilore_jax.logra.sketches import Sketches
from hilore_jax.models.adapters import abstract_decoder, share_arrays
from hilore_jax.models.config import LINEARS, DecoderConfig, SketchConfig
from hilore_jax.models.decoder import Decoder
from hilore_jax.models.restack import spans

_LOG = logging.getLogger("hilore_jax")


@dataclasses.dataclass(frozen=True)
class SketchedStack:
    """The sketched maps of one name in one stack of blocks.

    Attributes:
        segment: number of the stack.
        linear: the map's name, from `config.LINEARS`.
        first: number of the stack's first block, among all of the model.
        count: its blocks, n.
        shape: `(in, out)` of each.

    Example:
        >>> SketchedStack(1, "q_proj", 3, 2, (8, 8)).layers
        ('blocks.3.q_proj', 'blocks.4.q_proj')
    """

    segment: int
    linear: str
    first: int
    count: int
    shape: tuple[int, int]

    @property
    def name(self) -> str:
        """`<segment>.<linear>`, by which an update's arrays are kept."""
        return f"{self.segment}.{self.linear}"

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the layers, from which projections are drawn: the same in any segments."""
        blocks = range(self.first, self.first + self.count)
        return tuple(f"blocks.{block}.{self.linear}" for block in blocks)


def stack_keys(
    stacks: Sequence[SketchedStack], sketches: Sketches, update: Integer[Array, ""] | int
) -> dict[str, UInt32[Array, "n 2"]]:
    """Keys of the projections that all sketched maps have during one update.

    Args:
        stacks: the maps, `sketched_stacks`.
        sketches: the run's settings.
        update: number of the update, from 0; may be traced.

    Returns:
        `SketchedStack.name` -> one key a layer, uint32.

    Example:
        >>> stack = SketchedStack(0, "q_proj", 0, 2, (8, 8))
        >>> stack_keys([stack], Sketches(rank=2), 0)["0.q_proj"].shape
        (2, 2)
    """
    layers = [layer for stack in stacks for layer in stack.layers]
    keys = update_key(np.stack([layer_key(sketches.seed, layer) for layer in layers]), update)
    ends = list(itertools.accumulate(stack.count for stack in stacks))
    parts = jnp.split(keys, ends[:-1])
    return {stack.name: part for stack, part in zip(stacks, parts, strict=True)}


def sketched_stacks(config: DecoderConfig, segments: tuple[int, ...]) -> tuple[SketchedStack, ...]:
    """All sketched maps of a decoder, stack by stack.

    Args:
        config: of a decoder with sketches.
        segments: blocks in each of its stacks.

    Returns:
        One entry for each map of each stack.

    Example:
        >>> config = DecoderConfig(
        ...     vocab_size=8,
        ...     d_model=4,
        ...     d_ff=6,
        ...     n_layers=3,
        ...     n_heads=1,
        ...     n_kv_heads=1,
        ...     head_dim=4,
        ...     sketches=SketchConfig(Sketches(rank=2), ("up_proj",)),
        ... )
        >>> [stack.name for stack in sketched_stacks(config, (2, 1))]
        ['0.up_proj', '1.up_proj']
    """
    return tuple(
        SketchedStack(i, linear, start, stop - start, config.linear_shape(linear))
        for i, (start, stop) in enumerate(spans(segments))
        for linear in config.sketched_linears
    )


def add_sketches(
    decoder: Decoder,
    sketches: Sketches,
    targets: tuple[str, ...] = LINEARS,
    *,
    update: Integer[Array, ""] | int = 0,
) -> Decoder:
    """The same decoder, whose targets' gradients are those of `SketchSlot` variables.

    Its function is unchanged. Targets with a side of no more than the rank stay dense, which is
    logged.

    Args:
        decoder: a decoder without adapters or sketches; its arrays are shared, not copied.
        sketches: the run's settings.
        targets: linear maps to sketch, names from `LINEARS`.
        update: number of the update whose projections it holds, from 0; may be traced.

    Returns:
        A decoder with slots of zeros.

    Raises:
        ValueError: unknown targets, a rank for which none of them is left, or a decoder that has
            adapters or sketches.

    Example:
        >>> config = DecoderConfig(
        ...     vocab_size=8, d_model=4, d_ff=6, n_layers=1, n_heads=1, n_kv_heads=1, head_dim=4
        ... )
        >>> decoder = add_sketches(Decoder(config, rngs=nnx.Rngs(0)), Sketches(rank=2))
        >>> decoder.segments[0].up_proj.slot.shape, decoder.segments[0].up_proj.key.shape
        ((1, 6, 2), (1, 2))
    """
    if decoder.config.sketches is not None:
        raise ValueError(f"the decoder has sketches already, {decoder.config.sketches}")
    config = sketched_config(decoder.config, sketches, targets)
    result = abstract_decoder(config, decoder.segment_lengths)
    share_arrays(decoder, result)
    stacks = sketched_stacks(config, decoder.segment_lengths)
    keys = stack_keys(stacks, sketches, update)
    for stack in stacks:
        linear = getattr(result.segments[stack.segment], stack.linear)
        linear.slot.set_value(jnp.zeros(linear.slot.get_value().shape, jnp.float32))
        linear.key.set_value(keys[stack.name])
    return result


def sketched_config(
    config: DecoderConfig, sketches: Sketches, targets: tuple[str, ...] = LINEARS
) -> DecoderConfig:
    """The config of `add_sketches`' decoder; logs which targets stay dense.

    Args:
        config: without adapters.
        sketches: the run's settings.
        targets: linear maps to sketch, names from `LINEARS`.

    Returns:
        The config with sketches.

    Raises:
        ValueError: see `add_sketches`.

    Example:
        >>> config = DecoderConfig(
        ...     vocab_size=8, d_model=4, d_ff=6, n_layers=1, n_heads=1, n_kv_heads=1, head_dim=4
        ... )
        >>> len(sketched_config(config, Sketches(rank=2)).sketched_linears)
        7
    """
    found = dataclasses.replace(config, sketches=SketchConfig(sketches, targets))
    narrow = [name for name in targets if name not in found.sketched_linears]
    if narrow:
        _LOG.info(
            "logra: a sketch of rank %d is no smaller than the gradient of %s: left dense",
            sketches.rank,
            ", ".join(f"{name} {found.linear_shape(name)}" for name in narrow),
        )
    return found


def stacked(state: Any, leaf: str) -> dict[str, Array]:
    """Arrays of a decoder's state by `SketchedStack.name`: those whose path ends in `leaf`.

    Args:
        state: an `nnx.State` of a decoder, whole or in part.
        leaf: "kernel" or "slot", say.

    Returns:
        `<segment>.<linear>` -> `[n, ...]`.

    Example:
        >>> config = DecoderConfig(
        ...     vocab_size=8, d_model=4, d_ff=6, n_layers=1, n_heads=1, n_kv_heads=1, head_dim=4
        ... )
        >>> sorted(stacked(nnx.state(Decoder(config, rngs=nnx.Rngs(0))), "kernel"))[:2]
        ['0.down_proj', '0.gate_proj']
    """
    return {
        f"{path[1]}.{path[2]}": variable.get_value()
        for path, variable in nnx.to_flat_state(state)
        if path[0] == "segments" and path[-1] == leaf
    }
