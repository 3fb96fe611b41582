"""The few choices that can still be best, once a bound and a good choice are known.

With multipliers w of the budgets, every choice within them costs

    cost(n) = lower + sum_i reduced_i n_i + w . (budgets - used(n)),    all terms >= 0

so that only choices whose last two terms fit below the known choice's distance from `lower` need
be looked at. Where menus are shared those are some thousands, and ties are decided exactly.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

_FAR = 1e9  # no group is as large


class Frame(NamedTuple):
    """A knapsack in scaled numbers, its Lagrangian bound, and how far above it to look."""

    group: np.ndarray  # [items], ascending
    size: np.ndarray  # [groups]
    cost: np.ndarray  # [items]
    matrix: np.ndarray  # [2, items], bytes and risk
    budgets: np.ndarray  # [2]
    weights: np.ndarray  # [2], multipliers >= 0
    reduced: np.ndarray  # [items], reduced costs >= 0
    upper: np.ndarray  # [items], most of each
    slack: float  # the known choice's cost less the bound


class _States(NamedTuple):
    """Partial choices, one a column."""

    left: np.ndarray  # [states], members of the current group without an item
    reduced: np.ndarray  # [states]
    used: np.ndarray  # [2, states]

    def take(self, index: np.ndarray) -> "_States":
        return _States(self.left[index], self.reduced[index], self.used[:, index])


def candidates(frame: Frame, most: int = 400_000) -> np.ndarray | None:
    """Every choice within the slack, `[choices, items]` counts; None where they are too many.

    Args:
        frame: the knapsack.
        most: partial choices to hold at a time.

    Returns:
        Counts of complete choices, among them all that cost no more than the known one. Budgets
        are kept up to rounding.
    """
    groups = sorted(_open_groups(frame), key=len)
    if not all(len(items) for items in groups):
        return np.zeros((0, len(frame.group)), int)
    after = _reach_after(frame, groups)
    states = _States(np.zeros(1, int), np.zeros(1), np.zeros((2, 1)))
    history: list[tuple[int, np.ndarray, np.ndarray]] = []
    for items, (low, high) in zip(groups, after, strict=True):
        states = states._replace(left=np.full(len(states.left), frame.size[frame.group[items[0]]]))
        for place, item in enumerate(items.tolist()):
            rest = items[place + 1 :]
            room = (frame.slack - states.reduced) / max(frame.reduced[item], 1e-12)
            room = np.minimum(np.minimum(states.left, frame.upper[item]), np.floor(room))
            room = np.maximum(room, 0).astype(int)
            if rest.size:
                first, last = _window(frame, states, item, rest, low, high)
                first, last = np.maximum(first, 0), np.minimum(last, room)
                each = np.maximum(last - first + 1, 0).astype(int)
                if np.sum(each) > most:
                    return None
                parent = np.repeat(np.arange(len(each)), each)
                count = np.arange(len(parent)) - np.repeat(np.cumsum(each) - each - first, each)
            else:
                parent = np.flatnonzero(states.left <= room)
                count = states.left[parent]
            states = states.take(parent)
            states = _States(
                states.left - count,
                states.reduced + frame.reduced[item] * count,
                states.used + frame.matrix[:, item, None] * count,
            )
            kept = np.flatnonzero(_hopeful(frame, states, rest, low, high))
            states = states.take(kept)
            history.append((item, parent[kept], count[kept]))
    return _counts(frame, history, len(states.left))


def _open_groups(frame: Frame) -> Iterator[np.ndarray]:
    """Open items of each group, those least wanted first."""
    for group in range(len(frame.size)):
        items = np.flatnonzero((frame.group == group) & (frame.upper > 0))
        yield items[np.argsort(-frame.reduced[items], kind="stable")]


def _reach_after(frame: Frame, groups: list[np.ndarray]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Least and most that the groups after each one use of the budgets."""
    low, high, found = np.zeros(2), np.zeros(2), []
    for items in reversed(groups):
        found.append((low, high))
        size = frame.size[frame.group[items[0]]]
        low = low + size * frame.matrix[:, items].min(axis=1)
        high = high + size * frame.matrix[:, items].max(axis=1)
    return found[::-1]


def _window(
    frame: Frame, states: _States, item: int, rest: np.ndarray, low: np.ndarray, high: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Least and most of an item with which a state can still end within budgets and slack."""
    first, last = np.full(len(states.left), -_FAR), np.full(len(states.left), _FAR)
    for row, budget, weight, used, least, most in zip(
        frame.matrix, frame.budgets, frame.weights, states.used, low, high, strict=True
    ):
        # Others of the group at their smallest must not exceed the budget ...
        ends = budget * (1 + 1e-12) + 1e-9 - (used + states.left * row[rest].min() + least)
        _narrow(first, last, row[item] - row[rest].min(), ends, upward=False)
        if weight > 0:  # ... and at their largest must leave no more unused than the slack allows.
            unused = (frame.slack - states.reduced) / weight
            ends = budget - unused - (used + states.left * row[rest].max() + most)
            _narrow(first, last, row[item] - row[rest].max(), ends, upward=True)
    return first.astype(int), last.astype(int)


def _narrow(
    first: np.ndarray, last: np.ndarray, slope: float, ends: np.ndarray, *, upward: bool
) -> None:
    """Keeps the whole n with `slope n >= ends` (upward) or `<= ends`, or a rounding more."""
    if abs(slope) < 1e-12:
        return
    limit = np.clip(ends / slope, -_FAR, _FAR)
    if (slope > 0) == upward:
        np.maximum(first, np.ceil(limit - 1e-6), out=first)
    else:
        np.minimum(last, np.floor(limit + 1e-6), out=last)


def _hopeful(
    frame: Frame, states: _States, rest: np.ndarray, low: np.ndarray, high: np.ndarray
) -> np.ndarray:
    """Which partial choices can still end within both budgets and the slack."""
    least, most = states.used + low[:, None], states.used + high[:, None]
    if rest.size:
        least = least + states.left * frame.matrix[:, rest].min(axis=1)[:, None]
        most = most + states.left * frame.matrix[:, rest].max(axis=1)[:, None]
    budgets = frame.budgets[:, None]
    unused = frame.weights @ np.maximum(budgets - most, 0.0)
    within = np.all(least <= budgets * (1 + 1e-12) + 1e-9, axis=0)
    return within & (states.reduced + unused <= frame.slack)


def _counts(
    frame: Frame, history: list[tuple[int, np.ndarray, np.ndarray]], states: int
) -> np.ndarray:
    counts = np.zeros((states, len(frame.group)), int)
    index = np.arange(states)
    for item, parent, count in reversed(history):
        counts[:, item] = count[index]
        index = parent[index]
    return counts
