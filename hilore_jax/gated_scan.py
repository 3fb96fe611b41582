"""A scan over equal blocks with two ways back: by what their policy kept, or exact.

One derivative rule for the scan, not one for each block: each branch slices only the arrays that it
reads. Sliced before the branch, those of both would exist whole, weights included.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.custom_derivatives import SymbolicZero

from hilore_jax import replay, tracing
from hilore_jax.actions import Compress, Policy


def exact_part(policy: Policy) -> Policy:
    """What a block keeps and reads where its flag is off: the policy without compressed names.

    Example:
        >>> import hilore_jax as hl
        >>> str(exact_part(hl.Policy({"up": hl.Compress("int8"), "attn_out": hl.Store()})))
        'attn_out=store'
    """
    if policy.keeps_everything:
        return policy
    return Policy({name: a for name, a in policy.actions if not isinstance(a, Compress)})


@custom_vmap
def _refusing_vmap(value: Any, *beside: Any) -> Any:
    """`value`, where neither it nor anything beside it is mapped by `jax.vmap`."""
    return value


@_refusing_vmap.def_vmap
def _refuse(axis_size: int, mapped: Any, *args: Any) -> Any:
    raise ValueError(
        f"hl.gated_blocks under jax.vmap (an axis of {axis_size}): the branch of a gated "
        "block would become a selection that decodes and recomputes every block. Give the "
        "blocks a batch axis instead and one flag for all its rows, loop with jax.lax.map or "
        "jax.lax.scan, or run hl.scan_blocks, whose policies are fixed."
    )


class _Slice(NamedTuple):
    """One block's part of a stacked array, not taken yet."""

    stack: Any
    at: Any


def _taken(value: Any, at: Any = None) -> Any:
    if not isinstance(value, _Slice):
        return value
    at = value.at if at is None else at
    return jax.lax.dynamic_index_in_dim(value.stack, at, keepdims=False)


def _slicing(eqn: Any, values: list[Any]) -> list[Any]:
    """One equation, which takes its slices when it runs and does not share them.

    A slice that recomputation shared with the cotangents would live from the one to the other:
    that of every weight at once. The barrier makes its index wait for another operand.
    """
    others = [i for i, v in enumerate(values) if isinstance(v, jax.Array)]
    if not others or not tracing.is_heavy(eqn):
        return tracing.bind(eqn, [_taken(v) for v in values])
    last, at = others[-1], next((v.at for v in values if isinstance(v, _Slice)), None)
    if at is not None:
        values[last], at = jax.lax.optimization_barrier((values[last], at))
    return tracing.bind(eqn, [_taken(v, at) for v in values])


class _Ways(NamedTuple):
    """Both programs, on the same leaves."""

    decode: replay.Program
    recompute: replay.Program


def _ways(
    policy: Policy,
    traced: tracing.Traced,
    perturbed: tuple[bool, ...],
    live: tuple[bool, ...],
) -> _Ways:
    """Backward by what the policy kept, and by its exact part; see `replay.backward_program`."""
    operands = [v.aval for v in (*traced.jaxpr.constvars, *traced.jaxpr.invars)]
    kept, exactly = (_kept(p, traced) for p in (policy, exact_part(policy)))
    # Nothing crosses a branch, and XLA is free to slice each array where it is read.
    program = functools.partial(replay.backward_program, barrier=False)
    decode = program(policy, traced, perturbed, kept, live)
    recompute = program(exact_part(policy), traced, perturbed, exactly, live)
    reads = iter(recompute.reads)
    reads_all = [next(reads) for _ in operands]
    for site, exact_site in zip(kept, exactly, strict=True):
        reads_all += [exact_site is not None and next(reads) for _ in jax.tree.leaves(site)]
    return _Ways(decode, recompute._replace(reads=[*reads_all, *reads]))


def _kept(policy: Policy, traced: tracing.Traced) -> tuple[Any, ...]:
    """What a policy keeps of each site, abstract."""
    operands = [v.aval for v in (*traced.jaxpr.constvars, *traced.jaxpr.invars)]
    return jax.eval_shape(lambda *x: replay.run_and_keep(policy, traced, x)[1], *operands)


class Operands(NamedTuple):
    """What the blocks read, flat, in the order of the traced block's inputs."""

    captured: Sequence[Any]  # closed over
    stack: Sequence[Any]  # params, one slice a block
    x: Sequence[Any]  # the first block's input
    shared: Sequence[Any]


def gated_scan(
    policy: Policy,
    traced: tracing.Traced,
    token: jax.Array,
    operands: Operands,
) -> tuple[list[Any], jax.Array]:
    """Runs equal blocks in a row; see `gate.gated_blocks`.

    Args:
        policy: what the blocks keep; compresses some of their names.
        traced: one block, `(params, x, *shared) -> (x, aux)`.
        token: `[blocks]`; its cotangent holds the flags.
        operands: flat.

    Returns:
        The last output and the stacked aux, flat, and the token.
    """
    captured, stacked, width, _ = map(len, operands)
    ends = captured, captured + stacked, captured + stacked + width
    blocks = token.shape[0]
    inputs: list[Any] = [v.aval for v in (*traced.jaxpr.constvars, *traced.jaxpr.invars)]
    outputs = [v.aval for v in traced.jaxpr.outvars]
    inexact = [jnp.issubdtype(a.dtype, jnp.inexact) for a in inputs]
    differentiable = [jnp.issubdtype(a.dtype, jnp.inexact) for a in outputs]
    moving = [i for i in range(*ends[1:]) if inexact[i]]  # leaves of x with a cotangent

    def run(policy: Policy, operands: Sequence[Any], keep: Sequence[bool]) -> Any:
        fixed, shared = operands[: ends[0]], operands[ends[2] :]

        def body(x: list[Any], params: list[Any]) -> tuple[list[Any], Any]:
            out, kept = replay.run_and_keep(policy, traced, [*fixed, *params, *x, *shared])
            leaves = [*x, *jax.tree.leaves(kept)]
            return out[:width], (out[width:], [k for k, u in zip(leaves, keep, strict=False) if u])

        x, stack = list(operands[ends[1] : ends[2]]), list(operands[ends[0] : ends[1]])
        x, (aux, kept) = jax.lax.scan(body, x, stack, length=blocks)
        return [*x, *aux], kept

    def forward(token: Any, *primals: Any) -> tuple[Any, replay.Residuals]:
        operands = [p.value for p in primals]
        perturbed = [p.perturbed and i for p, i in zip(primals, inexact, strict=True)]
        if any(perturbed):
            for i in moving:
                perturbed[i] = True
        ways = functools.cache(functools.partial(_ways, policy, traced, tuple(perturbed)))
        decode, recompute = ways(tuple(differentiable))
        reads = [a or b for a, b in zip(decode.reads, recompute.reads, strict=True)]
        reads = reads[: len(reads) - sum(differentiable)]
        out, found = run(policy, operands, [*reads[ends[1] : ends[2]], *reads[len(operands) :]])
        kept = iter(found)
        leaves: list[Any] = [x if use else None for x, use in zip(operands, reads, strict=False)]
        leaves[ends[1] : ends[2]] = [next(kept) if u else None for u in reads[ends[1] : ends[2]]]
        leaves += [next(kept) if use else None for use in reads[len(operands) :]]
        backward = replay.Backward(tuple(perturbed), ways)
        return (out, _refusing_vmap(token.value, *operands)), replay.Residuals(
            tuple(leaves), backward
        )

    def backward(residuals: replay.Residuals, cotangents: Any) -> tuple[Any, ...]:
        (out, flags), (perturbed, ways) = cotangents, residuals.backward
        if not any(perturbed):
            return None if isinstance(flags, SymbolicZero) else flags, *(None for _ in inputs)
        live = [
            use and (i < width or not isinstance(ct, SymbolicZero))
            for i, (use, ct) in enumerate(zip(differentiable, out, strict=True))
        ]
        decode, recompute = ways(tuple(live))
        d_x = [_instantiated(ct) for ct, use in zip(out[:width], live, strict=False) if use]
        d_aux = [ct for ct, use in zip(out[width:], live[width:], strict=True) if use]
        by_block = [
            ends[0] <= i < ends[2] or i >= len(inputs) for i in range(len(residuals.leaves))
        ]
        summed = [i for i, p in enumerate(perturbed) if p and not ends[0] <= i < ends[2]]
        stepped = [i for i, p in enumerate(perturbed) if p and ends[0] <= i < ends[1]]
        places = [i for i, p in enumerate(perturbed) if p]

        def body(carry: tuple[list[Any], list[Any]], at: jax.Array) -> Any:
            d_x, totals = carry

            def go(program: replay.Program, d_x: list[Any]) -> list[Any]:
                values = [*residuals.leaves, *d_x, *d_aux]
                whole = [*(not b for b in by_block), *[True] * len(d_x), *[False] * len(d_aux)]
                read = [
                    x if one else _Slice(x, at)
                    for x, one, use in zip(values, whole, program.reads, strict=True)
                    if use
                ]
                out = tracing.evaluate(program.jaxpr, program.consts, read, _slicing)
                return [_taken(o) for o in out]

            if isinstance(flags, SymbolicZero):
                found = go(recompute, d_x)
            else:
                branches = functools.partial(go, decode), functools.partial(go, recompute)
                found = jax.lax.cond(_refusing_vmap(flags)[at] > 0, *branches, d_x)
            by_place = dict(zip(places, found, strict=True))
            totals = [t + by_place[i] for t, i in zip(totals, summed, strict=True)]
            return ([by_place[i] for i in moving], totals), [by_place[i] for i in stepped]

        zeros = [jnp.zeros(inputs[i].shape, inputs[i].dtype) for i in summed]
        start, steps = (d_x, zeros), jnp.arange(blocks)
        (d_x, totals), d_stack = jax.lax.scan(body, start, steps, reverse=True)
        places_found = dict(
            zip((*moving, *summed, *stepped), (*d_x, *totals, *d_stack), strict=True)
        )
        d_token = None if isinstance(flags, SymbolicZero) else flags
        return d_token, *(places_found.get(i) for i in range(len(inputs)))

    @jax.custom_vjp
    def block(token: Any, *operands: Any) -> tuple[list[Any], Any]:
        return run(Policy({}), operands, [])[0], _refusing_vmap(token, *operands)

    block.defvjp(forward, backward, symbolic_zeros=True)
    return block(token, *(leaf for part in operands for leaf in part))


def _instantiated(cotangent: Any) -> Any:
    if isinstance(cotangent, SymbolicZero):
        aval: Any = cotangent.aval
        return jnp.zeros(aval.shape, aval.dtype)
    return cotangent
