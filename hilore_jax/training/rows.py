"""Which rows an update has to look at, and in which microbatches."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from hilore_jax.training.batch import Batch


@dataclasses.dataclass(frozen=True)
class Layout:
    """Rows of an update, dealt into microbatches of equal shape.

    Attributes:
        index: which of the update's rows (counted over all its microbatches) lies where.
        valid: False where the last microbatch is filled up with a row that does not count.
        skipped: rows left out.
    """

    index: Int[np.ndarray, "micro rows"]
    valid: Bool[np.ndarray, "micro rows"]
    skipped: int

    def sums(self, values: np.ndarray) -> np.ndarray:
        """Sum over the rows of each microbatch of a number a row, in its dtype."""
        return np.where(self.valid, values[self.index], 0).sum(axis=1)

    def places(self) -> Int[np.ndarray, "all_rows"]:
        """The microbatch of each of the update's rows; -1 of those that were left out."""
        found = np.full(int(self.valid.sum()) + self.skipped, -1, np.int32)
        for micro, (index, valid) in enumerate(zip(self.index, self.valid, strict=True)):
            found[index[valid]] = micro
        return found


def lay_out(
    dead: Bool[np.ndarray, "rows"],
    exposures: Float[np.ndarray, "rows"] | None,
    micro_rows: int,
) -> Layout:
    """Deals the rows that are not dead into as few microbatches as they need.

    With exposures, rows are sorted by them first: microbatches of low exposure may compress more,
    which a mixture of high and low may not. NaN counts as the highest.

    Args:
        dead: rows to leave out, see `hilore_jax.grpo.dead_rows`; all False leaves out none.
        exposures: a number a row to sort by; None keeps the order.
        micro_rows: rows of a microbatch.

    Returns:
        The layout; without any row to look at it has no microbatch.

    Example:
        >>> made = lay_out(np.array([False, True, False, False]), np.array([3.0, 0, 1, 2]), 2)
        >>> made.index.tolist(), made.valid.tolist(), made.skipped
        ([[2, 3], [0, 2]], [[True, True], [True, False]], 1)
    """
    kept = np.flatnonzero(~dead)
    if exposures is not None:
        kept = kept[np.argsort(exposures[kept], kind="stable")]
    count = -(-len(kept) // micro_rows)
    padding = count * micro_rows - len(kept)
    valid = np.arange(count * micro_rows) < len(kept)
    index = np.concatenate([kept, np.full(padding, kept[0] if len(kept) else 0, kept.dtype)])
    shape = (count, micro_rows)
    return Layout(index.astype(np.int32).reshape(shape), valid.reshape(shape), int(np.sum(dead)))


def take_rows(batch: Batch, index: Int[Array, "rows"], valid: Bool[Array, "rows"]) -> Batch:
    """One microbatch of some of an update's rows; invalid ones optimize no token."""

    def take(array: Array) -> Array:
        return array.reshape(-1, *array.shape[2:])[index]

    micro = jax.tree.map(take, batch)
    return dataclasses.replace(micro, completion_mask=micro.completion_mask & valid[:, None])


def spread_rows(layout: Layout, values: list[np.ndarray], like: np.ndarray) -> np.ndarray:
    """Values of packed rows, `[rows, ...]` a microbatch, where those rows lie in the update.

    Args:
        layout: how they were packed.
        values: one array a microbatch.
        like: `[all rows, ...]`, what rows that were left out hold.
    """
    out = like.copy()
    for index, valid, value in zip(layout.index, layout.valid, values, strict=True):
        out[index[valid]] = np.asarray(value)[valid]
    return out


def row_tokens(batch: Batch) -> Int[Array, "rows"]:
    """Optimized tokens of each of the update's rows."""
    mask = batch.completion_mask
    return jnp.sum(mask.reshape(-1, mask.shape[-1]), axis=-1, dtype=jnp.int32)
