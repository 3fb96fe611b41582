"""Stacked blocks held in other segments than before."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

if TYPE_CHECKING:
    from hilore_jax.models.decoder import Decoder


def spans(lengths: tuple[int, ...]) -> list[tuple[int, int]]:
    """First block, and one after the last, of each run of blocks.

    Example:
        >>> spans((2, 1))
        [(0, 2), (2, 3)]
    """
    return list(pairwise(accumulate(lengths, initial=0)))


def restack(decoder: Decoder, lengths: tuple[int, ...]) -> Decoder:
    """Holds the blocks in stacks of the given lengths.

    Stacks that already fit are shared with `decoder`; the others are copied once, where they are
    (numpy arrays on the host, jax arrays on their device). Stacks may be finer than the runs of a
    policy: `hilore_jax.scan_blocks` reads each uncut, so that several plans can share them.

    Args:
        decoder: any segmentation.
        lengths: blocks a stack, `planning.refined.refined_segments` of the plans, say.

    Returns:
        A decoder with one segment a length.

    Raises:
        ValueError: the lengths are not positive or do not sum to the number of blocks.

    Example:
        >>> from hilore_jax.models.config import DecoderConfig
        >>> from hilore_jax.models.decoder import Decoder
        >>> config = DecoderConfig(
        ...     vocab_size=8, d_model=4, d_ff=6, n_layers=3, n_heads=1, n_kv_heads=1, head_dim=4
        ... )
        >>> restack(Decoder(config, rngs=nnx.Rngs(0)), (1, 2)).segment_lengths
        (1, 2)
    """
    if sum(lengths) != decoder.config.n_layers or min(lengths) < 1:
        raise ValueError(
            f"stacks of {lengths} blocks for {decoder.config.n_layers} layers; give positive "
            "lengths that sum to n_layers"
        )
    block_fn, params = decoder.blocks()
    held = spans(decoder.segment_lengths)

    def stack(start: int, stop: int) -> Any:
        parts = [
            (state, max(start, a) - a, min(stop, b) - a)
            for state, (a, b) in zip(params, held, strict=True)
            if a < stop and start < b
        ]
        if len(parts) == 1 and (start, stop) in held:
            return parts[0][0]

        def join(*leaves: Any) -> Any:
            pieces = [x[a:b] for x, (_, a, b) in zip(leaves, parts, strict=True)]
            xp = np if isinstance(pieces[0], np.ndarray) else jnp
            return xp.concatenate(pieces) if len(pieces) > 1 else pieces[0]

        return jax.tree.map(join, *(state for state, _, _ in parts))

    graphdef, state = nnx.split(decoder)
    result = nnx.merge(graphdef, state)
    stacks = (stack(a, b) for a, b in spans(lengths))
    result.segments = nnx.List([nnx.merge(block_fn.graphdef, part) for part in stacks])
    return result
