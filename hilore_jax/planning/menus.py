"""Menus by block: one shared menu, with each block's own risks."""

import dataclasses

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
