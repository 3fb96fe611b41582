"""The choice of one block's actions as a small mixed-integer program, for HiGHS.

Binary are the actions of each name; the rest follows from them. Every value v has a need N_v of the
version that derivatives read and, where v may be decoded, a need M_v of its exact version and a
taint t_v; every equation n has an evaluation from exact values e_n and from decoded ones d_n:

    minimize    sum_n seconds_n (e_n + d_n) + codec seconds
    subject to  what an evaluation reads is needed:   N or M of its inputs >= d_n or e_n
                what is needed is kept or evaluated:  e_n >= N_v - t_v,  d_n >= N_v + t_v - 1, ...
                bytes <= B,  sum of squared risks <= rho

so that, for fixed actions, the least solution is what `graph.recomputed` computes.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from hilore_jax.actions import Compress, Policy
from hilore_jax.planning.graph import Graph, recomputed
from hilore_jax.planning.options import Option

# HiGHS's tolerances are absolute: 1e-6 for rows, values and the objective's gap. So a budget's row
# is scaled by the budget, and all seconds together are so many that ties are still seen.
_ROW = 1e3
_SECONDS = 1e6
_TIE = 1e-6  # of all seconds: less than that yields to bytes, then to risk

Row = tuple[dict[int, float], float]  # sum of coefficient x >= bound


@dataclasses.dataclass(frozen=True)
class Cut:
    """Solutions must have fewer bytes than this or less squared risk than that."""

    nbytes: int | float
    squared: float


class MenuProgram:
    """The mixed-integer program of one block, solved for several budgets.

    Args:
        graph: the block.
        seconds: seconds of evaluating each node again.
        options: actions of each name beside Recompute; other names are recomputed.
    """

    def __init__(
        self, graph: Graph, seconds: Sequence[float], options: Mapping[str, Sequence[Option]]
    ):
        self._graph = graph
        self._options = dict(options)
        self._index: dict[tuple, int] = {}
        self._binary: list[int] = []
        self._lower: list[float] = []
        self._taints: dict[int, int] = {}  # of values; a light equation hands its inputs' on
        self._rows: list[Row] = []
        self._cost: dict[int, float] = {}
        self._bytes: dict[int, int] = {}
        self._squared: dict[int, float] = {}
        self._maybe = self._possibly_tainted()
        self._relevant = recomputed(graph, Policy({}))
        self._actions()
        for node in graph.nodes:
            for value in node.reads:
                need = self._need_exact(value) if node.kind == "choice" else self._need(value)
                self._lower[need] = 1.0
        for place in range(len(graph.nodes)):
            self._node(place, float(seconds[place]))
        self._finish()

    def solve(
        self, nbytes: int | float = np.inf, squared: float = np.inf, cuts: Sequence[Cut] = ()
    ) -> Policy | None:
        """The policy of least seconds within the budgets, or None where there is none.

        Args:
            nbytes: bytes that may be kept.
            squared: sum of squared risks that may be taken.
            cuts: what the policy must improve on.
        """
        size, n_cuts = len(self._lower), len(cuts)
        upper: Any = np.ones(size + n_cuts)
        rows = list(self._rows)
        for k, cut in enumerate(cuts):
            rows += self._cut(size + k, cut)
        if np.isfinite(nbytes):
            whole = nbytes // self._unit * self._unit
            rows += _budget(self._bytes, whole, self._unit / 2, upper)
        if np.isfinite(squared):
            rows += _budget(self._squared, squared, squared * 1e-6, upper)
        matrix, bounds = _sparse(rows, size + n_cuts)
        integral = np.zeros(size + n_cuts)
        integral[[*self._binary, *range(size, size + n_cuts)]] = 1
        lower: Any = np.array([*self._lower, *[0.0] * n_cuts])
        found = milp(
            np.concatenate([self._objective, np.zeros(n_cuts)]),
            integrality=integral,
            bounds=Bounds(lower, upper),
            constraints=LinearConstraint(matrix, lb=bounds),
            options={"mip_rel_gap": 0.0},
        )
        if found.x is None:
            return None
        return Policy(
            {
                name: option.action
                for name, options in self._options.items()
                for k, option in enumerate(options)
                if found.x[self._index["action", name, k]] > 0.5
            }
        )

    # Variables and rows.

    def _var(self, *key: object) -> int:
        if key not in self._index:
            self._index[key] = len(self._lower)
            self._lower.append(0.0)
        return self._index[key]

    def _at_least(self, bound: float, *terms: tuple[int | float, int | None]) -> None:
        row: dict[int, float] = {}
        for coefficient, var in terms:
            if var is not None:
                row[var] = row.get(var, 0.0) + coefficient
        self._rows.append((row, bound))

    def _need(self, value: int) -> int:
        return self._var("need", value)

    def _need_exact(self, value: int) -> int:
        return self._var("exact", value) if value in self._maybe else self._need(value)

    def _possibly_tainted(self) -> set[int]:
        found: set[int] = set()
        for node in self._graph.nodes:
            flows = not found.isdisjoint(node.inputs) and node.kind in ("light", "name")
            if node.kind == "name" and not flows:
                options = self._options.get(node.eqn.params["name"], ())
                flows = any(isinstance(o.action, Compress) for o in options)
            if flows:
                found.update(node.outputs)
        return found

    def _actions(self) -> None:
        for name, options in self._options.items():
            chosen = [self._var("action", name, k) for k in range(len(options))]
            self._binary += chosen
            self._at_least(-1.0, *((-1.0, v) for v in chosen))  # none of them: Recompute
            for var, option in zip(chosen, options, strict=True):
                self._squared[var] = option.risk**2

    def _node(self, place: int, seconds: float) -> None:
        if self._graph.nodes[place].kind == "name":
            self._site(place)
        elif self._relevant.times(place):
            self._evaluated(place, seconds)

    def _evaluated(self, place: int, seconds: float) -> None:
        node = self._graph.nodes[place]
        exact = self._var("evaluated", place)
        self._cost[exact] = seconds
        taint = self._inputs_taint(place)
        for value in node.outputs:
            if node.kind == "light" and taint is not None:
                self._taints[value] = taint
                self._at_least(0.0, (1, exact), (-1, self._need(value)), (1, taint))
            else:
                self._at_least(0.0, (1, exact), (-1, self._need(value)))
            self._at_least(0.0, (1, exact), (-1, self._need_exact(value)))
        if node.again:
            self._at_least(1.0, (1, exact), (1, taint))
        for value in node.inputs:
            self._at_least(0.0, (1, self._need_exact(value)), (-1, exact))
        if taint is None or (node.kind == "heavy" and not node.again):
            return
        decoded = self._var("decoded", place)
        self._cost[decoded] = seconds
        if node.kind == "light":
            for value in node.outputs:
                self._at_least(-1.0, (1, decoded), (-1, self._need(value)), (-1, taint))
        if node.again:
            self._at_least(0.0, (1, decoded), (-1, taint))
        for value in node.inputs:
            self._at_least(0.0, (1, self._need(value)), (-1, decoded))

    def _inputs_taint(self, place: int) -> int | None:
        """The variable that says whether any input of a node is tainted, or None: none can be."""
        node = self._graph.nodes[place]
        if node.kind == "choice":
            return None
        sources = {self._taints[v] for v in node.inputs if v in self._taints}
        if len(sources) < 2:
            return sources.pop() if sources else None
        taint = self._var("inputs", place)
        self._at_least(0.0, (-1, taint), *((1, v) for v in sources))
        for source in sources:
            self._at_least(0.0, (1, taint), (-1, source))
        return taint

    def _site(self, place: int) -> None:
        node = self._graph.nodes[place]
        (source,), (out,) = node.inputs, node.outputs
        name = node.eqn.params["name"]
        which = self._graph.sites[name].index(place)
        kept, encoded = [], []
        for k, option in enumerate(self._options.get(name, ())):
            action = self._var("action", name, k)
            always = self._lower[self._need(out)] == 1.0
            used = action if always else self._var("used", place, k)
            self._cost[used] = self._cost.get(used, 0.0) + option.seconds[which]
            self._bytes[used] = self._bytes.get(used, 0) + option.nbytes[which]
            compressed = isinstance(option.action, Compress)
            (encoded if compressed else kept).append(action)
            if always:
                continue
            self._at_least(-1.0, (1, used), (-1, self._need(out)), (-1, action))
            if not compressed:
                self._at_least(-1.0, (1, used), (-1, self._need_exact(out)), (-1, action))
        stored = [(1.0, v) for v in kept]
        either = [(1.0, v) for v in (*kept, *encoded)]
        self._at_least(0.0, (1, self._need(source)), (-1, self._need(out)), *either)
        exact = self._need_exact(source), self._need_exact(out)
        self._at_least(0.0, (1, exact[0]), (-1, exact[1]), *stored)
        before = self._taints.get(source)
        if before is None and len(encoded) < 2:
            self._taints.update((out, var) for var in encoded)
            return
        taint = self._taints[out] = self._var("taint", out)
        self._at_least(0.0, (1, taint), *((-1.0, v) for v in encoded))
        self._at_least(0.0, (-1, taint), *((1.0, v) for v in encoded), (1, before))
        if before is not None:
            self._at_least(-1.0, (-1, taint), *((-1.0, v) for v in kept))
            self._at_least(0.0, (1, taint), (-1, before), *either)

    def _finish(self) -> None:
        self._unit = math.gcd(*self._bytes.values()) or 1
        objective = np.zeros(len(self._lower))
        for parts, weight in (
            (self._cost, _SECONDS),
            (self._bytes, _SECONDS * _TIE),
            (self._squared, _SECONDS * _TIE / 10),
        ):
            total = math.fsum(parts.values()) or 1.0
            for var, amount in parts.items():
                objective[var] += amount / total * weight
        self._objective = objective

    def _cut(self, either: int, cut: Cut) -> list[Row]:
        """What a cut demands; the binary `either` says which of the two is improved on."""
        bytes_, squared = self._bytes, self._squared
        safer = cut.squared - 1e-5 * (max(squared.values()) or 1.0)
        less, far = _scaled(bytes_)
        low, wide = _scaled(squared)
        return [
            ({**less, either: far}, -(cut.nbytes - self._unit / 2) * _scale(bytes_)),
            ({**low, either: -wide}, -safer * _scale(squared) - wide),
        ]


def _scale(parts: Mapping[int, int | float]) -> float:
    return _ROW / (max(parts.values()) or 1.0)


def _scaled(parts: Mapping[int, int | float]) -> tuple[dict[int, float], float]:
    """A row's side that falls as the parts add up, and what it never falls below, negated."""
    row = {var: -amount * _scale(parts) for var, amount in parts.items()}
    return row, -math.fsum(row.values())


def _budget(
    parts: Mapping[int, int | float], limit: int | float, slack: float, upper: np.ndarray
) -> list[Row]:
    """At most `limit` of the parts, in units of the limit; `upper` of larger ones becomes 0.

    The slack keeps sums that equal the limit off the row's edge, where HiGHS's tolerances decide.
    """
    small = {var: amount for var, amount in parts.items() if 0 < amount <= limit}
    upper[[var for var, amount in parts.items() if amount > limit]] = 0.0
    if math.fsum(small.values()) <= limit:
        return []
    scale = _ROW / (limit + slack)
    return [({var: -amount * scale for var, amount in small.items()}, -_ROW)]


def _sparse(rows: Sequence[Row], width: int) -> tuple[Any, Any]:
    entries = [(i, var, c) for i, (row, _) in enumerate(rows) for var, c in row.items()]
    where, which, value = zip(*entries, strict=True)
    matrix = coo_array((value, (where, which)), shape=(len(rows), width)).tocsc()
    return matrix, np.array([bound for _, bound in rows])
