"""The dataflow of one block: what each equation computes and what its derivative reads.

Backward of a block, as `replay.py` carries it out, evaluates an equation again when somebody reads
its outputs: a derivative rule, or another equation that is evaluated again. What it reads through a
compressed name is the decoded value; matmuls, opaque kernels and choices are evaluated from exact
ones, for which an exact copy of a compressed value may have to be recomputed as well.
`recomputed` follows those rules for one policy; `menu.py` states them as constraints.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend import core as jex

from hilore_jax import tracing
from hilore_jax.actions import Compress, Policy, Recompute
from hilore_jax.planning.rules import Rules, flat_equations, is_inexact


@dataclasses.dataclass(frozen=True)
class Node:
    """One equation of the block, inner jits inlined.

    Attributes:
        eqn: the jaxpr equation.
        inputs: numbers of the values it takes, literals left out.
        outputs: numbers of the values it makes.
        kind: "name", "heavy" (a matmul or opaque kernel), "choice" or "light".
        reads: values among its inputs that its derivative reads; empty off the gradient's path.
        again: its derivative reads what only its own evaluation gives: an output, or an internal
            value of a loop or call.
    """

    eqn: Any
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    kind: str
    reads: frozenset[int] = frozenset()
    again: bool = False

    @property
    def name(self) -> str | None:
        """The activation name, of a `checkpoint_name` equation."""
        return self.eqn.params["name"] if self.kind == "name" else None


@dataclasses.dataclass(frozen=True)
class Graph:
    """A block's equations in program order.

    Attributes:
        nodes: the equations.
        avals: abstract value of each number.
        outputs: numbers of the block's outputs.
        sites: for each name, its equations: positions in `nodes`.
    """

    nodes: tuple[Node, ...]
    avals: tuple[Any, ...]
    outputs: tuple[int, ...]
    sites: dict[str, tuple[int, ...]]

    def nbytes(self, value: int) -> int:
        """Bytes of a value."""
        return aval_bytes(self.avals[value])


@dataclasses.dataclass(frozen=True)
class Replayed:
    """What backward evaluates again under one policy.

    Attributes:
        exact: for each node, whether it is evaluated from exact values.
        decoded: for each node, whether it is evaluated from decoded ones (possibly as well).
        used: for each name equation, whether backward reads what is kept of it.
    """

    exact: tuple[bool, ...]
    decoded: tuple[bool, ...]
    used: dict[int, bool]

    def times(self, node: int) -> int:
        """How often backward evaluates a node."""
        return self.exact[node] + self.decoded[node]


def aval_bytes(aval: Any) -> int:
    """Bytes of an abstract value; a PRNG key counts 8."""
    itemsize = getattr(getattr(aval, "dtype", None), "itemsize", 8)
    return math.prod(getattr(aval, "shape", ())) * itemsize


def build(traced: tracing.Traced, differentiated: Sequence[bool]) -> Graph:
    """The graph of a traced block.

    Args:
        traced: the block, `tracing.trace(block_fn, *args)`.
        differentiated: for each flat argument, whether its gradient is wanted. What the block
            captured is always differentiated.

    Returns:
        The graph, with what each derivative reads.

    Example:
        >>> import jax.numpy as jnp
        >>> traced = tracing.trace(lambda w, x: jnp.exp(x @ w), jnp.ones((2, 3)), jnp.ones((1, 2)))
        >>> dot, exp = build(traced, [True, False]).nodes
        >>> dot.kind, dot.reads, exp.reads, exp.again  # x; exp reads its own output
        ('heavy', frozenset({1}), frozenset(), True)
    """
    jaxpr = traced.jaxpr
    numbers: dict[Any, int] = {}
    avals: list[Any] = []

    def number(var: Any) -> int:
        if var not in numbers:
            numbers[var] = len(avals)
            avals.append(var.aval)
        return numbers[var]

    operands = [*jaxpr.constvars, *jaxpr.invars]
    for var in operands:
        number(var)
    nodes: list[Node] = []
    wired: list[tuple[tuple[Any, ...], tuple[Any, ...]]] = []
    equations, outvars = flat_equations(jaxpr)
    for flat in equations:
        inputs = tuple(number(v) for v in flat.invars if not isinstance(v, jex.Literal))
        outputs = tuple(number(v) for v in flat.outvars)
        nodes.append(Node(flat.eqn, inputs, outputs, _kind(flat.eqn, flat.choice)))
        wired.append((flat.invars, flat.outvars))
    marks = [*[True] * len(jaxpr.constvars), *differentiated]
    moving = {
        number(v) for v, mark in zip(operands, marks, strict=True) if mark and is_inexact(v.aval)
    }
    outputs = tuple(number(v) for v in outvars if not isinstance(v, jex.Literal))
    slots = [
        tuple(None if isinstance(v, jex.Literal) else numbers[v] for v in invars)
        for invars, _ in wired
    ]
    nodes = _with_reads(nodes, slots, moving, {o for o in outputs if is_inexact(avals[o])})
    sites: dict[str, tuple[int, ...]] = {}
    for place, node in enumerate(nodes):
        if node.kind == "name":
            name = node.eqn.params["name"]
            sites[name] = (*sites.get(name, ()), place)
    return Graph(tuple(nodes), tuple(avals), outputs, sites)


def _kind(eqn: Any, inside_choice: bool) -> str:
    if tracing.is_name(eqn):
        return "name"
    if inside_choice or tracing.is_choice(eqn):
        return "choice"
    return "heavy" if tracing.is_heavy(eqn) else "light"


def _with_reads(
    nodes: list[Node],
    slots: list[tuple[int | None, ...]],
    moving: set[int],
    targets: set[int],
) -> list[Node]:
    """Nodes with what their derivatives read; `moving` grows to every value that carries one."""
    wanted = set(targets)  # values from which a live output can be reached
    for node in reversed(nodes):
        if wanted.intersection(node.outputs):
            wanted.update(node.inputs)
    rules = Rules()
    masks: list[tuple[bool, ...]] = []
    for node, slot in zip(nodes, slots, strict=True):
        mask = tuple(v is not None and v in moving for v in slot)
        masks.append(mask)
        if any(mask) and wanted.intersection(node.outputs):
            for out, moves in zip(node.outputs, rules.moves(node.eqn, mask), strict=True):
                if moves:
                    moving.add(out)
    found: list[Node] = []
    live = set(targets)
    for node, slot, mask in zip(reversed(nodes), reversed(slots), reversed(masks), strict=True):
        lit = tuple(v in live and v in moving for v in node.outputs)
        if not (any(mask) and any(lit)):
            found.append(node)
            continue
        rule = rules.rule(node.eqn, mask, lit)
        reads = frozenset(v for v, r in zip(slot, rule.reads, strict=True) if r and v is not None)
        live.update(v for v, p in zip(slot, rule.passes, strict=True) if p and v is not None)
        found.append(dataclasses.replace(node, reads=reads, again=rule.again))
    return found[::-1]


def recomputed(graph: Graph, policy: Policy) -> Replayed:
    """What backward evaluates again, and which kept values it reads.

    Args:
        graph: the block.
        policy: actions by name; `tainted_matmuls` is not followed here.

    Returns:
        For each node, whether it is evaluated again.

    Example:
        >>> import jax.numpy as jnp
        >>> traced = tracing.trace(lambda w, x: jnp.exp(x @ w), jnp.ones((2, 3)), jnp.ones((1, 2)))
        >>> recomputed(build(traced, [True, True]), Policy({})).exact  # exp's rule reads its output
        (True, True)
    """
    tainted = tainted_values(graph, policy)
    read, exact = set(), set()  # values whose read version, or exact version, somebody needs
    for node in graph.nodes:
        (exact if node.kind == "choice" else read).update(node.reads)
    evaluated, decoded = [False] * len(graph.nodes), [False] * len(graph.nodes)
    used: dict[int, bool] = {}
    for place in reversed(range(len(graph.nodes))):
        node = graph.nodes[place]
        want_read = not read.isdisjoint(node.outputs)
        want_exact = not exact.isdisjoint(node.outputs)
        if node.kind == "name":
            action = policy[node.eqn.params["name"]]
            compressed, recompute = isinstance(action, Compress), isinstance(action, Recompute)
            used[place] = not recompute and (want_read or (want_exact and not compressed))
            if want_read and recompute:
                read.update(node.inputs)
            if want_exact and (recompute or compressed):
                exact.update(node.inputs)
            continue
        tainted_input = node.kind != "choice" and not tainted.isdisjoint(node.inputs)
        if not tainted_input:
            evaluated[place] = want_read or want_exact or node.again
        elif node.kind == "heavy":
            evaluated[place], decoded[place] = want_read or want_exact, node.again
        else:
            evaluated[place], decoded[place] = want_exact, want_read or node.again
        if evaluated[place]:
            exact.update(node.inputs)
        if decoded[place]:
            read.update(node.inputs)
    return Replayed(tuple(evaluated), tuple(decoded), used)


def tainted_values(graph: Graph, policy: Policy) -> set[int]:
    """Values that backward reads decoded, or recomputed from decoded ones."""
    tainted: set[int] = set()
    for node in graph.nodes:
        flows = not tainted.isdisjoint(node.inputs)
        if node.kind == "name":
            action = policy[node.eqn.params["name"]]
            flows = isinstance(action, Compress) or (flows and isinstance(action, Recompute))
        elif node.kind in ("heavy", "choice"):
            flows = False
        if flows:
            tainted.update(node.outputs)
    return tainted


def input_marks(args: Sequence[Any], argnums: Sequence[int] | None) -> list[bool]:
    """For each flat argument, whether it is differentiated; None is all, as in `hl.explain`."""
    moving = range(len(args)) if argnums is None else [n % len(args) for n in argnums]
    return [i in moving for i, arg in enumerate(args) for _ in jax.tree.leaves(arg)]
