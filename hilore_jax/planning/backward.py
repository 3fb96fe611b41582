"""Figures of a block's real backward program: kept bytes, matmuls, and what was evaluated again."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import eval_jaxpr

from hilore_jax import modules, replay, tracing
from hilore_jax.actions import Offload, Policy
from hilore_jax.planning.graph import Graph, build, input_marks
from hilore_jax.planning.rules import flat_equations, is_inexact
from hilore_jax.work import Work, work

Key = tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Figures:
    """What one policy's backward program keeps and evaluates again.

    Attributes:
        nbytes: bytes kept in device memory between forward and backward, of all names.
        offloaded: bytes kept in host memory.
        work: matmuls evaluated again, and their FLOPs.
        equations: how often each kind of equation is evaluated more than without
            rematerialization, by `equation_key`.
    """

    nbytes: int
    offloaded: int
    work: Work
    equations: Counter[Key]


@dataclasses.dataclass(frozen=True)
class BlockProgram:
    """A traced block, and what its forward and its plain gradient evaluate.

    Attributes:
        traced: the block.
        marks: for each flat argument, whether it is differentiated.
        graph: its dataflow.
        base: matmuls and equations of the plain gradient that are not in forward.
    """

    traced: tracing.Traced
    marks: tuple[bool, ...]
    graph: Graph
    base: tuple[Work, Counter[Key]]

    def figures(self, policy: Policy) -> Figures:
        """Traces backward under a policy and counts what it holds beyond the plain one's.

        A policy without Compress lowers to `jax.checkpoint`, whose backward is this same replay.
        """
        if policy.keeps_everything:
            raise ValueError("figures: Policy(default=Store()) has no backward program of its own.")
        program, kept = replay.backward_and_bytes(policy, self.traced, self.marks)
        names = [s.name for s in tracing.sites(self.traced.jaxpr) if not s.inside]
        sizes = {False: 0, True: 0}
        for name, size in zip(names, kept, strict=True):
            sizes[isinstance(policy[name], Offload)] += size
        again = count_equations(program)
        again.subtract(self.base[1])
        repeated = Counter({key: n for key, n in again.items() if n})
        return Figures(sizes[False], sizes[True], work(program) - self.base[0], repeated)


def block_program(
    block_fn: Callable[..., Any], *args: Any, argnums: Sequence[int] | None = None
) -> BlockProgram:
    """Traces a block and its plain gradient.

    Args:
        block_fn: the undecorated block.
        *args: its arguments, arrays or `jax.ShapeDtypeStruct`s.
        argnums: positions of the arguments that are differentiated; None is all.

    Raises:
        TypeError: an argument is an NNX module.
    """
    if any(modules.is_module(x) for x in jax.tree.leaves(args, is_leaf=modules.is_leaf)):
        raise TypeError(
            "a block to plan takes arrays, found an NNX module among its arguments; split it with "
            "nnx.split and pass the state, as models.BlockFn does."
        )
    traced = tracing.trace(block_fn, *args)
    marks = input_marks(args, argnums)
    graph = build(traced, marks)
    forward, gradient = _plain(traced, marks)
    base = count_equations(gradient)
    base.subtract(count_equations(forward))
    return BlockProgram(traced, tuple(marks), graph, (work(gradient) - work(forward), base))


def _perturbed(traced: tracing.Traced, marks: Sequence[bool]) -> list[bool]:
    inputs = [*traced.jaxpr.constvars, *traced.jaxpr.invars]
    wanted = [*[True] * len(traced.jaxpr.constvars), *marks]
    return [mark and is_inexact(v.aval) for v, mark in zip(inputs, wanted, strict=True)]


def _plain(traced: tracing.Traced, marks: Sequence[bool]) -> tuple[Any, Any]:
    """Forward, and forward with gradient, without rematerialization and dead code."""
    perturbed = _perturbed(traced, marks)
    split = len(traced.jaxpr.constvars)
    inputs = [v.aval for v in (*traced.jaxpr.constvars, *traced.jaxpr.invars)]

    def forward(operands: Sequence[Any]) -> list[Any]:
        out = eval_jaxpr(traced.jaxpr, operands[:split], *operands[split:])
        return [o for o in out if jnp.issubdtype(jnp.result_type(o), jnp.inexact)]

    def gradient(operands: list[Any], cotangents: list[Any]) -> Any:
        def moved(moving: list[Any]) -> list[Any]:
            values = iter(moving)
            full = zip(operands, perturbed, strict=True)
            return forward([next(values) if p else x for x, p in full])

        out, pull = jax.vjp(moved, [x for x, p in zip(operands, perturbed, strict=True) if p])
        return out, pull(cotangents)

    shapes = [v.aval for v in traced.jaxpr.outvars if is_inexact(v.aval)]
    closed = tracing.trace(forward, inputs).closed, tracing.trace(gradient, inputs, shapes).closed
    return tracing.prune(closed[0])[0], tracing.prune(closed[1])[0]


def count_equations(jaxpr: Any) -> Counter[Key]:
    """Equations of a jaxpr by `equation_key`; calls are opened, loops are not.

    Example:
        >>> program = tracing.trace(lambda x: jnp.sin(x) + jnp.sin(x), 1.0).jaxpr
        >>> sorted(count_equations(program).values())
        [1, 2]
    """
    found: Counter[Key] = Counter()
    for flat in flat_equations(jaxpr)[0]:
        found.update(opened(flat.eqn))
    return found


def opened(eqn: Any) -> Counter[Key]:
    """One equation by key, or those inside where it is a call."""
    inner = tracing.inner_jaxprs(eqn)
    calls = ("custom_jvp", "custom_vjp", "checkpoint", "remat", "closed_call", "core_call")
    if inner and eqn.primitive.name.startswith(calls):
        return count_equations(inner[0])
    return Counter([equation_key(eqn)])


def equation_key(eqn: Any) -> Key:
    """Equal for equations of one primitive that make the same, and contract the same.

    Other operands and outputs are left out: a sort or loop that is differentiated carries more.
    """
    name = eqn.primitive.name
    if name in tracing.MATMULS:
        atoms = (*eqn.invars, *eqn.outvars)
        return name, str(eqn.params.get("dimension_numbers")), _shapes(atoms)
    return name, "", _shapes(eqn.outvars[:1])


def _shapes(atoms: Sequence[Any]) -> tuple[str, ...]:
    return tuple(v.aval.str_short() for v in atoms)
