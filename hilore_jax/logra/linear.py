"""Sketched linear maps for Flax NNX modules: the variables that they hold, and any module's own."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes
from jaxtyping import Array, Float, Integer

from hilore_jax.logra.sketch import sketched_dense
from hilore_jax.logra.sketches import Sketches


class SketchSlot(nnx.Variable):
    """Zeros `[out, rank]`, float32, whose gradient is the sketch; what a sketched model trains.

    Example:
        >>> SketchSlot(jnp.zeros((4, 2))).shape
        (4, 2)
    """


class SketchKey(nnx.Variable):
    """The key, uint32 `[2]`, from which a layer's projection is drawn where it is needed.

    Example:
        >>> SketchKey(Sketches(rank=2).key("blocks.0.q_proj", 0)).shape
        (2,)
    """


class SketchedLinear(nnx.Module):
    """An `nnx.Linear` whose kernel's gradient exists as a sketch alone.

    Args:
        linear: its kernel and bias are shared, not copied.
        sketches: the run's settings.
        layer: the layer's name, from which its projections are drawn.
        update: number of the update, from 0; may be traced.

    Example:
        >>> linear = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
        >>> SketchedLinear(linear, Sketches(rank=2), "head", 0)(jnp.ones((5, 4))).shape
        (5, 3)
    """

    def __init__(
        self, linear: nnx.Linear, sketches: Sketches, layer: str, update: Integer[Array, ""] | int
    ):
        self.kernel = linear.kernel
        self.bias = linear.bias
        self.slot = SketchSlot(jnp.zeros((linear.out_features, sketches.rank), jnp.float32))
        self.key = SketchKey(sketches.key(layer, update))
        self.sketches = sketches
        self.dtype = linear.dtype

    def __call__(self, x: Float[Array, "*rows d_in"]) -> Float[Array, "*rows d_out"]:
        """Applies the map to the last axis of x."""
        held = [p[...] for p in (self.kernel, self.bias) if p is not None]
        dtype = self.dtype or jnp.result_type(x, *held)
        a = self.sketches.projection_in(dtype, self.key[...], x.shape[-1])
        y = sketched_dense(x.astype(dtype), self.kernel[...].astype(dtype), self.slot[...], a)
        return y if self.bias is None else y + self.bias[...].astype(dtype)


def sketch_linears(
    module: nnx.Module,
    patterns: str | Sequence[str],
    sketches: Sketches,
    *,
    update: Integer[Array, ""] | int = 0,
) -> Any:
    r"""The module with chosen `nnx.Linear` made sketched: differentiate it by `SketchSlot`.

    Kernels, biases and all other variables are shared with `module`, which stays as it is. A
    layer's projections are drawn from its path, `mlp.up` say, and the update's number: make the
    sketched module again for each update, inside the jitted function.

    Args:
        module: any; its linear maps in attributes, `nnx.List` or `nnx.Dict`.
        patterns: regular expressions, each found somewhere in the path of a linear map.
        sketches: the run's settings.
        update: number of the update, from 0; may be traced.

    Returns:
        A module of the same class.

    Raises:
        ValueError: a pattern matches no `nnx.Linear` (lists their paths), or one that it matches
            is of a subclass, is a stack of maps, has a side of no more than the rank, an option
            that a sketched map cannot keep (precision, `dot_general`, `promote_dtype`,
            `preferred_element_type`, or a dtype to which A would be rounded), or more than one
            place.

    Example:
        >>> mlp = nnx.Sequential(*(nnx.Linear(4, 4, rngs=nnx.Rngs(0)) for _ in range(2)))
        >>> sketched = sketch_linears(mlp, r"layers\.1$", Sketches(rank=2))
        >>> [type(layer).__name__ for layer in sketched.layers]
        ['Linear', 'SketchedLinear']
    """
    patterns = (patterns,) if isinstance(patterns, str) else tuple(patterns)
    result = nnx.merge(*nnx.split(module))
    found = {
        ".".join(map(str, path)): (path, node)
        for path, node in nnx.iter_graph(result)
        if isinstance(node, nnx.Linear)
    }
    unmatched = [p for p in patterns if not any(re.search(p, name) for name in found)]
    if unmatched or not patterns:
        raise ValueError(
            f"sketch_linears: {unmatched or 'no patterns'} match none of the linear maps "
            f"{sorted(found)}; expected regular expressions, each found in a path"
        )
    for name, (path, linear) in found.items():
        if not any(re.search(p, name) for p in patterns):
            continue
        _check_linear(name or "the module", linear, sketches)
        sketched = SketchedLinear(linear, sketches, name or "linear", update)
        if not path:
            return sketched
        _put(result, path, sketched)
        if any(node is linear for _, node in nnx.iter_graph(result)):
            raise ValueError(
                f"sketch_linears: {name} is in more than one place of the module, and a sketch is "
                "of one; leave it out of the patterns"
            )
    return result


def _put(module: Any, path: tuple, value: Any) -> None:
    """Puts a value at a path of attributes and items."""
    owner = module
    for part in path[:-1]:
        owner = owner[part] if isinstance(part, int) else getattr(owner, part)
    if isinstance(path[-1], int):
        owner[path[-1]] = value
    else:
        setattr(owner, path[-1], value)


def _check_linear(name: str, linear: nnx.Linear, sketches: Sketches) -> None:
    rank, sides = sketches.rank, linear.kernel.shape
    if type(linear) is not nnx.Linear:
        raise ValueError(
            f"sketch_linears: {name} is a {type(linear).__name__}, and only a plain nnx.Linear "
            "computes what a sketched map does; leave it out of the patterns"
        )
    if len(sides) != 2:
        raise ValueError(
            f"sketch_linears: the kernel of {name} has shape {sides}, a stack of linear maps; "
            "expected [in, out]: make the sketched module of one map inside the function that is "
            "mapped or scanned over the stack, or leave it out of the patterns"
        )
    if rank >= min(sides):
        raise ValueError(
            f"sketch_linears: {name} is {sides[0]} x {sides[1]}, and a sketch of rank {rank} no "
            "smaller than its gradient; choose a smaller rank, or leave it out of the patterns"
        )
    own = [option for option, plain in _PLAIN.items() if getattr(linear, option) is not plain]
    if own:
        raise ValueError(
            f"sketch_linears: {name} has a {' and '.join(own)} of its own, which a sketched map "
            "cannot keep; leave it out of the patterns"
        )
    if linear.dtype is not None:
        sketches.check_compute(linear.dtype)


# Options of `nnx.Linear` and their defaults: what a sketched map does.
_PLAIN = {
    "precision": None,
    "dot_general": jax.lax.dot_general,
    "promote_dtype": dtypes.promote_dtype,
    "preferred_element_type": None,
}
