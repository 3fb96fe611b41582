"""What a calibration tries: each policy on each block alone, then random ones on all at once."""

from collections.abc import Sequence
from typing import Any

import numpy as np

_LEAST_JOINT = 4


def choices(
    microbatches: Sequence[Any], entries: int, blocks: int, count: int, passes: int, seed: int
) -> list[list[list[int]]]:
    """The choices to try on each microbatch beside the exact one.

    Args:
        microbatches: at least `count`.
        entries: policies.
        blocks: blocks of the model.
        count: microbatches to use.
        passes: most gradients, the exact ones included.
        seed: of the joint choices.

    Returns:
        `[count][choices][blocks]`: 0 for an exact block, else the number of its policy from 1.

    Raises:
        ValueError: too few microbatches or passes.

    Example:
        >>> choices([0, 0], entries=1, blocks=2, count=2, passes=4, seed=0)
        [[[1, 0]], [[0, 1]]]
    """
    if len(microbatches) < count:
        raise ValueError(
            f"hl.calibrate was given {len(microbatches)} microbatches, expected {count}: sample "
            "more, or ask for fewer with count=."
        )
    least = count + entries * blocks
    joint = min(passes - least, 4 * count)
    if joint < 0 or (joint < _LEAST_JOINT and entries * blocks >= 8 * _LEAST_JOINT):
        raise ValueError(
            f"{entries} policies on {blocks} blocks and {count} exact gradients take {least} "
            f"passes, and {_LEAST_JOINT} joint ones, but passes={passes}: give fewer policies."
        )
    found: list[list[list[int]]] = [[] for _ in range(count)]
    for unit in range(entries * blocks):
        index = [0] * blocks
        index[unit % blocks] = 1 + unit // blocks
        # Policies begin one further each: in step with the blocks, what belongs to a microbatch
        # could not be told from what belongs to a block.
        found[(unit + unit // blocks) % count].append(index)
    random = np.random.default_rng(seed)
    for n in range(joint):
        while sum(map(bool, index := random.integers(0, entries + 1, blocks).tolist())) < 2:
            if blocks < 2:
                return found
        if index not in found[n % count]:
            found[n % count].append(index)
    return found
