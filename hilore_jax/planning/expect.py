"""Arguments of wrong kinds: errors that say what was found, what was expected, and what to do."""

import numbers
import reprlib
from collections.abc import Callable
from typing import Any, NoReturn

import jax

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 60


def refuse(where: str, value: Any, expected: str, kind: type[Exception] = TypeError) -> NoReturn:
    """Raises an error about an argument.

    Args:
        where: the argument; its dots stand for the value, as in `"hl.plan(donate=...)"`.
        value: what it is.
        expected: what it should be, and the remedy where there is one.
        kind: of error; of a `TypeError` the value's type is said too.

    Example:
        >>> refuse("hl.plan(target=...)", 3, "a name or a Target")
        Traceback (most recent call last):
        TypeError: hl.plan(target=3): found an int, expected a name or a Target.
    """
    text = where.replace("...", shown(value))
    found = f"found {_kind(value)}, " if kind is TypeError else ""
    raise kind(f"{text}: {found}expected {expected}.")


def shown(value: Any) -> str:
    """A value in a few words.

    Example:
        >>> shown("int9"), shown(list(range(9)))
        ("'int9'", '[0, 1, 2, 3, 4, 5, ...]')
    """
    if isinstance(value, jax.Array | jax.ShapeDtypeStruct):
        return f"{value.dtype}{list(value.shape)}"
    return value.__name__ if isinstance(value, type) else _SHORT.repr(value)


def _kind(value: Any) -> str:
    if value is None:
        return "None"
    if isinstance(value, type):
        return f"the class {value.__name__} itself"
    name = "array" if isinstance(value, jax.Array) else type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def is_whole(value: Any) -> bool:
    """Whether a value is a whole number; True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Whether a value is a real number; True and False are none, NaN is one."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def whole(where: str, value: Any, least: int = 1) -> None:
    """Refuses what is no whole number, or below the least.

    Raises:
        TypeError, ValueError: says which.
    """
    expected = f"a whole number, {least} or more"
    if not is_whole(value):
        refuse(where, value, expected)
    if value < least:
        refuse(where, value, expected, ValueError)


def function(where: str, value: Any, signature: str) -> None:
    """Refuses what cannot be called.

    Raises:
        TypeError: says how it would be.
    """
    if not callable(value) or isinstance(value, type):
        refuse(where, value, f"a function {signature}")


def arrays(where: str, tree: Any, what: str = "arrays or jax.ShapeDtypeStructs") -> None:
    """Refuses leaves that are neither arrays nor shapes.

    Raises:
        TypeError: names the first.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            continue
        try:
            jax.typeof(leaf)
        except (TypeError, ValueError):
            refuse(
                where.replace("=...", f"{jax.tree_util.keystr(path)}=..."),
                leaf,
                f"{what}; close over anything else, with functools.partial",
            )


def values(tree: Any, where: str, purpose: str, remedy: str) -> None:
    """Refuses shapes where arrays are needed.

    Args:
        tree: pytrees of arrays.
        where: what errors call it.
        purpose: what needs them.
        remedy: what else to do.

    Raises:
        ValueError: counts the shapes and names the first.
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    shapes = [(path, leaf) for path, leaf in leaves if isinstance(leaf, jax.ShapeDtypeStruct)]
    if shapes:
        path, leaf = shapes[0]
        raise ValueError(
            f"{purpose}, but {len(shapes)} of its {len(leaves)} arguments are shapes without "
            f"values, first {where}{jax.tree_util.keystr(path)}: {leaf.dtype}{list(leaf.shape)}. "
            f"{remedy}"
        )


def positions(where: str, value: Any, count: int) -> None:
    """Refuses what is no tuple of positions among `count` arguments.

    Raises:
        TypeError, ValueError: says what was given.
    """
    expected = f"a tuple of positions among {count} arguments, such as (0,); () for none"
    if not isinstance(value, tuple) or not all(map(is_whole, value)):
        refuse(where, value, expected)
    if not all(-count <= n < count for n in value) or len({n % count for n in value}) < len(value):
        refuse(where, value, expected, ValueError)


def all_of(where: str, values: Any, right: Callable[[Any], bool], expected: str) -> None:
    """Refuses what is no sequence, or has an element that is not right.

    Raises:
        TypeError: names the first wrong element.
    """
    if isinstance(values, str | bytes) or not hasattr(values, "__len__") or not iterable(values):
        refuse(where, values, f"a sequence, each of it {expected}")
    for i, value in enumerate(values):
        if not right(value):
            refuse(where.replace("=...", f"[{i}]=..."), value, expected)


def iterable(value: Any) -> bool:
    """Whether a value can be gone through by position."""
    return hasattr(value, "__getitem__") and hasattr(value, "__iter__")
