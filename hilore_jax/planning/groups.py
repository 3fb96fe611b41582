"""Groups of a knapsack's items, which are sorted by group."""

import numpy as np
from scipy import sparse


def starts(group: np.ndarray) -> np.ndarray:
    """The first item of each group.

    Example:
        >>> starts(np.array([0, 0, 1, 2, 2])).tolist()
        [0, 2, 3]
    """
    return np.flatnonzero(np.diff(group, prepend=-1))


def membership(group: np.ndarray, groups: int) -> sparse.csr_array:
    """`[groups, items]`, 1 where an item is of a group."""
    items = np.arange(len(group))
    return sparse.csr_array((np.ones(len(group)), (group, items)), shape=(groups, len(group)))
