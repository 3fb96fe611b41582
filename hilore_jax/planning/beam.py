"""Choices of many different groups near an LP relaxation's prices: a beam instead of a tree."""

import numpy as np

WIDTH = 4_000  # partial choices kept after each member; deterministic, unlike a time limit


def beam(
    group: np.ndarray,
    size: np.ndarray,
    cost: np.ndarray,
    matrix: np.ndarray,
    budgets: np.ndarray,
    weights: np.ndarray,
    reduced: np.ndarray,
    width: int = WIDTH,
) -> np.ndarray | None:
    """The cheapest choice within the budgets among those close to the relaxation's bound.

    A choice costs the bound, plus its reduced costs, plus the price of what it leaves of the
    budgets. Members are added one after another. Of all partial choices that can be completed
    within the budgets, the `width` of least such cost go on, were the rest chosen at the prices;
    what that would exceed a budget by counts at its price, too.

    Args:
        group: `[items]`, ascending from 0.
        size: `[groups]`, members of each group.
        cost: `[items]`, scaled.
        matrix: `[2, items]`, scaled use of the budgets.
        budgets: `[2]`, scaled.
        weights: `[2]`, the relaxation's prices of the budgets.
        reduced: `[items]`, reduced costs, at least 0.
        width: partial choices kept.

    Returns:
        Counts `[items]` within the budgets up to rounding; None where the beam lost all of them.
    """
    members = np.repeat(np.arange(len(size)), size)
    starts = np.flatnonzero(np.diff(group, prepend=-1))
    least = np.minimum.reduceat(matrix, starts, axis=1)[:, members]
    after = np.cumsum(least[:, ::-1], axis=1)[:, ::-1]  # of this member and those that follow
    after = np.concatenate([after, np.zeros((2, 1))], axis=1)
    ends = np.append(starts[1:], len(cost))
    priced = [a + int(np.argmin(reduced[a:b])) for a, b in zip(starts, ends, strict=True)]
    likely = matrix[:, priced][:, members]
    likely = likely.sum(axis=1, keepdims=True) - np.cumsum(likely, axis=1)  # of those that follow
    score, used, spent = np.zeros(1), np.zeros((2, 1)), np.zeros(1)
    steps: list[tuple[np.ndarray, np.ndarray]] = []
    for place, member in enumerate(members):
        items = np.flatnonzero(group == member)
        total = score[:, None] + reduced[items]
        uses = used[:, :, None] + matrix[:, None, items]
        room = (budgets - after[:, place + 1])[:, None, None]
        parent, which = np.nonzero(np.all(uses <= room + 1e-9, axis=0))
        if not len(parent):
            return None
        if len(parent) > width:
            left = uses[:, parent, which] + (likely[:, place] - budgets)[:, None]
            kept = np.argpartition(total[parent, which] + weights @ np.abs(left), width)[:width]
            parent, which = parent[kept], which[kept]
        score, used = total[parent, which], uses[:, parent, which]
        spent = spent[parent] + cost[items[which]]
        steps.append((parent, items[which]))
    at = int(np.argmin(spent))
    counts = np.zeros(len(cost), int)
    for parent, item in reversed(steps):
        counts[item[at]] += 1
        at = parent[at]
    return counts
