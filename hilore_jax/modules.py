"""Flax NNX modules as pure functions of their state, for `remat`."""

import functools
import sys
import types
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx


def is_module(x: Any) -> bool:
    """Whether a leaf is an NNX object whose state must be carried through a pure function."""
    return isinstance(x, nnx.Module | nnx.Rngs | nnx.Pytree | nnx.Variable)


def is_leaf(x: Any) -> bool:
    """Whether a traversal of arguments stops at `x`: an NNX object, or a state, which is pure."""
    return is_module(x) or isinstance(x, nnx.State)


def lifted(apply: Callable, fn: Callable) -> Callable:
    """`apply(pure, *args)` where `fn` may take NNX modules among its arguments.

    The modules of the arguments are split into structure and state; `apply` sees a pure function
    of that state. State that the call changes (counters, random streams, statistics) is returned
    by the pure function and written back; parameters that were only read are not returned, since
    a scan would stack them.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        leaves, tree = jax.tree.flatten((args, kwargs), is_leaf=is_leaf)
        places = [i for i, leaf in enumerate(leaves) if is_module(leaf)]
        if not places:
            return apply(fn, *args, **kwargs)
        owned = tuple(leaves[i] for i in places)
        graph, state = nnx.split(owned)
        arrays = [leaf for i, leaf in enumerate(leaves) if i not in places]

        def pure(state: Any, arrays: list[Any]) -> tuple[Any, dict]:
            before = _values(state)  # read now: merge may share the variables it is given
            inside = nnx.merge(graph, state)
            owned_, arrays_ = iter(inside), iter(arrays)
            full = [next(owned_) if i in places else next(arrays_) for i in range(len(leaves))]
            args, kwargs = jax.tree.unflatten(tree, full)
            out = fn(*args, **kwargs)
            after_graph, after = nnx.split(inside)
            if after_graph != graph:
                raise ValueError(
                    "the block changed the structure of its NNX module (a variable or submodule "
                    "was added or removed) under hl.remat; create it in __init__ or run the first "
                    "call inside `with hl.disabled():`."
                )
            new = _values(after)
            return out, {path: new[path] for path in new if new[path] is not before[path]}

        out, changed = apply(pure, state, arrays)
        if changed:
            flat = nnx.to_flat_state(state)
            nnx.update(
                owned,
                nnx.from_flat_state(
                    {path: var.replace(changed[path]) for path, var in flat if path in changed}
                ),
            )
        return out

    return call


def mark(wrapper: Any, fn: Callable, policy: Any) -> None:
    """Records on a decorated block what it decorates, for `undecorated` and `own_policy`."""
    wrapper.hilore_remat = (wrapper, fn, policy)


def _marked(fn: Any) -> tuple[Callable, Any] | None:
    # The wrapper itself is part of the mark: functools.wraps copies marks onto other wrappers.
    found = getattr(fn, "hilore_remat", None)
    return found[1:] if found is not None and found[0] is fn else None


def own_policy(fn: Any) -> Any | None:
    """The policy of a block that `hl.remat` decorated; None for any other."""
    found = _marked(fn)
    return None if found is None else found[1]


def undecorated(block: Any) -> Any:
    """The block as it was before `hl.remat`, or `block` itself: a function, method or module."""
    if isinstance(block, functools.partial):
        return functools.partial(undecorated(block.func), *block.args, **block.keywords)
    if isinstance(block, nnx.Module):
        found = _marked(type(block).__call__)
        return block if found is None else with_call(block, lambda _: found[0])
    if isinstance(block, types.MethodType):
        found = _marked(block.__func__)
        return block if found is None else types.MethodType(found[0], block.__self__)
    found = _marked(block)
    return block if found is None else found[0]


def refuse_linen(block: Any) -> None:
    """Refuses a Flax linen module, whose call needs the variables that `apply` takes.

    Raises:
        TypeError: names `module.apply` as what to decorate.
    """
    linen = getattr(sys.modules.get("flax.linen"), "Module", None)  # loaded if there is one
    kind = block if isinstance(block, type) else type(block)
    if linen is not None and issubclass(kind, linen):
        raise TypeError(
            f"hl.remat(policy) takes no Flax linen module, found {kind.__name__}: decorate its "
            "pure function, hl.remat(policy)(module.apply)(variables, x)."
        )


def _values(state: Any) -> dict:
    return {path: variable.get_value() for path, variable in nnx.to_flat_state(state)}


def with_call(module: Any, decorate: Callable) -> Any:
    """A module class, or a module instance, whose `__call__` is decorated.

    An instance becomes a shallow copy of a subclass: same variables, so that the policy is part
    of the module's structure and survives `nnx.split` and `nnx.merge`.
    """
    base = module if isinstance(module, type) else type(module)
    if not issubclass(base, nnx.Module):
        raise TypeError(f"hl.remat(policy) decorates functions and NNX modules, found {module!r}.")
    members = {
        "__call__": decorate(base.__call__),
        "__module__": base.__module__,
        "__doc__": base.__doc__,
        "__qualname__": base.__qualname__,
    }
    decorated = type(base.__name__, (base,), members)
    if isinstance(module, type):
        return decorated
    copy = object.__new__(decorated)
    vars(copy).update(vars(module))
    return copy


def bound(decorated: Callable, owner: Any) -> Callable:
    """A decorated method of one module, callable but not storable on that module."""

    @functools.wraps(decorated)
    def method(*args: Any, **kwargs: Any) -> Any:
        if any(value is method for value in vars(owner).values()):
            raise TypeError(
                f"a remat'd bound method of {type(owner).__name__} was stored on the module: after "
                "nnx.split and nnx.merge it would still call the old module, with zero gradients. "
                "Decorate the method in the class body, or wrap the module: "
                "hl.remat(policy)(module)."
            )
        return decorated(owner, *args, **kwargs)

    found = _marked(decorated)
    if found is not None:
        mark(method, types.MethodType(found[0], owner), found[1])
    return method
