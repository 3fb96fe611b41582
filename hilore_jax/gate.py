"""`gated_blocks`: whether a block decodes or recomputes is decided on the device, after forward.

A GRPO update's own coefficients, hence the risk of reading decoded values, are known once forward
has run. Both ways back are compiled: a block keeps its input and what its policy keeps, and a flag
that arrives with the cotangents picks one (HiLoRe's L or R, arXiv 2609.33570).
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from hilore_jax import arguments, modules, segments
from hilore_jax.actions import Compress, Policy
from hilore_jax.gated_scan import Operands, gated_scan
from hilore_jax.remat import check_undecorated, decorator, is_disabled, traced_block

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
    needs no flag. Under `jax.shard_map` flags may differ between devices, if the token is typed so
    (`jax.lax.pcast(token, axis, to="varying")`).

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
        >>> w, x, policies = (
        ...     jnp.ones((3, 4, 4)) / 8,
        ...     jnp.ones((2, 4)),
        ...     [hl.Policy({"h": hl.Compress("int8")})] * 3,
        ... )
        >>> run = lambda w: hl.gated_blocks(block, w, x, policies, jnp.zeros(3))
        >>> (y, _), pull = jax.vjp(run, w)
        >>> (grads,) = pull((2 * y, jnp.array([1.0, 0.0, 1.0])))  # the second block recomputes
        >>> grads.shape
        (3, 4, 4)
    """
    token = _checked_token(token, len(policies))
    passed, parts, start = [], [], 0
    with arguments.reverse_only(block_fn):
        for policy, stack in segments.pieces(stacked_params, policies):
            stop = start + jax.tree.leaves(stack)[0].shape[0]
            if policy.names(Compress) and not is_disabled():
                x, aux, has_aux, after = _scan_gated(
                    policy, block_fn, stack, x, token[start:stop], shared
                )
            else:
                block = block_fn if is_disabled() else decorator(policy, caller=_CALLER)(block_fn)
                x, aux, has_aux = segments.scan_one(block, stack, x, shared)
                after = token[start:stop]
            parts.append((aux, has_aux))
            passed.append(after)
            start = stop
    return segments.with_aux(x, parts), jnp.concatenate(passed) if passed else token


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


def _scan_gated(
    policy: Policy, fn: Callable[..., Any], stack: Any, x: Any, token: jax.Array, shared: Any
) -> tuple[Any, Any, bool, jax.Array]:
    """`segments.scan_one` under flags: last output, aux, whether there is any, and the token."""
    modules.refuse_linen(fn)
    check_undecorated(policy, fn, _CALLER)
    stack, x = jax.tree.map(lambda a: jnp.asarray(a, jnp.result_type(a)), (stack, x))
    first = jax.tree.map(lambda a: a[0], stack)
    fn, args, _ = arguments.bind_static(fn, frozenset(), (first, x, *shared), {}, _CALLER)
    has_aux = False

    def block(params: Any, x: Any, *shared: Any) -> tuple[Any, Any]:
        nonlocal has_aux
        out, aux, has_aux = segments.split_aux(fn(params, x, *shared), x)
        return out, aux

    with arguments.explained(fn, _CALLER):
        traced = traced_block(policy, block, args, {})
    operands = Operands(traced.closed.consts, *map(jax.tree.leaves, (stack, x, shared)))
    flat, after = gated_scan(policy, traced, token, operands)
    x, aux = jax.tree.unflatten(traced.out_tree, flat)
    return x, aux, has_aux, after
