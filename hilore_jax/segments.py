"""`scan_blocks`: blocks in a row, each under its own policy, in as few scans as that allows."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from hilore_jax import arguments
from hilore_jax.actions import Policy
from hilore_jax.intervene import Interventions
from hilore_jax.remat import check_policy, decorator, is_disabled


class Segment(NamedTuple):
    """Consecutive blocks of equal policy."""

    policy: Policy
    start: int  # index of its first block
    stop: int  # one past its last


def segments(policies: Sequence[Policy] | Any) -> tuple[Segment, ...]:
    """The runs of equal consecutive policies.

    Example:
        >>> import hilore_jax as hl
        >>> gc, store = hl.Policy({}), hl.Policy(default=hl.Store())
        >>> [(s.start, s.stop) for s in segments([gc, gc, store, gc])]
        [(0, 2), (2, 3), (3, 4)]
    """
    if isinstance(policies, Policy) or not isinstance(policies, Sequence):
        raise TypeError(
            f"policies is a {type(policies).__name__}: expected a sequence with one hl.Policy for "
            "each block, such as (policy,) * n_blocks."
        )
    runs: list[Segment] = []
    for i, policy in enumerate(policies):
        check_policy(policy, "scan_blocks")
        if runs and runs[-1].policy == policy:
            runs[-1] = runs[-1]._replace(stop=i + 1)
        else:
            runs.append(Segment(policy, i, i + 1))
    return tuple(runs)


def _length(stack: Any, where: str) -> int:
    leaves = jax.tree.leaves_with_path(stack)
    if not leaves:
        raise ValueError(f"scan_blocks: {where} has no arrays to scan over.")
    sizes: dict[int, str] = {}
    for path, leaf in leaves:
        shape = jnp.shape(leaf)
        if not shape:
            raise ValueError(
                f"scan_blocks: {where}{jax.tree_util.keystr(path)} is a scalar; every array needs "
                "a leading axis of blocks. Pass what all blocks share as *shared."
            )
        sizes.setdefault(shape[0], jax.tree_util.keystr(path))
    if len(sizes) > 1:
        found = ", ".join(f"{name}: {size}" for size, name in sizes.items())
        raise ValueError(f"scan_blocks: leading axes of {where} differ ({found}).")
    return next(iter(sizes))


def _pieces(stacks: tuple[Any, ...], runs: tuple[Segment, ...]) -> list[tuple[Policy, Any]]:
    """Stacks cut where policies change; a stack within one run is passed on uncut."""
    lengths = [_length(stack, f"stacked_params[{i}]") for i, stack in enumerate(stacks)]
    blocks = runs[-1].stop if runs else 0
    if sum(lengths) != blocks:
        shape = lengths[0] if len(lengths) == 1 else f"{lengths} = {sum(lengths)}"
        raise ValueError(
            f"scan_blocks: {blocks} policies for {shape} blocks. Give one policy for each block. "
            "(A tuple of stacks is read as one stack for each segment; put parameters that are a "
            "tuple into a dict.)"
        )
    pieces = []
    start = 0
    for stack, length in zip(stacks, lengths, strict=True):
        for run in runs:
            low, high = max(run.start, start) - start, min(run.stop, start + length) - start
            if low >= high:
                continue
            whole = (low, high) == (0, length)
            part = stack if whole else jax.tree.map(lambda a: a[low:high], stack)  # noqa: B023
            pieces.append((run.policy, part))
        start += length
    return pieces


def _check_not_a_list_of_blocks(stacked_params: Any, blocks: int) -> None:
    """Refuses one tree a block, `[params_0, params_1, ...]`, with how to stack them."""
    if not isinstance(stacked_params, list | tuple) or len(stacked_params) != blocks or blocks < 2:
        return
    kinds = {
        (jax.tree.structure(tree), tuple(jnp.shape(leaf) for leaf in jax.tree.leaves(tree)))
        for tree in stacked_params
    }
    if len(kinds) == 1:
        raise ValueError(
            f"scan_blocks: stacked_params is a {type(stacked_params).__name__} of {blocks} equal "
            "trees, one a block; stack them into one tree with a leading axis of blocks: "
            "jax.tree.map(lambda *leaves: jnp.stack(leaves), *blocks)."
        )


def scan_blocks(
    block_fn: Callable[..., Any],
    stacked_params: Any,
    x: Any,
    policies: Sequence[Policy] | Any,
    *shared: Any,
) -> Any:
    """Runs blocks one after another, each under its policy, scanning over runs of equal policies.

    Args:
        block_fn: `block_fn(params, x, *shared) -> x` or `-> (x, aux)`; pure.
        stacked_params: pytree whose arrays have a leading axis of blocks, or a tuple of such
            stacks in order, one for each segment. Cutting one stack where policies change copies
            it; stacks held in the segments of the policies are not copied.
        x: the first block's input, any pytree; every block returns the same shapes and dtypes.
        policies: one for each block, or `hilore_jax.intervene.Interventions`.
        *shared: arguments that every block reads: arrays and trees of them. Close over anything
            else, `functools.partial(block_fn, causal=True)`.

    Returns:
        The last block's output, or `(output, aux)` with aux stacked over blocks.

    Raises:
        ValueError: policies and blocks differ in number; leading axes differ; a name that the
            block does not have; a block whose output differs from its input in structure, shape
            or dtype.

    Example:
        >>> import jax.numpy as jnp, hilore_jax as hl
        >>> w = jnp.full((3, 2, 2), 0.5)
        >>> hl.scan_blocks(lambda w, x: x @ w, w, jnp.ones((1, 2)), [hl.Policy({})] * 3).tolist()
        [[1.0, 1.0]]
    """
    if isinstance(policies, Interventions):
        return policies.scan(block_fn, stacked_params, x, shared)

    def block_under(policy: Policy) -> Callable[..., Any]:
        decorate = decorator(policy, caller="hl.scan_blocks")
        return block_fn if is_disabled() else decorate(block_fn)

    parts = []
    with arguments.reverse_only(block_fn):
        for policy, stack in pieces(stacked_params, policies):
            x, aux, has_aux = scan_one(block_under(policy), stack, x, shared)
            parts.append((aux, has_aux))
    return with_aux(x, parts)


def pieces(stacked_params: Any, policies: Sequence[Policy] | Any) -> list[tuple[Policy, Any]]:
    """The stack of each run of equal policies, in order; one that fits its run is not cut.

    Raises:
        ValueError: see `scan_blocks`.
    """
    stacks = stacked_params if type(stacked_params) is tuple else (stacked_params,)
    runs = segments(policies)
    try:
        return _pieces(stacks, runs)
    except ValueError:
        _check_not_a_list_of_blocks(stacked_params, len(policies))
        raise


def scan_one(
    block: Callable[..., Any], stack: Any, x: Any, shared: Sequence[Any]
) -> tuple[Any, Any, bool]:
    """The last output of equal blocks, aux stacked over them, and whether they have any."""
    has_aux = False

    def body(carry: Any, params: Any) -> tuple[Any, Any]:
        nonlocal has_aux
        out, aux, has_aux = split_aux(block(params, carry, *shared), carry)
        return out, aux

    x, aux = jax.lax.scan(body, x, stack)
    return x, aux, has_aux


def with_aux(x: Any, parts: Sequence[tuple[Any, bool]]) -> Any:
    """`x`, or `(x, aux)` with the pieces' `(aux, has_aux)` joined."""
    if not parts or not parts[-1][1]:
        return x
    return x, jax.tree.map(lambda *part: jnp.concatenate(part), *(aux for aux, _ in parts))


def split_aux(out: Any, x: Any) -> tuple[Any, Any, bool]:
    """Tells `x` from `(x, aux)` by the structure of the input."""
    expected = jax.tree.structure(x)
    if jax.tree.structure(out) == expected:
        carry, aux, has_aux = out, None, False
    elif type(out) is tuple and len(out) == 2 and jax.tree.structure(out[0]) == expected:
        carry, aux, has_aux = out[0], out[1], True
    else:
        raise ValueError(
            f"scan_blocks: the block returned {jax.tree.structure(out)}, expected its input's "
            f"structure {expected}, or (that, aux)."
        )
    pairs = zip(jax.tree.leaves(carry), jax.tree.leaves(x), strict=True)
    for got, want in pairs:
        if (jnp.shape(got), jnp.result_type(got)) != (jnp.shape(want), jnp.result_type(want)):
            raise ValueError(
                f"scan_blocks: the block returned {jnp.result_type(got)}{list(jnp.shape(got))} for "
                f"an input of {jnp.result_type(want)}{list(jnp.shape(want))}; a block keeps the "
                "shape and dtype of x (cast the output back)."
            )
    return carry, aux, has_aux
