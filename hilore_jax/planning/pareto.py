"""Items that no other one beats, and a few of many that stand for all."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

Item = TypeVar("Item")


def undominated(
    items: Iterable[Item], figures: Callable[[Item], tuple[float | int, ...]], tie: float = 1e-9
) -> list[Item]:
    """Items that no other is as good as in all figures and better in one; ties once.

    Args:
        items: any order.
        figures: of an item, all to be small; the second, seconds, ties within a relative `tie`.
        tie: how far seconds may differ and still be equal.

    Returns:
        The items, sorted by their figures.

    Example:
        >>> undominated([(1, 3.0, 0.0), (2, 3.0, 0.0), (2, 1.0, 0.5), (3, 1.0, 0.0)], lambda x: x)
        [(1, 3.0, 0.0), (2, 1.0, 0.5), (3, 1.0, 0.0)]
    """
    kept: list[Item] = []
    for item in sorted(items, key=figures):
        mine = list(figures(item))
        mine[1] *= 1 + tie
        if not any(
            all(a <= b for a, b in zip(figures(other), mine, strict=True)) for other in kept
        ):
            kept.append(item)
    return kept


def thinned(
    items: Sequence[Item],
    wanted: Sequence[Any],
    limit: int,
    figures: Callable[[Item], tuple[float | int, ...]],
) -> list[Item]:
    """At most `limit` items: the wanted ones, then always the one farthest from those kept.

    Args:
        items: with a `policy` each.
        wanted: others, or the same, whose policies come first.
        limit: how many.
        figures: of an item; distances are between figures that are divided by their largest.
    """
    if len(items) <= limit:
        return list(items)
    first = [p for p in items if any(p.policy == w.policy for w in wanted)][:limit]  # type: ignore
    first = first or list(items[:1])
    tops = [max(column) or 1.0 for column in zip(*map(figures, items), strict=True)]

    def distance(a: Item, b: Item) -> float:
        pairs = zip(figures(a), figures(b), tops, strict=True)
        return sum(((x - y) / t) ** 2 for x, y, t in pairs)

    kept, rest = list(first), [p for p in items if p not in first]
    nearest = [min(distance(p, k) for k in kept) for p in rest]
    while len(kept) < limit:
        far = max(range(len(rest)), key=nearest.__getitem__)
        kept.append(rest.pop(far))
        nearest.pop(far)
        nearest = [min(n, distance(p, kept[-1])) for n, p in zip(nearest, rest, strict=True)]
    return kept
