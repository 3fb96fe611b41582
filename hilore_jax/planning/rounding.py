"""A good integer choice near an LP relaxation's, which bounds the search for the best one."""

import numpy as np

_LIKELY = 256  # swaps that are tried in pairs


def rounded(
    group: np.ndarray,
    size: np.ndarray,
    cost: np.ndarray,
    matrix: np.ndarray,
    budgets: np.ndarray,
    reduced: np.ndarray,
) -> np.ndarray | None:
    """A good choice: the cheapest at the relaxation's prices, repaired, then improved by swaps.

    Args:
        group: `[items]`, ascending from 0.
        size: `[groups]`, members of each group.
        cost: `[items]`, scaled.
        matrix: `[2, items]`, scaled use of the budgets.
        budgets: `[2]`, scaled.
        reduced: `[items]`, reduced costs.

    Returns:
        Counts `[items]` within the budgets up to rounding; None where swaps cannot get there.
    """
    counts = np.zeros(len(cost), int)
    starts = np.flatnonzero(np.diff(group, prepend=-1))
    ends = np.append(starts[1:], len(cost))
    for start, end, members in zip(starts, ends, size, strict=True):
        counts[start + int(np.argmin(reduced[start:end]))] = members
    for _ in range(4 * len(cost)):  # repair: one swap at a time, the cheapest for what it mends
        used = matrix @ counts - budgets
        over = np.maximum(used, 0.0).sum()
        if over <= 0:
            break
        source, target = _swaps(group, counts, starts, ends)
        after = np.maximum(used[:, None] + matrix[:, target] - matrix[:, source], 0.0).sum(axis=0)
        mends = np.flatnonzero(after < over)
        if not len(mends):
            return None
        price = np.maximum(reduced[target] - reduced[source], 0.0)[mends] + 1e-6
        pick = mends[np.argmin(price / (over - after[mends]))]
        counts[source[pick]] -= 1
        counts[target[pick]] += 1
    for _ in range(4 * len(cost)):  # improve: the best pair of swaps (one may be idle)
        source, target = _swaps(group, counts, starts, ends)
        likely = np.argsort(reduced[target] - reduced[source], kind="stable")[:_LIKELY]
        source, target = np.append(source[likely], source[0]), np.append(target[likely], source[0])
        move = np.stack([cost, *matrix])[:, target] - np.stack([cost, *matrix])[:, source]
        free = budgets - matrix @ counts
        change = move[0][:, None] + move[0]
        works = (move[1][:, None] + move[1] <= free[0]) & (move[2][:, None] + move[2] <= free[1])
        works &= (source[:, None] != source) | (counts[source] > 1)
        change = np.where(works, change, np.inf)
        first, second = np.unravel_index(np.argmin(change), change.shape)
        if change[first, second] > -1e-9:
            break
        for pick in (first, second):
            counts[source[pick]] -= 1
            counts[target[pick]] += 1
    return counts


def _swaps(
    group: np.ndarray, counts: np.ndarray, starts: np.ndarray, ends: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Every (item held, other item of its group)."""
    held = np.flatnonzero(counts)
    groups = group[held]
    lengths = ends[groups] - starts[groups]
    source = np.repeat(held, lengths)
    offset = np.arange(len(source)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    return source, np.repeat(starts[groups], lengths) + offset
