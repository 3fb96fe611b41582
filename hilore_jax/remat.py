"""`remat`: carry out a policy on a block of a model.

Store, Recompute and Offload lower to `jax.checkpoint` with names; a policy that compresses lowers
to the block's own derivative rule (`replay.py`).
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.core import eval_jaxpr

from hilore_jax import arguments, modules, replay, tracing
from hilore_jax.actions import Compress, Offload, Policy

_DISABLED = jax.make_user_context(default_value=False)
# In these, a name's value exists once per iteration or branch: no single array can be kept.
CONTROL_FLOW = ("scan", "while", "cond")


def disabled() -> contextlib.AbstractContextManager:
    """Context in which every policy is "store": blocks run as they were written.

    For initialization, decoding and forward-mode differentiation. It is part of jax's trace
    context, so a `jax.jit` function called inside and outside is traced for each.

    Example:
        >>> import jax, hilore_jax as hl
        >>> f = hl.remat(hl.Policy({}))(lambda x: x * x)
        >>> with hl.disabled():
        ...     float(jax.jvp(f, (3.0,), (1.0,))[1])
        6.0
    """
    return _DISABLED(True)


def is_disabled() -> bool:
    """Whether the caller is inside `hl.disabled()`."""
    return bool(_DISABLED.value)


def check_policy(policy: Any, caller: str = "hl.remat") -> Policy:
    """Returns a usable policy, or says what was given instead.

    Args:
        policy: what was given.
        caller: the function that took it, for the message.

    Raises:
        TypeError: not a `Policy`.
        RuntimeError: jax's experimental `jax_remat3` engine is on.
    """
    if not isinstance(policy, Policy):
        if isinstance(policy, str):
            found = f"the text {policy!r}: write hl.parse_policy({policy!r})"
        elif callable(policy):
            name = getattr(policy, "__name__", policy)
            found = f"{name!r}, a function: write hl.remat(policy)({name})"
        else:
            found = f"{policy!r}, a {type(policy).__name__}"
        raise TypeError(
            f"{caller} takes an hl.Policy, found {found}. Accepted: hl.Policy({{}}) to recompute "
            'everything, hl.Policy({"mlp_gate": hl.Compress("int8"), "attn_out": hl.Store()}) by '
            "name, hl.Policy(default=hl.Store()) for no rematerialization."
        )
    if tracing.remat3_enabled():
        raise RuntimeError(
            "jax_remat3 is on: that engine drops name policies silently in "
            f"jax {jax.__version__} and is not supported. Switch it off with "
            "jax.config.update('jax_remat3', False)."
        )
    return policy


def check_names(policy: Policy, traced: tracing.Traced) -> None:
    """Refuses a policy that the traced block cannot honour.

    Raises:
        ValueError: a listed name does not occur, a compressed one is inside a loop or branch, or
            the block reads or writes a mutable array.
        TypeError: a compressed name is not floating point.
    """
    if tracing.uses_refs(traced.jaxpr):
        raise ValueError(
            "the block reads or writes a jax.Ref: recomputation would do so again. Return the "
            "value instead and write it outside the block, or run the block inside "
            "`with hl.disabled():`."
        )
    found = list(tracing.sites(traced.jaxpr))
    seen = sorted({site.name for site in found})
    missing = [name for name in policy if name not in seen]
    if missing:
        raise ValueError(
            f"policy names {missing} not found in the block; names seen in its trace: {seen}. "
            "Name a value with jax.ad_checkpoint.checkpoint_name(value, name)."
        )
    if not policy.names(Compress):
        return
    for site in found:
        action = policy[site.name]
        if not isinstance(action, Compress) and (not site.inside or site.name not in policy):
            continue
        if site.inside:
            kind = "a loop or branch body" if site.inside in CONTROL_FLOW else "an inner call"
            raise ValueError(
                f"{site.name!r} is named inside {kind} ({site.inside}), where {action} cannot be "
                "kept by a policy that compresses. Name the value outside of it, or put hl.remat "
                "on the inner function; where that has one (or jax.checkpoint), its own policy "
                "decides: leave the name out of this one."
            )
        if not jnp.issubdtype(site.dtype, jnp.floating):
            raise TypeError(
                f"{site.name!r} is {site.dtype}{list(site.shape)}: only floating-point "
                "activations can be compressed; Store or Recompute it."
            )


def check_offload(policy: Policy) -> None:
    """Refuses a memory kind that no local device has; jax itself would offload nothing.

    Raises:
        ValueError: names the kinds that the default device has; or a kind other than pinned host
            memory beside a compressed name.
    """
    for name in policy.names(Offload):
        action = policy[name]
        if action != Offload() and policy.names(Compress):
            raise ValueError(
                f"policy[{name!r}] is {action}: a policy that also compresses offloads to "
                "pinned_host only. Write hl.Offload()."
            )
        kinds = [memory.kind for memory in jax.local_devices()[0].addressable_memories()]
        if isinstance(action, Offload) and action.memory_kind not in kinds:
            raise ValueError(
                f"policy[{name!r}] offloads to {action.memory_kind!r}, but the device "
                f"{jax.local_devices()[0]} has only {kinds}."
            )


def traced_block(policy: Policy, fn: Callable, args: Any, kwargs: Any) -> tracing.Traced:
    """A pure `fn` of pytrees of arrays traced, once its policy is known to suit it."""
    if kwargs:
        traced = tracing.trace(lambda a, k: fn(*a, **k), args, kwargs)
    else:
        traced = tracing.trace(fn, *args)
    check_names(policy, traced)
    check_offload(policy)
    return traced


def restored(traced: tracing.Traced, out: Sequence[Any]) -> Any:
    """A block's flat outputs as the tree that it returns."""
    # A constant output is a literal of the jaxpr, not an array, where nothing traces the call.
    arrays = [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in out]
    return jax.tree.unflatten(traced.out_tree, arrays)


def apply_policy(policy: Policy, fn: Callable, *args: Any, **kwargs: Any) -> Any:
    """Calls a pure `fn` of pytrees of arrays under a policy; see `remat`."""
    leaves = jax.tree.leaves((args, kwargs))
    traced = traced_block(policy, fn, args, kwargs)
    if policy.names(Compress):
        return restored(traced, replay.apply(policy, traced, leaves))
    split = len(traced.closed.consts)

    def block(*operands: Any) -> Sequence[Any]:
        return eval_jaxpr(traced.jaxpr, operands[:split], *operands[split:])

    kept = jax.checkpoint(block, policy=policy.checkpoint_policy())
    return restored(traced, kept(*traced.closed.consts, *leaves))


def remat(
    policy: Policy | Any,
    *,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
) -> Callable[[Any], Any]:
    """Decorator: backward of the block stores, compresses or recomputes each named activation.

    Forward values are unchanged. Stored and recomputed values give exactly the gradient of the
    undecorated block; compressed ones (HiLoRe's L) put the decoded value in place of the saved.

    Args:
        policy: actions by the names given with `jax.ad_checkpoint.checkpoint_name`.
        static_argnums: positions of arguments that are not traced, as in `jax.jit`.
        static_argnames: their names, as in `jax.jit`.

    Returns:
        A decorator for a function of any pytrees, a method of a Flax NNX module (in its class
        body), an NNX module class, or an NNX module instance (a shallow copy that shares its
        variables is returned; the original is left alone).

    Raises:
        TypeError: not a policy; at the call, an argument that cannot be traced.
        ValueError: a block that has a policy already; at the call, a name that the block does not
            have (lists those seen).

    Example:
        >>> import jax, jax.numpy as jnp, hilore_jax as hl
        >>> from jax.ad_checkpoint import checkpoint_name
        >>> @hl.remat(hl.Policy({"h": hl.Compress("int8")}))
        ... def block(w, x):
        ...     return jnp.tanh(checkpoint_name(x @ w, "h"))
        >>> w, x = jnp.ones((4, 4)) / 8, jnp.ones((2, 4))
        >>> jax.grad(lambda w: block(w, x).sum())(w).shape
        (4, 4)
    """
    return decorator(policy, static_argnums, static_argnames)


def check_undecorated(policy: Policy, fn: Callable, caller: str) -> None:
    """Refuses a block that has a policy of its own beside the one given.

    Raises:
        ValueError: names both.
    """
    own = modules.own_policy(fn)
    if own is not None and not (own.keeps_everything or policy.keeps_everything):
        raise ValueError(
            f"{caller}: {arguments.function_name(fn)} is decorated with hl.remat({own}) "
            "already; a second policy would act on its recomputation, not replace it. "
            f"Decorate the undecorated block with {policy}, or keep its own policy."
        )


def decorator(
    policy: Policy | Any,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    caller: str = "hl.remat",
) -> Callable[[Any], Any]:
    """`remat` on behalf of `caller`, which errors name with its own remedies."""
    check_policy(policy, caller)

    def decorate(fn: Any) -> Any:
        modules.refuse_linen(fn)
        if isinstance(fn, type | nnx.Module):
            return modules.with_call(fn, decorate)
        if not callable(fn):
            raise TypeError(f"hl.remat(policy) decorates a function or NNX module, found {fn!r}.")
        owner = getattr(fn, "__self__", None)
        if isinstance(owner, nnx.Module):
            return modules.bound(decorate(fn.__func__), owner)  # pyright: ignore[reportFunctionMemberAccess]
        check_undecorated(policy, fn, caller)
        static = arguments.static_names(fn, static_argnums, static_argnames)

        @functools.wraps(fn)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if policy.keeps_everything or is_disabled():
                return fn(*args, **kwargs)
            check_policy(policy)
            call, args, kwargs = arguments.bind_static(fn, static, args, kwargs, caller)
            with arguments.explained(fn, caller):
                lifted = modules.lifted(functools.partial(apply_policy, policy), call)
                return lifted(*args, **kwargs)

        modules.mark(wrapper, fn, policy)
        return wrapper

    return decorate
