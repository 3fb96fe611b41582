"""`gated_blocks`: whether a block decodes or recomputes is decided on the device, after forward.

A GRPO update's own coefficients, hence the risk of reading decoded values, are known once forward
has run. Both ways back are compiled: a block keeps its input and what its policy keeps, and a flag
that arrives with the cotangents picks one (HiLoRe's L or R, arXiv 2609.33570).
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import eval_jaxpr
from jax.custom_batching import custom_vmap
from jax.custom_derivatives import SymbolicZero

from hilore_jax import arguments, replay, segments, tracing
from hilore_jax.actions import Compress, Policy
from hilore_jax.remat import decorator, is_disabled, restored, traced_block

_CALLER = "hl.gated_blocks"


def gated_blocks(
    block_fn: Callable[..., Any],
    stacked_params: Any,
    x: Any,
    policies: Sequence[Policy] | Any,
    token: Any,
    *shared: Any,
) -> tuple[Any, jax.Array]:
    """`scan_blocks` whose backward decodes or recomputes each block as a flag says.

    The flags are the cotangent of the returned token, so they may depend on anything that forward
    computed: `y, pull = jax.vjp(...)`, then `pull((d_y, flags))` in the same trace. A block whose
    flag is positive reads the values that its policy compressed; any other (0, NaN, or no cotangent
    at all) recomputes them from the block's input, exact, with the names that the policy stores.
    One executable for all flags, and the memory of the policies. A policy that compresses nothing
    needs no flag.

    Args:
        block_fn: `block_fn(params, x, *shared) -> x` or `-> (x, aux)`; pure.
        stacked_params: as in `scan_blocks`.
        x: the first block's input, any pytree.
        policies: one for each block.
        token: float `[blocks]`, zeros; returned as it is.
        *shared: arguments that every block reads, as in `scan_blocks`.

    Returns:
        What `scan_blocks` returns (the last block's output, or `(output, aux)`), and the token.

    Raises:
        TypeError: a token that is not floating point.
        ValueError: one that has not one number a block; `jax.vmap` over blocks or flags, under
            which both ways would run for every block; and what `scan_blocks` refuses.

    Example:
        >>> import jax, jax.numpy as jnp, hilore_jax as hl
        >>> from jax.ad_checkpoint import checkpoint_name
        >>> block = lambda w, x: jnp.tanh(checkpoint_name(x @ w, "h"))
        >>> w, x, policies = jnp.ones((3, 4, 4)) / 8, jnp.ones((2, 4)), [hl.Policy({
        ...     "h": hl.Compress("int8")})] * 3
        >>> run = lambda w: hl.gated_blocks(block, w, x, policies, jnp.zeros(3))
        >>> (y, _), pull = jax.vjp(run, w)
        >>> grads, = pull((2 * y, jnp.array([1.0, 0.0, 1.0])))  # the second block recomputes
        >>> grads.shape
        (3, 4, 4)
    """
    cut = segments.pieces(stacked_params, policies)
    token = _checked_token(token, len(policies))

    def block_under(policy: Policy) -> Callable[..., Any]:
        block = gated(policy, block_fn)

        def run(params_and_token: Any, x: Any, *shared: Any) -> tuple[Any, Any]:
            nonlocal has_aux
            out, passed = block(params_and_token[1], params_and_token[0], x, *shared)
            out, aux, has_aux = segments.split_aux(out, x)
            return out, (aux, passed)

        return run

    has_aux, start, with_token = False, 0, []
    for policy, stack in cut:
        stop = start + jax.tree.leaves(stack)[0].shape[0]
        with_token.append((policy, (stack, token[start:stop])))
        start = stop
    with arguments.reverse_only(block_fn):
        x, aux, any_block = segments.scan_pieces(block_under, with_token, x, shared)
    aux, token = aux if any_block else (None, token)
    return ((x, aux) if has_aux else x), token


def _checked_token(token: Any, blocks: int) -> jax.Array:
    token = jnp.asarray(token)
    if not jnp.issubdtype(token.dtype, jnp.floating):
        raise TypeError(
            f"{_CALLER}: token is {token.dtype}: expected floating point, whose cotangent carries "
            f"the flags: jnp.zeros({blocks})."
        )
    if token.shape != (blocks,):
        raise ValueError(
            f"{_CALLER}: token has shape {list(token.shape)}, expected one number for each of the "
            f"{blocks} blocks: jnp.zeros({blocks})."
        )
    return token


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


def gated(policy: Policy, fn: Callable[..., Any]) -> Callable[..., tuple[Any, Any]]:
    """One block under a flag: `(token, *args) -> (fn(*args), token)`."""

    def call(token: Any, *args: Any) -> tuple[Any, Any]:
        passed: list[Any] = []

        def apply(policy: Policy, fn: Callable, *args: Any, **kwargs: Any) -> Any:
            traced = traced_block(policy, fn, args, kwargs)
            out, after = _apply(policy, traced, token, jax.tree.leaves((args, kwargs)))
            passed.append(after)
            return restored(traced, out)

        lossy = bool(policy.names(Compress))
        decorate = decorator(policy, caller=_CALLER, **({"apply": apply} if lossy else {}))
        out = fn(*args) if is_disabled() else decorate(fn)(*args)
        return out, passed[0] if passed else token

    return call


@custom_vmap
def _refusing_vmap(value: Any, *beside: Any) -> Any:
    """`value`, where neither it nor anything beside it is mapped by `jax.vmap`."""
    return value


@_refusing_vmap.def_vmap
def _refuse(axis_size: int, mapped: Any, *args: Any) -> Any:
    raise ValueError(
        f"{_CALLER} under jax.vmap (an axis of {axis_size}): the branch of a gated block would "
        "become a selection that decodes and recomputes every block. Give the blocks a batch "
        "axis instead and one flag for all its rows, loop with jax.lax.map or jax.lax.scan, or "
        "run hl.scan_blocks, whose policies are fixed."
    )


class _Ways(NamedTuple):
    """Both programs, on the same leaves."""

    decode: replay.Program
    recompute: replay.Program


def _ways(
    policy: Policy,
    traced: tracing.Traced,
    perturbed: tuple[bool, ...],
    kept: Any,
    live: tuple[bool, ...],
) -> _Ways:
    """Backward by what the policy kept, and by its exact part; see `replay.backward_program`."""
    operands = [v.aval for v in (*traced.jaxpr.constvars, *traced.jaxpr.invars)]
    exact = exact_part(policy)
    _, exactly = jax.eval_shape(lambda *x: replay.run_and_keep(exact, traced, x), *operands)
    decode = replay.backward_program(policy, traced, perturbed, kept, live)
    recompute = replay.backward_program(exact, traced, perturbed, exactly, live)
    reads = iter(recompute.reads)
    reads_all = [next(reads) for _ in operands]
    for site, exact_site in zip(kept, exactly, strict=True):
        reads_all += [exact_site is not None and next(reads) for _ in jax.tree.leaves(site)]
    return _Ways(decode, recompute._replace(reads=[*reads_all, *reads]))


def _apply(
    policy: Policy, traced: tracing.Traced, token: Any, args: Sequence[Any]
) -> tuple[list[Any], Any]:
    """`replay.apply` with both ways back, and the token whose cotangent chooses."""
    differentiable = tuple(jnp.issubdtype(v.aval.dtype, jnp.inexact) for v in traced.jaxpr.outvars)

    def forward(token: Any, *primals: Any) -> tuple[Any, replay.Residuals]:
        operands = [p.value for p in primals]
        perturbed = tuple(
            p.perturbed and jnp.issubdtype(p.value.dtype, jnp.inexact) for p in primals
        )
        out, kept = replay.run_and_keep(policy, traced, operands)
        abstract = jax.tree.map(jax.typeof, kept)
        ways = functools.cache(functools.partial(_ways, policy, traced, perturbed, abstract))
        decode, recompute = ways(differentiable)
        used = [
            x if by_decode or by_recompute else None
            for x, by_decode, by_recompute in zip(
                jax.tree.leaves((operands, kept)), decode.reads, recompute.reads, strict=False
            )
        ]
        passed = _refusing_vmap(token.value, *operands)
        return (out, passed), replay.Residuals(tuple(used), replay.Backward(perturbed, ways))

    def backward(residuals: replay.Residuals, cotangents: Any) -> tuple[Any, ...]:
        outputs, flag = cotangents
        live = tuple(
            inexact and not isinstance(ct, SymbolicZero)
            for inexact, ct in zip(differentiable, outputs, strict=True)
        )
        perturbed, ways = residuals.backward
        decode, recompute = ways(live)
        values = [*residuals.leaves, *(ct for ct, use in zip(outputs, live, strict=True) if use)]

        def run(program: replay.Program, values: list[Any]) -> list[Any]:
            read = [x for x, use in zip(values, program.reads, strict=True) if use]
            return eval_jaxpr(program.jaxpr, program.consts, *read)

        if isinstance(flag, SymbolicZero):
            found, d_token = run(recompute, values), None
        else:
            chosen = _refusing_vmap(flag) > 0
            branches = functools.partial(run, decode), functools.partial(run, recompute)
            found, d_token = jax.lax.cond(chosen, *branches, values), flag
        remaining = iter(found)
        return d_token, *(next(remaining) if p else None for p in perturbed)

    @jax.custom_vjp
    def block(token: Any, *operands: Any) -> tuple[list[Any], Any]:
        out = replay.run_and_keep(Policy({}), traced, operands)[0]
        return out, _refusing_vmap(token, *operands)

    block.defvjp(forward, backward, symbolic_zeros=True)
    return block(token, *traced.closed.consts, *args)
