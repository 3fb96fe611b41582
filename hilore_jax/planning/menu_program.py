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

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint
from scipy.sparse import coo_array

from hilore_jax.actions import Compress, Policy, Recompute
from hilore_jax.planning.graph import Graph, recomputed
from hilore_jax.planning.highs import milp
from hilore_jax.planning.options import Option

_TIE = 1e-6  # of the largest seconds: less than that yields to bytes, then to risk


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
        self._options = {name: [Option(Recompute(), (), ()), *options[name]] for name in options}
        self._index: dict[tuple, int] = {}
        self._binary: list[int] = []
        self._lower: list[float] = []
        self._rows: list[tuple[dict[int, float], float]] = []  # sum of coefficient x >= bound
        self._cost: dict[int, float] = {}
        self._bytes: dict[int, int] = {}
        self._squared: dict[int, float] = {}
        self._maybe = self._possibly_tainted()
        self._relevant = recomputed(graph, Policy({}))
        self._actions()
        for place in range(len(graph.nodes)):
            self._node(place, float(seconds[place]))
        self._finish()

    def solve(self, nbytes: int | float = np.inf, squared: float = np.inf) -> Policy | None:
        """The policy of least seconds within the budgets, or None where there is none.

        Args:
            nbytes: bytes that may be kept.
            squared: sum of squared risks that may be taken.
        """
        rows = list(self._rows)
        top_bytes, top_squared = self._tops
        if np.isfinite(nbytes):
            rows.append((_scaled(self._bytes, -1 / top_bytes), -nbytes / top_bytes - 1e-9))
        if np.isfinite(squared):
            rows.append((_scaled(self._squared, -1 / top_squared), -squared / top_squared - 1e-9))
        matrix, bounds = _sparse(rows, len(self._lower))
        integral = np.zeros(len(self._lower))
        integral[self._binary] = 1
        lower: Any = np.array(self._lower)
        found = milp(
            self._objective,
            integrality=integral,
            bounds=Bounds(lower, np.ones_like(lower)),
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
                and not isinstance(option.action, Recompute)
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

    def _taint(self, value: int) -> int | None:
        return self._var("taint", value) if value in self._maybe else None

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
            self._at_least(1.0, *((1.0, v) for v in chosen))
            self._at_least(-1.0, *((-1.0, v) for v in chosen))
            for var, option in zip(chosen, options, strict=True):
                self._squared[var] = option.risk**2

    def _node(self, place: int, seconds: float) -> None:
        node = self._graph.nodes[place]
        for value in node.reads:
            need = self._need_exact(value) if node.kind == "choice" else self._need(value)
            self._lower[need] = 1.0
        if node.kind == "name":
            self._site(place)
        elif self._relevant.times(place):
            self._evaluated(place, seconds)

    def _evaluated(self, place: int, seconds: float) -> None:
        node = self._graph.nodes[place]
        exact = self._var("evaluated", place)
        self._cost[exact] = seconds
        sources = [v for v in node.inputs if v in self._maybe] if node.kind != "choice" else []
        taint = None
        if sources:
            taint = self._var("inputs", place)  # whether any input is tainted
            self._at_least(0.0, (-1, taint), *((1, self._taint(v)) for v in sources))
            for value in sources:
                self._at_least(0.0, (1, taint), (-1, self._taint(value)))
        for value in node.outputs:
            if node.kind == "light" and taint is not None:
                self._at_least(0.0, (1, self._taint(value)), (-1, taint))
                self._at_least(0.0, (-1, self._taint(value)), (1, taint))
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

    def _site(self, place: int) -> None:
        node = self._graph.nodes[place]
        (source,), (out,) = node.inputs, node.outputs
        name = node.eqn.params["name"]
        which = self._graph.sites[name].index(place)
        kept, encoded = [], []
        for k, option in enumerate(self._options.get(name, ())):
            if isinstance(option.action, Recompute):
                continue
            action, used = self._var("action", name, k), self._var("used", place, k)
            self._cost[used] = option.seconds[which]
            self._bytes[used] = option.nbytes[which]
            self._at_least(-1.0, (1, used), (-1, self._need(out)), (-1, action))
            if isinstance(option.action, Compress):
                encoded.append(action)
                continue
            kept.append(action)
            self._at_least(-1.0, (1, used), (-1, self._need_exact(out)), (-1, action))
        stored = [(1.0, v) for v in kept]
        either = [(1.0, v) for v in (*kept, *encoded)]
        self._at_least(0.0, (1, self._need(source)), (-1, self._need(out)), *either)
        exact = self._need_exact(source), self._need_exact(out)
        self._at_least(0.0, (1, exact[0]), (-1, exact[1]), *stored)
        taint, before = self._taint(out), self._taint(source)
        if taint is None:
            return
        self._at_least(0.0, (1, taint), *((-1.0, v) for v in encoded))
        self._at_least(0.0, (-1, taint), *((1.0, v) for v in encoded), (1, before))
        self._at_least(-1.0, (-1, taint), *((-1.0, v) for v in kept))
        if before is not None:
            self._at_least(0.0, (1, taint), (-1, before), *either)

    def _finish(self) -> None:
        top = sum(self._cost.values()) or 1.0
        self._tops = sum(self._bytes.values()) or 1.0, sum(self._squared.values()) or 1.0
        objective = np.zeros(len(self._lower))
        for parts, unit in (
            (self._cost, top),
            (self._bytes, self._tops[0] / _TIE),
            (self._squared, self._tops[1] / _TIE * 10),
        ):
            for var, amount in parts.items():
                objective[var] += amount / unit
        self._objective = objective * 1e3  # above HiGHS's absolute tolerances


def _scaled(row: Mapping[int, int | float], factor: float) -> dict[int, float]:
    return {var: coefficient * factor for var, coefficient in row.items()}


def _sparse(rows: Sequence[tuple[Mapping[int, float], float]], width: int) -> tuple[Any, Any]:
    entries = [(i, var, c) for i, (row, _) in enumerate(rows) for var, c in row.items()]
    where, which, value = zip(*entries, strict=True)
    matrix = coo_array((value, (where, which)), shape=(len(rows), width)).tocsc()
    return matrix, np.array([bound for _, bound in rows])
