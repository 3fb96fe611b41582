"""Which entry of its menu each block takes, within a byte budget and a risk budget."""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence

import numpy as np

from hilore_jax.actions import Compress, Policy
from hilore_jax.planning.knapsack import solve
from hilore_jax.planning.menu import Entry
from hilore_jax.planning.problem import Knapsack


@dataclasses.dataclass(frozen=True)
class Allocation:
    """One entry a block.

    Attributes:
        choices: index into the block's menu, one a block.
        policies: the chosen entries' policies, one a block.
        nbytes: bytes kept over all blocks.
        seconds: recompute seconds over all blocks.
        risk: root of the sum of squared risks; their sum in the paper's form.
        bound_seconds: the LP relaxation's seconds, less than which no allocation takes.
    """

    choices: tuple[int, ...]
    policies: tuple[Policy, ...]
    nbytes: int
    seconds: float
    risk: float
    bound_seconds: float

    @property
    def segments(self) -> int:
        """Runs of equal consecutive policies, each of which is one scan."""
        return _runs(self.policies)

    def share_of_bound(self, reference: float) -> float:
        """Seconds saved against `reference` seconds, as a share of what the LP bound would save.

        Example:
            >>> Allocation((0,), (Policy({}),), 0, 2.0, 0.0, 1.0).share_of_bound(6.0)
            0.8
        """
        possible = reference - self.bound_seconds
        return (reference - self.seconds) / possible if possible > 0 else 1.0


def total_risk(risks: Iterable[float], *, paper: bool = False) -> float:
    """Gradient error of several compressions: they add as squares, or linearly in the paper.

        R = sqrt(sum_u risk_u^2),   the paper's form (arXiv 2609.33570): sum_u risk_u

    Args:
        risks: relative gradient errors.
        paper: the paper's form.

    Returns:
        The total, correctly rounded before the root.

    Example:
        >>> total_risk([0.3, 0.4]), total_risk([0.25, 0.5], paper=True)
        (0.5, 0.75)
    """
    if paper:
        return math.fsum(risks)
    return math.sqrt(math.fsum(risk * risk for risk in risks))


def allocate(
    menus: Sequence[Sequence[Entry]], memory: int, risk: float, *, paper: bool = False
) -> Allocation:
    """The allocation of least recompute seconds within two budgets.

        minimize    sum_u seconds[u, a_u]
        subject to  sum_u nbytes[u, a_u] <= memory
                    sum_u risk[u, a_u]^2 <= risk^2      (paper: sum_u risk[u, a_u] <= risk)

    (arXiv 2609.33570, allocation; squares because errors were measured to add so.) Ties in seconds,
    to one part in 1e9, take less risk, then fewer bytes, then fewer segments. Blocks of one menu
    are interchangeable and counted together: pass the same tuple for each. Then the result is the
    optimum and seconds never grow with a budget; more than a handful of different menus are
    searched near the relaxation's prices, and `bound_seconds` says how much could be left.

    Args:
        menus: a block's entries, one sequence a block. An entry of infinite risk is never taken.
        memory: bytes, over all blocks.
        risk: relative gradient error; 0: nothing is compressed, not even what was measured to have
            no risk.
        paper: add risks linearly, as the paper does.

    Returns:
        The allocation; neither budget is exceeded by its `nbytes` and `risk`, not even by rounding.

    Raises:
        ValueError: no allocation keeps the budgets (says the least bytes that would do, and the
            largest contributors to them), or a menu or budget is malformed.

    Example:
        >>> from hilore_jax.actions import Store
        >>> gc, kept = Policy({}), Policy({"attn_out": Store()})
        >>> menu = (Entry(gc, 0, 3.0, 2, 96, risk=0.0), Entry(kept, 100, 1.0, 1, 32, risk=0.0))
        >>> allocate([menu] * 3, memory=250, risk=0.0).choices
        (0, 1, 1)
    """
    _check(menus, memory, risk)
    kinds, members = _kinds(menus)
    problem, entries = _problem([menus[blocks[0]] for blocks in members], members, risk, paper)
    missing = [g for g in range(len(members)) if not np.any(problem.group == g)]
    if missing:
        block = members[missing[0]][0]
        least = min(entry.risk for entry in menus[block])
        compressed = " or compresses" if risk == 0 else ""
        raise ValueError(
            f"risk budget {risk:g}: every entry of block {block}'s menu has more risk{compressed} "
            f"(the least risk is {least:g}). Raise the budget or give the block an exact entry."
        )
    problem = dataclasses.replace(problem, memory=int(memory))
    solution = solve(problem)
    if solution is None:
        raise ValueError(_infeasible(menus, members, problem, entries, risk))
    choices = _assign(menus, kinds, members, solution.counts, problem.group, entries)
    chosen = [menu[choice] for menu, choice in zip(menus, choices, strict=True)]
    return Allocation(
        choices=choices,
        policies=tuple(entry.policy for entry in chosen),
        nbytes=sum(int(entry.nbytes) for entry in chosen),
        seconds=math.fsum(entry.seconds for entry in chosen),
        risk=total_risk((entry.risk for entry in chosen), paper=paper),
        bound_seconds=solution.bound,
    )


def _check(menus: Sequence[Sequence[Entry]], memory: int, risk: float) -> None:
    if isinstance(memory, bool) or not isinstance(memory, int | np.integer):
        raise TypeError(f"memory={memory!r}: expected whole bytes, an int.")
    if not risk >= 0:
        raise ValueError(f"risk={risk!r}: expected a relative gradient error >= 0.")
    if not len(menus):
        raise ValueError("no menus: give one for each block.")
    for block, menu in {id(menu): (i, menu) for i, menu in enumerate(menus)}.values():
        if not len(menu):
            raise ValueError(f"block {block}'s menu is empty: it needs at least Policy({{}}).")
        for i, entry in enumerate(menu):
            good = entry.nbytes >= 0 and 0 <= entry.seconds < math.inf and entry.risk >= 0
            if not good or int(entry.nbytes) != entry.nbytes:
                raise ValueError(
                    f"entry {i} of block {block}'s menu ({entry.policy}) has "
                    f"nbytes={entry.nbytes!r}, seconds={entry.seconds!r}, risk={entry.risk!r}: "
                    "expected whole bytes >= 0, finite seconds >= 0 and risk >= 0."
                )


def _kinds(menus: Sequence[Sequence[Entry]]) -> tuple[list[int], list[list[int]]]:
    """Kind of each block's menu, equal where all figures are, and the blocks of each kind."""
    seen: dict[int, int] = {}
    known: dict[tuple, int] = {}
    kinds = []
    for menu in menus:
        if id(menu) not in seen:
            figures = tuple((e.nbytes, e.seconds, e.risk, _compresses(e)) for e in menu)
            seen[id(menu)] = known.setdefault(figures, len(known))
        kinds.append(seen[id(menu)])
    members: list[list[int]] = [[] for _ in known]
    for block, kind in enumerate(kinds):
        members[kind].append(block)
    return kinds, members


def _problem(
    menus: Sequence[Sequence[Entry]], members: list[list[int]], risk: float, paper: bool
) -> tuple[Knapsack, np.ndarray]:
    """The knapsack (memory still 0) of one menu a kind, and each item's index in its menu."""
    parts = []
    for kind, menu in enumerate(menus):
        nbytes = np.array([int(entry.nbytes) for entry in menu], np.int64)
        seconds = np.array([entry.seconds for entry in menu], float)
        risks = np.array([entry.risk for entry in menu], float)
        able = risks <= risk
        if risk == 0:  # a measured risk can be 0 too, of an exposure of 0 or by chance
            able &= ~np.array([_compresses(entry) for entry in menu], bool)
        kept = np.flatnonzero(able)
        kept = kept[np.isfinite(risks[kept])]
        kept = kept[_undominated(seconds[kept], risks[kept], nbytes[kept])]
        group = np.full(len(kept), kind)
        risks = risks[kept] if paper else risks[kept] * risks[kept]
        parts.append((group, seconds[kept], nbytes[kept], risks, kept))
    group, seconds, nbytes, risks, entries = (
        np.concatenate(column) for column in zip(*parts, strict=True)
    )
    size = np.array([len(blocks) for blocks in members])
    limit = risk if paper else _largest_square(risk)
    return Knapsack(group, size, seconds, nbytes, risks, 0, limit), entries


def _compresses(entry: Entry) -> bool:
    return bool(entry.policy.names(Compress))


def _largest_square(root: float) -> float:
    """The largest number whose rounded square root is at most `root`."""
    square = root * root
    while math.sqrt(above := math.nextafter(square, math.inf)) <= root < math.inf:
        square = above
    return square


def _undominated(*columns: np.ndarray) -> np.ndarray:
    """Indices of rows that no other beats or equals in every column; of equals, the first."""
    table = np.stack(columns, axis=1).astype(float)
    no_worse = np.all(table[:, None] <= table, axis=2)  # [i, j]: i is at least as good as j
    equal = no_worse & no_worse.T
    earlier = np.arange(len(table))[:, None] < np.arange(len(table))
    return np.flatnonzero(~np.any(no_worse & (~equal | earlier), axis=0))


def _runs(policies: Sequence[Policy]) -> int:
    return sum(1 for _ in itertools.groupby(policies))


def _assign(
    menus: Sequence[Sequence[Entry]],
    kinds: list[int],
    members: list[list[int]],
    counts: np.ndarray,
    group: np.ndarray,
    entries: np.ndarray,
) -> tuple[int, ...]:
    """Hands the counted entries to blocks, in order of their bytes, so that runs are long."""
    left: list[dict[int, int]] = [{} for _ in members]
    for item in np.flatnonzero(counts):
        left[group[item]][int(entries[item])] = int(counts[item])
    choices: list[int] = []
    for menu, kind in zip(menus, kinds, strict=True):
        stock = left[kind]
        before = menus[len(choices) - 1][choices[-1]].policy if choices else None
        same = [entry for entry in stock if menu[entry].policy == before]
        entry = same[0] if same else min(stock, key=lambda e: (menu[e].nbytes, e))
        stock[entry] -= 1
        if not stock[entry]:
            del stock[entry]
        choices.append(entry)
    return tuple(choices)


def _infeasible(
    menus: Sequence[Sequence[Entry]],
    members: list[list[int]],
    problem: Knapsack,
    entries: np.ndarray,
    risk: float,
) -> str:
    """Why nothing fits: the least bytes within the risk budget, and what they consist of."""
    most = int(problem.nbytes.max()) * len(menus)
    smallest = solve(dataclasses.replace(problem, cost=problem.nbytes.astype(float), memory=most))
    if smallest is None:
        least = [min(entry.risk for entry in menu) for menu in menus]
        return (
            f"risk budget {risk:g}: together the least risky entries of all {len(menus)} blocks "
            f"exceed it (their risks lie between {min(least):g} and {max(least):g}). Raise the "
            "budget or give the blocks exact entries."
        )
    rows = []
    for item in np.flatnonzero(smallest.counts):
        blocks = members[problem.group[item]]
        count, nbytes = int(smallest.counts[item]), int(problem.nbytes[item])
        policy = menus[blocks[0]][entries[item]].policy
        where = f"block {blocks[0]}" if len(blocks) == 1 else f"{count} blocks from {blocks[0]} on"
        rows.append((count * nbytes, f"{where}, {count} x {nbytes:,} bytes under '{policy}'"))
    rows.sort(key=lambda row: -row[0])
    largest = "; ".join(text for _, text in rows[:3])
    least_bytes = problem.bytes_of(smallest.counts)
    return (
        f"memory budget of {problem.memory:,} bytes: the blocks keep at least "
        f"{least_bytes:,} bytes within risk {risk:g}. Largest contributors: {largest}. "
        f"Raise the budget by {least_bytes - problem.memory:,} bytes, or make the batch smaller."
    )
