"""Static and traced arguments of a decorated block, as `jax.jit` tells them apart."""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from hilore_jax.modules import is_module


def function_name(fn: Callable) -> str:
    """What errors call a function."""
    return getattr(fn, "__qualname__", repr(fn))


def _parameters(fn: Callable) -> list[str]:
    try:
        return list(inspect.signature(fn).parameters)
    except (TypeError, ValueError):  # a C function: positions only
        return []


def static_names(
    fn: Callable, numbers: int | Sequence[int], names: str | Sequence[str]
) -> frozenset[str | int]:
    """Names and positions of the arguments that are not traced.

    Raises:
        ValueError: a position or name that the function does not have.
    """
    parameters = _parameters(fn)
    numbers = (numbers,) if isinstance(numbers, int) else tuple(numbers)
    names = (names,) if isinstance(names, str) else tuple(names)
    kinds = {p.kind for p in inspect.signature(fn).parameters.values()} if parameters else set()
    open_ended = not parameters or bool(
        kinds & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    )
    unknown: list[str | int] = [n for n in names if n not in parameters]
    unknown += [n for n in numbers if not -len(parameters) <= n < len(parameters)]
    if unknown and not open_ended:
        raise ValueError(
            f"hl.remat: static arguments {unknown} are not among those of {function_name(fn)}: "
            f"{parameters}."
        )
    # With *args a negative position counts from the end of each call, as in jax.jit.
    kept = {n for n in numbers if n >= 0 or open_ended}
    lowest = 0 if open_ended else -len(parameters)
    by_number = {parameters[n] for n in numbers if lowest <= n < len(parameters)}
    return frozenset({*names, *by_number, *kept})


def bind_static(
    fn: Callable,
    static: frozenset[str | int],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    caller: str = "hl.remat",
) -> tuple[Callable, tuple[Any, ...], dict[str, Any]]:
    """`fn` with its static arguments fixed, and the arguments that remain.

    Raises:
        TypeError: a remaining argument that cannot be traced, by name.
    """
    parameters = _parameters(fn)
    labels = [parameters[i] if i < len(parameters) else f"args[{i}]" for i in range(len(args))]
    marks = [{labels[i], i, i - len(args)} for i in range(len(args))]
    fixed = {i: a for i, a in enumerate(args) if marks[i] & static}
    fixed_kwargs = {k: v for k, v in kwargs.items() if k in static}
    moving = tuple(a for i, a in enumerate(args) if i not in fixed)
    moving_kwargs = {k: v for k, v in kwargs.items() if k not in fixed_kwargs}
    named = [(labels[i], a) for i, a in enumerate(args) if i not in fixed]
    for name, value in (*named, *moving_kwargs.items()):
        _check_traceable(fn, name, value, caller)

    def call(*moving: Any, **moving_kwargs: Any) -> Any:
        rest = iter(moving)
        full = [fixed[i] if i in fixed else next(rest) for i in range(len(args))]
        return fn(*full, **fixed_kwargs, **moving_kwargs)

    return call, moving, moving_kwargs


def _remedy(caller: str, name: str) -> str:
    if caller == "hl.remat":
        return f"pass static_argnames=({name!r},) to hl.remat"
    return f"close over it: {caller}(functools.partial(block, {name}=...), ...)"


def _check_traceable(fn: Callable, name: str, value: Any, caller: str) -> None:
    for leaf in jax.tree.leaves(value, is_leaf=is_module):
        arrays = jax.Array | np.ndarray | np.generic | int | float | complex
        if is_module(leaf) or isinstance(leaf, arrays) or hasattr(leaf, "dtype"):
            continue
        raise TypeError(
            f"{function_name(fn)}: argument {name!r} holds {leaf!r} ({type(leaf).__name__}), which "
            f"cannot be traced; {_remedy(caller, name)}."
        )


@contextlib.contextmanager
def explained(fn: Callable, caller: str = "hl.remat") -> Iterator[None]:
    """Adds the remedy to jax's error about a traced argument that steers Python code."""
    try:
        with reverse_only(fn):
            yield
    except jax.errors.ConcretizationTypeError as error:  # its subclasses: bool, integer, index
        remedy = "name those that steer Python code in static_argnames=(...)."
        if caller != "hl.remat":
            remedy = "close over those that steer Python code: functools.partial(block, name=...)."
        listed = ", ".join(_parameters(fn))
        error.add_note(f"{caller} traces every argument of {function_name(fn)}({listed}); {remedy}")
        raise


@contextlib.contextmanager
def reverse_only(fn: Callable) -> Iterator[None]:
    """Adds the remedy to jax's error about forward mode through a block that compresses."""
    try:
        yield
    except TypeError as error:
        note = (
            f"{function_name(fn)} compresses, which has a rule for reverse mode only; for jax.jvp "
            "and jax.jacfwd call it inside `with hl.disabled():`."
        )
        if "forward-mode" in str(error) and note not in getattr(error, "__notes__", ()):
            error.add_note(note)
        raise
