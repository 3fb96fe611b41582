"""Multiple-choice knapsack with two budgets, solved exactly: one item for each member of a group.

    minimize    sum_i cost_i n_i
    subject to  sum_{i in g} n_i = size_g for each group g,   n_i >= 0 integer
                sum_i nbytes_i n_i <= memory,   sum_i risk_i n_i <= limit

Members of a group are interchangeable, so `n_i` counts them instead of one binary a member. The
multipliers of HiGHS's LP relaxation bound every solution from below, which removes the items that
no solution better than a good rounding can hold. What is left is enumerated where it is little, and
given to HiGHS's branch and bound where it is much.
"""

from typing import Any, NamedTuple

import numpy as np
from scipy import sparse
from scipy.optimize import Bounds, LinearConstraint, linprog

from hilore_jax.planning.beam import beam
from hilore_jax.planning.enumeration import Frame, candidates
from hilore_jax.planning.highs import milp
from hilore_jax.planning.problem import Knapsack, starts
from hilore_jax.planning.rounding import rounded

# Largest cost after scaling; HiGHS allows rows and the objective's gap 1e-6, absolute.
_SCALE = 1e4
_TIE = 1e-9  # costs that differ by less, relative, are ties
_RETRIES = 8
_NODES = 60_000  # of HiGHS's search, times open items: deterministic, unlike a time limit
_KINDS = 6  # different groups up to which HiGHS searches
_TIED = 500  # open items up to which ties are searched for


class Solution(NamedTuple):
    """Counts by item, and the LP relaxation's cost."""

    counts: np.ndarray
    bound: float


def solve(problem: Knapsack) -> Solution | None:
    """The cheapest choice within both budgets; ties take less risk, then fewer bytes.

    Args:
        problem: items and budgets.

    Returns:
        The solution, or None where no choice keeps the budgets. Both are checked on the result
        with exact integers (bytes) and a correctly rounded sum (risk).

    Example:
        >>> two = np.array([0, 0]), np.array([3])
        >>> items = np.array([1.0, 0.0]), np.array([0, 5]), np.array([0.0, 0.0])
        >>> solve(Knapsack(*two, *items, memory=11, limit=0.0)).counts.tolist()
        [1, 2]
    """
    fractional = _relaxation(problem)
    if fractional is None:
        return None
    weights, lower, reduced = fractional
    cost = problem.cost / _unit(problem)
    known = rounded(problem.group, problem.size, cost, *problem.rows(), reduced)
    if known is not None and not problem.fits(known):
        known = None
    if len(problem.size) > _KINDS:
        # A tree over so many different groups takes seconds and gains less than the bound's gap.
        near = beam(problem.group, problem.size, cost, *problem.rows(), weights, reduced)
        fits = [c for c in (known, near) if c is not None and problem.fits(c)]
        known = min(fits, key=problem.cost_of, default=None)
    counts = _enumerated(problem, known, fractional)
    if counts is None and known is not None and len(problem.size) > _KINDS:
        counts = known
    if counts is None:
        counts = _searched(problem, known, lower, reduced)
    if counts is None:
        return None
    return Solution(counts, min(max(lower, 0.0) * _unit(problem), problem.cost_of(counts)))


def _searched(
    problem: Knapsack, known: np.ndarray | None, lower: float, reduced: np.ndarray
) -> np.ndarray | None:
    """HiGHS's branch and bound over the items that the bound leaves open."""
    cost = problem.cost / _unit(problem)
    upper = _open(problem, known, lower, reduced)
    counts = _integer(problem, cost, upper)
    if counts is None and known is None:  # none, or hard to find: then it is worth the time
        counts = _integer(problem, cost, upper, patience=1000)
    if counts is None or (known is not None and problem.cost_of(known) < problem.cost_of(counts)):
        counts = known
    if counts is None:
        return None
    return _break_ties(problem, counts, _open(problem, counts, lower, reduced))


def _unit(problem: Knapsack) -> float:
    top = float(np.max(problem.cost, initial=0.0))
    return top / _SCALE if top > 0 else 1.0


def _open(
    problem: Knapsack, known: np.ndarray | None, lower: float, reduced: np.ndarray
) -> np.ndarray:
    """How many of each item a solution at most as dear as the known one can hold."""
    upper = problem.size[problem.group]
    if known is None:
        return upper
    most = np.floor(_slack(problem, known, lower) / np.maximum(reduced, 1e-12))
    return np.minimum(upper, most).astype(int)


def _slack(problem: Knapsack, known: np.ndarray, lower: float) -> float:
    """How far the known solution, and a little, lies above the lower bound."""
    return max(problem.cost_of(known) / _unit(problem) * (1 + _TIE) + _TIE * _SCALE - lower, 0.0)


def _membership(group: np.ndarray, groups: int) -> sparse.csr_array:
    items = np.arange(len(group))
    return sparse.csr_array((np.ones(len(group)), (group, items)), shape=(groups, len(group)))


def _relaxation(problem: Knapsack) -> tuple[np.ndarray, float, np.ndarray] | None:
    """Budget multipliers, a valid lower bound of the scaled cost, and reduced costs."""
    matrix, budgets = problem.rows()
    cost = problem.cost / _unit(problem)
    upper = problem.size[problem.group].astype(float)
    found = linprog(
        cost,
        A_ub=matrix,
        b_ub=budgets,
        A_eq=_membership(problem.group, len(problem.size)),
        b_eq=problem.size,
        bounds=np.stack([np.zeros_like(upper), upper], axis=1),
    )
    if found.status == 2:
        return None
    if found.status != 0:
        raise RuntimeError(f"HiGHS could not solve the relaxed allocation: {found.message}")
    weights = np.maximum(-found.ineqlin.marginals, 0.0)
    # The bound holds for any weights (weak duality), so it owes nothing to HiGHS's tolerances.
    priced = cost + weights @ matrix
    least = np.minimum.reduceat(priced, starts(problem.group))
    lower = float(problem.size @ least - weights @ budgets)
    return weights, lower, priced - least[problem.group]


def _enumerated(
    problem: Knapsack,
    known: np.ndarray | None,
    fractional: tuple[np.ndarray, float, np.ndarray],
) -> np.ndarray | None:
    """The best of all choices close to the bound; None where they are too many.

    All choices within some distance of the bound are looked at, so that the best of them is the
    best of all; the distance grows until there is one.
    """
    weights, lower, reduced = fractional
    cost = problem.cost / _unit(problem)
    most = float(problem.size @ np.maximum.reduceat(cost, starts(problem.group)))
    farthest = max(most - lower, _TIE) if known is None else _slack(problem, known, lower)
    slack = farthest * 2.0 ** -(20 if known is None else 4)
    while True:
        upper = np.minimum(problem.size[problem.group], slack / np.maximum(reduced, 1e-12))
        frame = Frame(
            *(problem.group, problem.size, cost, *problem.rows()),
            *(weights, reduced, upper.astype(int), slack),
        )
        found = candidates(frame)
        best = None if found is None else _best(problem, found)
        if found is None or best is not None or slack >= farthest:
            return best
        slack = min(2 * slack, farthest)


def _best(problem: Knapsack, found: np.ndarray) -> np.ndarray | None:
    """Of choices `[choices, items]`, the cheapest within both budgets, and of ties the best."""
    found = found[found @ problem.nbytes <= problem.memory]  # exact
    spent, risks = found @ problem.cost, found @ problem.risk
    while len(found):
        best = np.flatnonzero(spent <= spent.min() * (1 + _TIE))
        best = best[risks[best] <= risks[best].min() * (1 + _TIE)]
        nbytes, used = found[best] @ problem.nbytes, np.count_nonzero(found[best], axis=1)
        pick = best[np.lexsort((used, nbytes))[0]]
        if problem.fits(found[pick]):  # the risk to the last bit
            return found[pick]
        found, spent, risks = (np.delete(table, pick, axis=0) for table in (found, spent, risks))
    return None


def _integer(
    problem: Knapsack,
    objective: np.ndarray,
    upper: np.ndarray,
    capped: tuple[tuple[np.ndarray, float], ...] = (),
    patience: int = 1,
) -> np.ndarray | None:
    """Counts up to `upper` of least objective within both budgets and the caps, or None."""
    open_items = np.flatnonzero(upper > 0)
    most: Any = upper[open_items]
    group = problem.group[open_items]
    if len(np.unique(group)) < len(problem.size):
        return None
    size: Any = problem.size  # scipy's stubs know no arrays here
    members = LinearConstraint(_membership(group, len(size)), size, size)
    matrix, budgets = problem.rows()
    matrix = np.concatenate([matrix, *(row[None] for row, _ in capped)])[:, open_items]
    allowed: Any = np.concatenate([budgets, [cap for _, cap in capped]])
    nodes = patience * max(20, _NODES // len(open_items))
    for retry in range(_RETRIES):
        found = milp(
            objective[open_items],
            integrality=np.ones(len(open_items)),
            bounds=Bounds(0, most),
            constraints=[members, LinearConstraint(matrix, -np.inf, allowed)],
            options={"mip_rel_gap": 0.0, "node_limit": nodes},
        )
        if found.x is None and (found.status == 2 or "limit reached" in found.message):
            return None  # infeasible, or nothing found within the nodes
        if found.x is None:
            raise RuntimeError(f"HiGHS could not solve the allocation: {found.message}")
        counts = np.zeros(len(upper), int)
        counts[open_items] = np.round(found.x)
        if problem.fits(counts):
            return counts
        # Within HiGHS's tolerance, 1e-6, but over: ask for the overshoot and a little more.
        over = [problem.bytes_of(counts) > problem.memory, problem.risk_of(counts) > problem.limit]
        spill = np.maximum(matrix[:2] @ counts[open_items] - budgets, 0.0)
        allowed[:2] -= np.where(over, spill + 1.5e-6 * 4.0**retry, 0.0)
    raise RuntimeError("HiGHS kept exceeding a budget by less than its tolerance; round the bytes.")


def _break_ties(problem: Knapsack, counts: np.ndarray, upper: np.ndarray) -> np.ndarray:
    """Among choices of equal cost, the one of least risk; among those, of fewest bytes."""
    if not len(problem.size) < np.count_nonzero(upper) <= _TIED:
        return counts
    unit = _unit(problem)
    cost = problem.cost_of(counts)
    (nbytes, risk), _ = problem.rows()
    caps = ((problem.cost / unit, cost / unit * (1 + _TIE) + _TIE),)
    for objective in (risk, nbytes):
        if objective @ counts > 0:
            found = _integer(problem, objective, upper, caps)
            tied = found is not None and problem.cost_of(found) <= cost * (1 + _TIE)
            if found is not None and tied and objective @ found < objective @ counts:
                counts = found
        caps = (*caps, (objective, float(objective @ counts) * (1 + _TIE) + _TIE))
    return counts
