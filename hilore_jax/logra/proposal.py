"""From an update's sketches to its factors: clipping, RowAdam and size, over stacks of layers.

A stack is the layers of one shape in a row, one array with the layers as its first axis; stacks go
by name. Layers are taken one at a time: one projection exists.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, UInt32

from hilore_jax.logra.merge import ROWS, merge_factor
from hilore_jax.logra.row_adam import clip_scale, gram, gram_square, norm, row_adam, update_scale
from hilore_jax.logra.sketches import Sketches

Stacks = Mapping[str, Array]
"""Name -> an array whose first axis is layers: kernels `[n, in, out]`, keys `[n, 2]`, ..."""


class Proposal(NamedTuple):
    """The displacement `W - D A` that an update proposes, before step control."""

    d: dict[str, Float[Array, "n d_out rank"]]  # float32, of the size that was asked for
    v: dict[str, Float[Array, "n d_out"]]  # RowAdam's next second moments
    clip: Float[Array, ""]  # what all sketches were multiplied with
    sketch_norm: Float[Array, ""]  # ||S A|| over all layers, before clipping


def grams_of(
    sketches: Sketches, keys: Stacks, widths: Mapping[str, int]
) -> dict[str, Float[Array, "n rank rank"]]:
    """`A A^T` of every layer, float32: `rank^2` numbers each.

    Args:
        sketches: the run's settings.
        keys: of the layers' projections, `[n, 2]`.
        widths: inputs of each stack's layers.

    Returns:
        Of each stack.

    Example:
        >>> settings = Sketches(rank=2)
        >>> keys = {"q": settings.key("blocks.0.q_proj", 0)[None]}
        >>> grams_of(settings, keys, {"q": 4})["q"].shape
        (1, 2, 2)
    """
    found: dict[str, Array] = {}
    # Stacks of one width are one loop: a program is compiled for each.
    for width in dict.fromkeys(widths.values()):
        names = [name for name in keys if widths[name] == width]
        flat = jax.lax.map(
            lambda key, width=width: gram(sketches.projection(key, width)),
            jnp.concatenate([keys[name] for name in names]),
        )
        ends = list(itertools.accumulate(len(keys[name]) for name in names))
        found |= dict(zip(names, jnp.split(flat, ends[:-1]), strict=True))
    return {name: found[name] for name in keys}


def propose(
    found: Stacks,
    grams: Stacks,
    v: Stacks,
    count: ArrayLike,
    *,
    weight_square: ArrayLike,
    ratio: ArrayLike,
    max_norm: ArrayLike | None = None,
    dense_gradient_square: ArrayLike = 0.0,
    b2: ArrayLike = 0.95,
) -> Proposal:
    """Clipping through the Gram matrix, RowAdam, and the whole proposal's size (methods 2.1, 2.2).

    Args:
        found: S of each stack, `[n, out, rank]` float32.
        grams: `grams_of` the projections that they were taken with.
        v: RowAdam's second moments, `[n, out]`.
        count: number of this update among those applied, from 1.
        weight_square: squared norm of all kernels, `weight_square`.
        ratio: norm of the proposal over that of the kernels, over all layers together.
        max_norm: sketches are scaled down to this norm of `S A`, which is an estimate of the
            gradient, larger than it by `sqrt(1 + (k - 1) / r)` in the mean; None leaves them.
        dense_gradient_square: squared norm of gradients that are clipped beside them.
        b2: decay of the second moment.

    Returns:
        The proposal: zeros where the sketches are, not finite where they are not.

    Example:
        >>> settings = Sketches(rank=2)
        >>> key = settings.key("blocks.0.q_proj", 0)
        >>> grams = grams_of(settings, {"q": key[None]}, {"q": 4})
        >>> found, v = {"q": jnp.ones((1, 3, 2))}, {"q": jnp.zeros((1, 3))}
        >>> made = propose(found, grams, v, 1, weight_square=16.0, ratio=0.5)
        >>> round(float(norm(made.d["q"][0] @ settings.projection(key, 4))), 5)
        2.0
    """
    square = _total(gram_square(found[name], grams[name]) for name in found)
    clip = clip_scale(square + dense_gradient_square, max_norm)

    def layer(args: tuple[Array, Array]) -> tuple[Array, Array, Array]:
        d, after = row_adam(args[0] * clip, args[1], count, b2=b2)
        size = norm(d)
        # Divided: squares of very small gradients do not fit in float32.
        return d / jnp.where(size == 0, 1.0, size), size, after

    made = {name: jax.lax.map(layer, (found[name], v[name])) for name in found}
    largest = jnp.max(jnp.concatenate([size for _, size, _ in made.values()]))
    sizes = {n: size / jnp.where(largest == 0, 1.0, largest) for n, (_, size, _) in made.items()}
    moved = _total(sizes[n] ** 2 * gram_square(d, grams[n]) for n, (d, _, _) in made.items())
    scale = update_scale(ratio, weight_square, moved)
    return Proposal(
        {n: d * (scale * sizes[n])[:, None, None] for n, (d, _, _) in made.items()},
        {n: after for n, (_, _, after) in made.items()},
        clip,
        jnp.sqrt(square),
    )


def weight_square(kernels: Stacks) -> Float[Array, ""]:
    """`sum ||W||^2` over all stacks, float32.

    Example:
        >>> float(weight_square({"q": jnp.ones((2, 3, 4))}))
        24.0
    """
    return _total(jnp.square(kernel.astype(jnp.float32)) for kernel in kernels.values())


def factor_square(factors: Stacks, grams: Stacks) -> Float[Array, ""]:
    """`sum ||F A||^2` over all stacks, float32: what a step really moves.

    Args:
        factors: F, `[n, out, rank]`.
        grams: `grams_of` their projections.

    Returns:
        Scalar.

    Example:
        >>> float(factor_square({"q": jnp.ones((1, 3, 1))}, {"q": jnp.full((1, 1, 1), 4.0)}))
        12.0
    """
    return _total(gram_square(factors[n].astype(jnp.float32), grams[n]) for n in factors)


def _total(arrays: Iterable[Array]) -> Array:
    return sum((jnp.sum(x) for x in arrays), jnp.float32(0))


def move_stack(
    kernel: Float[Array, "n d_in d_out"],
    factor: Float[Array, "n d_out rank"],
    keys: UInt32[Array, "n 2"],
    sketches: Sketches,
    moves: Bool[Array, ""] | bool = True,
    *,
    rows: int | None = ROWS,
) -> Float[Array, "n d_in d_out"]:
    """`W <- W - (F A)^T` of each layer of a stack, in place where the kernel is donated.

    Args:
        kernel: the stack's weights, float32 or bfloat16.
        factor: F, bfloat16.
        keys: of the layers' projections.
        sketches: the run's settings.
        moves: False leaves the stack as it is; may be traced.
        rows: as for `merge_factor`.

    Returns:
        The stack, moved; each layer as `move_kernels` moves it.

    Example:
        >>> settings, factor = Sketches(rank=1), jnp.ones((1, 3, 1), jnp.bfloat16)
        >>> keys = settings.key("q", 0)[None]
        >>> move_stack(jnp.zeros((1, 4, 3)), factor, keys, settings)[0, :, 0].tolist()
        [1.0, -1.0, -1.0, 1.0]
    """

    def one(layer: Array, stack: Array) -> Array:
        a = sketches.projection(keys[layer], kernel.shape[1])
        moved = merge_factor(stack[layer], factor[layer], a, keys[layer], rows=rows)
        return jax.lax.dynamic_update_index_in_dim(stack, moved, layer, 0)

    # A loop that does not run leaves the very bits, and needs no second stack as a choice would.
    return jax.lax.fori_loop(0, jnp.where(moves, kernel.shape[0], 0), one, kernel)
