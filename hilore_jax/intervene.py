"""Interventions: an argument of one executable says which policy each block's backward follows.

A block keeps its input alone. Backward picks a branch by the block's index: the block under plain
autodiff, or under one of the entries, which runs it again first. What that costs in memory does not
matter to a measurement; that hundreds of choices need one compilation does.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float, Int

from hilore_jax import arguments, codecs, tracing
from hilore_jax.actions import Compress, Policy, Recompute
from hilore_jax.remat import remat


@dataclasses.dataclass(frozen=True)
class Interventions:
    """What `hl.scan_blocks` takes in place of policies, to choose each block's at run time.

    Attributes:
        entries: policies to choose from.
        index: `[blocks]`: 0 is exact, n the n-th entry.
        token: `[blocks, 2]` zeros; their cotangent is what `decoded_errors` says of each block.

    Example:
        >>> from jax.ad_checkpoint import checkpoint_name
        >>> from hilore_jax import Compress
        >>> def block(w, x):
        ...     return jnp.tanh(checkpoint_name(x @ w, "h"))
        >>> def loss(w, token, index):
        ...     chosen = Interventions((Policy({"h": Compress("int8")}),), index, token)
        ...     return chosen.scan(block, w, jnp.ones((2, 3)), ()).sum()
        >>> token, index = jnp.zeros((2, 2)), jnp.array([0, 1])
        >>> errors = jax.grad(loss, argnums=1)(jnp.full((2, 3, 3), 0.3), token, index)
        >>> [float(e) > 0 for e in errors[:, 0]]
        [False, True]
    """

    entries: tuple[Policy, ...]
    index: Int[Array, "blocks"]
    token: Float[Array, "blocks two"]

    def __len__(self) -> int:
        return self.index.shape[0]

    def scan(
        self, block_fn: Callable[..., Any], stacked_params: Any, x: Any, shared: Sequence[Any]
    ) -> Any:
        """`hl.scan_blocks` of these blocks; the stacks may be cut anywhere."""
        stacks = stacked_params if type(stacked_params) is tuple else (stacked_params,)
        run = intervened(self.entries, block_fn)
        parts, start = [], 0
        for stack in stacks:
            stop = start + jax.tree.leaves(stack)[0].shape[0]

            def body(carry: Any, xs: Any) -> tuple[Any, Any]:
                out = run(*xs[1:], xs[0], carry, *shared)
                return out if jax.tree.structure(out) != jax.tree.structure(carry) else (out, None)

            with arguments.reverse_only(block_fn):
                chosen = (stack, self.index[start:stop], self.token[start:stop])
                x, aux = jax.lax.scan(body, x, chosen)
            parts.append(aux)
            start = stop
        if start != len(self):
            raise ValueError(f"{len(self)} interventions for {start} blocks: expected one a block.")
        if parts[0] is None:
            return x
        return x, jax.tree.map(lambda *part: jnp.concatenate(part), *parts)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["leaves"], meta_fields=["moved"])
@dataclasses.dataclass(frozen=True)
class _Kept:
    """A block's operands, and which of them are differentiated."""

    leaves: tuple[Any, ...]
    moved: tuple[bool, ...]


def intervened(entries: Sequence[Policy], block_fn: Callable[..., Any]) -> Callable[..., Any]:
    """The block as `(index, token, *args)`, whose backward follows the index.

    Args:
        entries: policies to choose from.
        block_fn: the undecorated block.

    Returns:
        A function of an int32 index, 0 for exact, a float32 `[2]` token and the block's arguments.
        The token's cotangent is `decoded_errors` of the entry; zeros where exact.
    """
    ways = [(None, block_fn), *((policy, remat(policy)(block_fn)) for policy in entries)]

    def run(index: Any, token: Any, *args: Any) -> Any:
        leaves, tree = jax.tree.flatten(args)

        def call(fn: Callable[..., Any], values: Sequence[Any]) -> Any:
            return fn(*jax.tree.unflatten(tree, values))

        @jax.custom_vjp
        def block(index: Any, token: Any, *values: Any) -> Any:
            return call(block_fn, values)

        def forward(index: Any, token: Any, *primals: Any) -> tuple[Any, _Kept]:
            values = [p.value for p in primals]
            moved = tuple(
                p.perturbed and jnp.issubdtype(jnp.result_type(p.value), jnp.inexact)
                for p in primals
            )
            return call(block_fn, values), _Kept((index.value, *values), moved)

        def backward(kept: _Kept, cotangents: Any) -> tuple[Any, ...]:
            index, *values = kept.leaves
            zero = lambda c: isinstance(c, SymbolicZero)  # noqa: E731
            given, out_tree = jax.tree.flatten(cotangents, is_leaf=zero)
            live = [c for c in given if not zero(c)]

            def way(policy: Policy | None, fn: Callable[..., Any]) -> Callable[..., Any]:
                def pull(values: list[Any], live: list[Any]) -> Any:
                    def of(moving: list[Any]) -> Any:
                        rest = iter(moving)
                        pairs = zip(values, kept.moved, strict=True)
                        return call(fn, [next(rest) if m else v for v, m in pairs])

                    known = iter(live)
                    full = [
                        jnp.zeros(c.aval.shape, c.aval.dtype) if zero(c) else next(known)
                        for c in given
                    ]
                    moving = [v for v, m in zip(values, kept.moved, strict=True) if m]
                    _, back = jax.vjp(of, moving)
                    args = jax.tree.unflatten(tree, values)
                    errors = (
                        jnp.zeros(2) if policy is None else decoded_errors(policy, block_fn, *args)
                    )
                    return back(jax.tree.unflatten(out_tree, full))[0], errors

                return pull

            found, errors = jax.lax.switch(index, [way(*w) for w in ways], values, live)
            rest = iter(found)
            return None, errors, *(next(rest) if m else None for m in kept.moved)

        block.defvjp(forward, backward, symbolic_zeros=True)
        return block(index, token, *leaves)

    return run


def decoded_errors(policy: Policy, block_fn: Callable[..., Any], *args: Any) -> Float[Array, "two"]:
    """Errors of the tensors that a policy decodes, at a block's arguments.

        e = sqrt(sum_n (||x_hat_n - x_n|| / ||x_n||)^2),   the paper's: ||x_hat - x|| / ||saved||

    (arXiv 2609.33570), the sum over compressed names n.

    Args:
        policy: what is compressed, and for the paper's form what else is saved.
        block_fn: the undecorated block.
        *args: its arguments.

    Returns:
        float32 `[2]`: e, and the paper's, whose denominator is the norm of everything saved.

    Example:
        >>> from jax.ad_checkpoint import checkpoint_name
        >>> from hilore_jax import Compress
        >>> block = lambda x: checkpoint_name(x, "h") * 2
        >>> policy = Policy({"h": Compress("fp8_e4m3", tile=0)})
        >>> print(decoded_errors(policy, block, jnp.array([[3.0, 4.1]])).round(2))
        [0.02 0.02]
    """
    traced = tracing.trace(block_fn, *args)
    wrong: dict[str, Any] = {}
    norms: dict[str, Any] = {}

    def on_equation(eqn: Any, values: list[Any]) -> list[Any]:
        out = tracing.bind(eqn, values)
        if not tracing.is_name(eqn):
            return out
        name, x = eqn.params["name"], out[0]
        action = policy[name]
        if isinstance(action, Recompute) or not jnp.issubdtype(x.dtype, jnp.floating):
            return out
        exact = x.astype(jnp.float32)
        norms[name] = norms.get(name, 0.0) + jnp.sum(exact * exact)
        if isinstance(action, Compress):
            where = {"axis": action.axis, "tile": action.tile}
            coded = codecs.encode(x, action.codec, **where)
            decoded = codecs.decode(coded, action.codec, x.shape, x.dtype, **where)
            gap = decoded.astype(jnp.float32) - exact
            wrong[name] = wrong.get(name, 0.0) + jnp.sum(gap * gap)
        return out

    tracing.evaluate(traced.jaxpr, traced.closed.consts, jax.tree.leaves(args), on_equation)
    if not wrong:
        return jnp.zeros(2)
    relative = sum(wrong[n] / jnp.maximum(norms[n], jnp.finfo(jnp.float32).tiny) for n in wrong)
    paper = jnp.sqrt(sum(wrong.values())) / (jnp.sqrt(sum(norms.values())) + 1e-8)
    return jnp.stack([jnp.sqrt(relative), paper])
