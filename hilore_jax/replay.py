"""The block-level derivative rule of a policy with compressed names.

Forward evaluates the traced block as it is, so its values are untouched, and keeps the encoded
activations. Backward replays the block with each kept name's primal swapped for what was kept and
the tangent of the original, then transposes it; producers that nothing reads any more are dead.

A decoded value feeds the derivatives that read it and elementwise recomputation. Matmuls, opaque
kernels and discrete choices (orders, indices, branches) are recomputed from exact values; the first
two may read decoded ones where the policy allows it.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import eval_jaxpr
from jax.custom_derivatives import SymbolicZero

from hilore_jax import codecs, tracing
from hilore_jax.actions import Compress, Offload, Policy, Recompute
from hilore_jax.swap import swap


class Program(NamedTuple):
    """Backward as a jaxpr without dead code: `(residual leaves, cotangents) -> cotangents`."""

    jaxpr: Any
    consts: Any
    reads: list[bool]  # for each residual leaf, then for each live output's cotangent


class Backward(NamedTuple):
    """How to go back: static, and compared by identity of the cached function."""

    perturbed: tuple[bool, ...]  # which operands are differentiated
    program: Callable[[tuple[bool, ...]], Any]  # a `Program`, by which outputs have a cotangent


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["leaves"], meta_fields=["backward"]
)
@dataclasses.dataclass(frozen=True)
class Residuals:
    """All that is kept between forward and backward of one block.

    `leaves` are the captured arrays, the arguments, then for each named site its encoded arrays
    or its exact value; None in place of what backward never reads.
    """

    leaves: tuple[Any, ...]
    backward: Backward


class _Value(NamedTuple):
    value: Any  # what the replayed derivative reads
    exact: Any = None  # the undistorted primal where `value` derives from a decoded one


@jax.custom_jvp
def _first_order(x: jax.Array) -> jax.Array:
    """Identity that refuses to be differentiated: codes carry no tangent."""
    return x


@_first_order.defjvp
def _first_order_jvp(primals: Any, tangents: Any) -> Any:
    raise TypeError(
        f"a block that compresses {primals[0].dtype}{list(primals[0].shape)} was differentiated "
        "twice: the encoded activation has no derivative, so the second one would silently lack "
        "terms. Compute it inside `with hl.disabled():`, or Store the name."
    )


def _substitute(primal: jax.Array, original: jax.Array) -> jax.Array:
    if jnp.issubdtype(original.dtype, jnp.inexact):
        return swap(primal, original)
    return primal


def _keep(name: str, action: Any, value: jax.Array) -> Any:
    """The residual of one named value under its action."""
    if isinstance(action, Recompute):
        return None
    with jax.named_scope(f"hilore/{type(action).__name__.lower()}/{name}"):
        if isinstance(action, Compress):
            value = _first_order(value)
            return codecs.encode(value, action.codec, axis=action.axis, tile=action.tile)
        if isinstance(action, Offload):
            return jax.device_put(value, jax.memory.Space.Host)
        return value


def _restore(name: str, action: Any, kept: Any, like: jax.Array) -> jax.Array:
    with jax.named_scope(f"hilore/{type(action).__name__.lower()}/{name}"):
        if isinstance(action, Compress):
            return codecs.decode(
                kept, action.codec, like.shape, like.dtype, axis=action.axis, tile=action.tile
            )
        if isinstance(action, Offload):
            return jax.device_put(kept, jax.memory.Space.Device)
        return kept


def run_and_keep(
    policy: Policy, traced: tracing.Traced, operands: Sequence[Any]
) -> tuple[list[Any], tuple[Any, ...]]:
    """The block's outputs, and what the policy keeps of each named site in program order."""
    kept: list[Any] = []

    def on_equation(eqn: Any, values: list[Any]) -> list[Any]:
        out = tracing.bind(eqn, values)
        if tracing.is_name(eqn):
            name = eqn.params["name"]
            kept.append(_keep(name, policy[name], out[0]))
        return out

    split = len(traced.jaxpr.constvars)
    out = tracing.evaluate(traced.jaxpr, operands[:split], operands[split:], on_equation)
    return out, tuple(kept)


def replay(
    policy: Policy, traced: tracing.Traced, operands: Sequence[Any], kept: Sequence[Any]
) -> list[Any]:
    """The block's outputs as backward sees them: kept names swapped in, the rest recomputed."""
    remaining = iter(kept)

    def on_equation(eqn: Any, values: list[Any]) -> list[_Value]:
        pairs = [v if isinstance(v, _Value) else _Value(v) for v in values]
        tainted = any(p.exact is not None for p in pairs)
        if tainted and tracing.is_choice(eqn):
            # The rule of a choice reads its operands again: they must be exact, not only its out.
            pairs = [p if p.exact is None else _Value(_substitute(*p[::-1])) for p in pairs]
            tainted = False
        out = tracing.bind(eqn, [p.value for p in pairs])
        exact: list[Any] = [None] * len(out)
        if tainted:
            undistorted = [p.value if p.exact is None else p.exact for p in pairs]
            exact = tracing.bind(eqn, undistorted)
        if tracing.is_name(eqn):
            name, residual = eqn.params["name"], next(remaining)
            if residual is not None:
                restored = _substitute(_restore(name, policy[name], residual, out[0]), out[0])
                if not isinstance(policy[name], Compress):
                    return [_Value(restored)]
                return [_Value(restored, exact[0] if tainted else out[0])]
        if tainted and not policy.tainted_matmuls and tracing.is_heavy(eqn):
            return [_Value(_substitute(e, o)) for e, o in zip(exact, out, strict=True)]
        return [_Value(o, e) for o, e in zip(out, exact, strict=True)]

    split = len(traced.jaxpr.constvars)
    out = tracing.evaluate(
        traced.jaxpr,
        [_Value(c) for c in operands[:split]],
        [_Value(a) for a in operands[split:]],
        on_equation,
    )
    return [o.value if isinstance(o, _Value) else o for o in out]


def backward_program(
    policy: Policy,
    traced: tracing.Traced,
    perturbed: tuple[bool, ...],
    kept: Any,
    live: tuple[bool, ...],
    barrier: bool = True,
) -> Program:
    """Traces backward on abstract values.

    Args:
        policy: what is kept.
        traced: the block.
        perturbed: which operands are differentiated.
        kept: abstract kept values, one tree for each site.
        live: which outputs have a cotangent.
        barrier: off where a branch around the program is one.
    """

    # Under jax.checkpoint, whose barrier spans residuals *and* cotangents: nothing is recomputed
    # before this block's backward begins, and CSE cannot undo it.
    @jax.checkpoint if barrier else lambda fn: fn
    def replayed(moving: list[Any], resting: list[Any], kept: Any) -> list[Any]:
        moving_, resting_ = iter(moving), iter(resting)
        operands = [next(moving_) if p else next(resting_) for p in perturbed]
        out = replay(policy, traced, operands, kept)
        return [o for o, use in zip(out, live, strict=True) if use]

    def backward(operands: Any, kept: Any, cotangents: Any) -> Any:
        moving = [x for x, p in zip(operands, perturbed, strict=True) if p]
        resting = [x for x, p in zip(operands, perturbed, strict=True) if not p]
        _, pull = jax.vjp(lambda m: replayed(m, resting, kept), moving)
        return pull(cotangents)[0]

    cotangents = [v.aval for v, use in zip(traced.jaxpr.outvars, live, strict=True) if use]
    inputs = [v.aval for v in (*traced.jaxpr.constvars, *traced.jaxpr.invars)]
    closed = tracing.trace(backward, inputs, kept, cotangents).closed
    jaxpr, reads = tracing.prune(closed)
    return Program(jaxpr, closed.consts, reads)


def backward_and_bytes(
    policy: Policy, traced: tracing.Traced, differentiated: Sequence[bool]
) -> tuple[Any, list[int]]:
    """Backward when the marked arguments move, and the bytes that each named site leaves for it.

    A site whose kept value backward never reads leaves none.

    Returns:
        The jaxpr of backward without dead code, and bytes by site in program order.
    """
    inputs = [v.aval for v in (*traced.jaxpr.constvars, *traced.jaxpr.invars)]
    marks = [*[True] * len(traced.jaxpr.constvars), *differentiated]
    perturbed = tuple(
        mark and jnp.issubdtype(a.dtype, jnp.inexact) for a, mark in zip(inputs, marks, strict=True)
    )
    live = tuple(jnp.issubdtype(v.aval.dtype, jnp.inexact) for v in traced.jaxpr.outvars)
    _, kept = jax.eval_shape(lambda *x: run_and_keep(policy, traced, x), *inputs)
    program = backward_program(policy, traced, perturbed, kept, live)
    reads = iter(program.reads[len(inputs) :])
    return program.jaxpr, [
        sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(site) if next(reads))
        for site in kept
    ]


def tainted_names(policy: Policy, traced: tracing.Traced) -> set[str]:
    """Names that backward would recompute, elementwise, from a decoded value."""
    names: set[str] = set()

    def on_equation(eqn: Any, values: list[Any]) -> list[bool]:
        tainted = any(v is True for v in values)
        if tracing.is_name(eqn):
            action = policy[eqn.params["name"]]
            if isinstance(action, Recompute) and tainted:
                names.add(eqn.params["name"])
            return [isinstance(action, Compress) or (tainted and isinstance(action, Recompute))]
        if tracing.is_choice(eqn) or (tracing.is_heavy(eqn) and not policy.tainted_matmuls):
            tainted = False
        return [tainted] * len(eqn.outvars)

    jaxpr = traced.jaxpr
    clean = [False] * len(jaxpr.constvars), [False] * len(jaxpr.invars)
    tracing.evaluate(jaxpr, *clean, on_equation)
    return names


def apply(policy: Policy, traced: tracing.Traced, args: Sequence[Any]) -> list[Any]:
    """Evaluates a traced block under a policy that compresses some of its names.

    Args:
        policy: names to store, compress, offload; the rest is recomputed.
        traced: the block; what it captured (`traced.closed.consts`) becomes an explicit operand.
        args: the block's flat arguments.

    Returns:
        The block's flat outputs; differentiating them keeps `Residuals` only.
    """
    differentiable = tuple(jnp.issubdtype(v.aval.dtype, jnp.inexact) for v in traced.jaxpr.outvars)

    def forward(*primals: Any) -> tuple[list[Any], Residuals]:
        operands = [p.value for p in primals]
        perturbed = tuple(
            p.perturbed and jnp.issubdtype(p.value.dtype, jnp.inexact) for p in primals
        )
        out, kept = run_and_keep(policy, traced, operands)
        abstract = jax.tree.map(jax.typeof, kept)
        program = functools.cache(
            functools.partial(backward_program, policy, traced, perturbed, abstract)
        )
        # Frozen weights, biases, values that only they need: what backward never reads is dropped.
        reads = program(differentiable).reads
        used = [
            x if read else None
            for x, read in zip(jax.tree.leaves((operands, kept)), reads, strict=False)
        ]
        return out, Residuals(tuple(used), Backward(perturbed, program))

    def backward(residuals: Residuals, cotangents: list[Any]) -> tuple[Any, ...]:
        live = tuple(
            inexact and not isinstance(ct, SymbolicZero)
            for inexact, ct in zip(differentiable, cotangents, strict=True)
        )
        program = residuals.backward.program(live)
        values = [*residuals.leaves, *(ct for ct, use in zip(cotangents, live, strict=True) if use)]
        read = [x for x, use in zip(values, program.reads, strict=True) if use]
        found = iter(eval_jaxpr(program.jaxpr, program.consts, *read))
        return tuple(next(found) if p else None for p in residuals.backward.perturbed)

    @jax.custom_vjp
    def block(*operands: Any) -> list[Any]:
        return run_and_keep(Policy({}), traced, operands)[0]

    block.defvjp(forward, backward, symbolic_zeros=True)
    return block(*traced.closed.consts, *args)
