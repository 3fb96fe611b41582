"""Dataclasses as pytrees whose fields are checked when people build them, not when jax does."""

from __future__ import annotations

import dataclasses
from typing import TypeVar

import jax

_T = TypeVar("_T")


def pytree(cls: type[_T]) -> type[_T]:
    """Registers a frozen dataclass as a pytree of its fields.

    Unlike `jax.tree_util.register_dataclass` it rebuilds without calling `__init__`: jax puts
    slices, shapes and sentinels in the fields, which annotations on the whole arrays would refuse.

    Args:
        cls: a dataclass, all of whose fields are children.

    Returns:
        The same class.

    Example:
        >>> @pytree
        ... @dataclasses.dataclass(frozen=True)
        ... class Pair:
        ...     first: float
        ...     second: float
        >>> jax.tree.map(lambda x: 2 * x, Pair(1.0, 2.0))
        Pair(first=2.0, second=4.0)
    """
    names = tuple(field.name for field in dataclasses.fields(cls))  # pyright: ignore[reportArgumentType]

    def flatten(tree):
        return tuple(getattr(tree, name) for name in names), None

    def flatten_with_keys(tree):
        keys = (jax.tree_util.GetAttrKey(name) for name in names)
        return tuple(zip(keys, flatten(tree)[0], strict=True)), None

    def unflatten(_, children):
        tree = object.__new__(cls)
        for name, child in zip(names, children, strict=True):
            object.__setattr__(tree, name, child)
        return tree

    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)
    return cls
