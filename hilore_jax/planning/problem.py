"""The multiple-choice knapsack of `knapsack.solve`: items by group, two budgets, exact sums."""

import dataclasses
import math

import numpy as np

_ROW = 1e2  # largest coefficient of a budget's row after scaling


@dataclasses.dataclass(frozen=True)
class Knapsack:
    """Items by group, and the budgets.

    Attributes:
        group: `[items]`, ascending from 0.
        size: `[groups]`, members of each group.
        cost: `[items]`, seconds, finite and not negative.
        nbytes: `[items]`, whole bytes, int64.
        risk: `[items]`, what adds up against `limit`, finite and not negative.
        memory: bytes.
        limit: budget of the sum of risks.
    """

    group: np.ndarray
    size: np.ndarray
    cost: np.ndarray
    nbytes: np.ndarray
    risk: np.ndarray
    memory: int
    limit: float

    def bytes_of(self, counts: np.ndarray) -> int:
        """Exact bytes."""
        return sum(int(n) * int(b) for n, b in zip(counts, self.nbytes, strict=True) if n)

    def risk_of(self, counts: np.ndarray) -> float:
        """The correctly rounded sum of risks."""
        return math.fsum(np.repeat(self.risk, counts))

    def cost_of(self, counts: np.ndarray) -> float:
        """The correctly rounded sum of costs."""
        return math.fsum(np.repeat(self.cost, counts))

    def fits(self, counts: np.ndarray) -> bool:
        """Whether the counts are complete and keep both budgets, without any tolerance."""
        members = np.bincount(self.group, counts, len(self.size))
        return (
            bool(np.all(counts >= 0) and np.array_equal(members, self.size))
            and self.bytes_of(counts) <= self.memory
            and self.risk_of(counts) <= self.limit
        )

    def rows(self) -> tuple[np.ndarray, np.ndarray]:
        """Both budgets as scaled `[2, items]` and `[2]`; what every choice pays is taken off."""
        first = starts(self.group)
        least = np.minimum.reduceat(self.nbytes, first)
        above = self.nbytes - least[self.group]
        spare = self.memory - sum(int(n) * int(b) for n, b in zip(self.size, least, strict=True))
        matrix = np.stack([above.astype(float), self.risk])
        most = self.size @ np.stack([np.maximum.reduceat(row, first) for row in matrix], axis=1)
        budgets = np.minimum([float(spare), self.limit], 2 * most + 1)  # infinity is not scaled
        top = np.max(matrix, axis=1, initial=0.0)
        scale = _ROW / np.where(top > 0, top, _ROW)
        return matrix * scale[:, None], budgets * scale


def starts(group: np.ndarray) -> np.ndarray:
    """Index of each group's first item."""
    return np.flatnonzero(np.diff(group, prepend=-1))
