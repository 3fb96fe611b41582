"""Menus by block: one shared menu, with each block's own risks."""

import dataclasses
import math
from typing import Any

from hilore_jax.planning.menu import Entry

BlockRisks = tuple[tuple[float, ...], ...]


def block_menus(
    menu: tuple[Entry, ...], risks: BlockRisks | None, count: int
) -> tuple[tuple[Entry, ...], ...]:
    """One menu a block: the shared one, with the block's own risks where there are any."""
    if risks is None:
        return (menu,) * count
    return tuple(
        tuple(dataclasses.replace(e, risk=r) for e, r in zip(menu, row, strict=True))
        for row in risks
    )


def to_nulls(risks: Any) -> Any:
    """Infinity as null: JSON has no word for it."""
    if risks is None:
        return None
    return [[r if math.isfinite(r) else None for r in row] for row in risks]


def from_nulls(risks: Any) -> Any:
    """The inverse of `to_nulls`."""
    if risks is None:
        return None
    return tuple(tuple(math.inf if r is None else float(r) for r in row) for row in risks)
