"""RowAdam: a step's direction from a sketch, with one second moment for each output row."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float


def row_adam(
    sketch: Float[Array, "d_out rank"],
    v: Float[Array, "d_out"],
    count: ArrayLike,
    *,
    b2: ArrayLike = 0.95,
    eps: ArrayLike = 1e-8,
) -> tuple[Float[Array, "d_out rank"], Float[Array, "d_out"]]:
    """The proposal D of one layer, and the next second moment (LoGRA; methods 2.2).

        v^2 = b2 v^2 + (1 - b2) mean_cols(S^2);   h = v / sqrt(1 - b2^count)
        s = 1 / (h + eps mean(h));   s = s / rms(s);   D = s S ||S|| / ||s S||

    There is no first moment, and no moment of single entries: both would live in the space of one
    update's projection, while a row's mean square means the same under every projection. Its root
    is what is kept: squares of gradients of 1e-20 or 1e20 do not fit in float32.

    Args:
        sketch: S, float32, finite.
        v: root of the rows' second moment, float32, zeros at first.
        count: number of this update among those applied, from 1.
        b2: decay of the second moment.
        eps: of the mean of h, added where a row's h is small.

    Returns:
        D, of the sketch's norm (zeros where the sketch is), and v.

    Example:
        >>> d, v = row_adam(jnp.array([[3.0, 4.0], [6.0, 8.0]]), jnp.zeros(2), 1)
        >>> print(d.astype(jnp.bfloat16))  # rows that are scaled copies end up alike
        [[4.75 6.3125]
         [4.75 6.3125]]
    """
    v = _root_mean(v, _root_mean_square(sketch), b2)
    h = v / jnp.sqrt(1 - jnp.float32(b2) ** count)
    mean = jnp.mean(h)
    # Relative to the mean: only ratios of rows matter, and h may be as small as float32 goes.
    h = jnp.where(mean > 0, h / jnp.where(mean > 0, mean, 1.0), 1.0)
    s = 1.0 / (h + eps)
    s = s / jnp.max(s)  # instead of rms(s): the last rescaling undoes either
    scaled = _unit(s[:, None] * _unit(sketch))
    return scaled * norm(sketch), v


def norm(x: Float[Array, "..."]) -> Float[Array, ""]:
    """The Euclidean norm of all entries, float32, without squares that overflow or vanish.

    Example:
        >>> print(f"{norm(jnp.array([3e-30, 4e-30])):.3g}")
        5e-30
    """
    largest = jnp.max(jnp.abs(x), initial=0.0)
    safe = jnp.where(largest > 0, largest, 1.0)
    return largest * jnp.sqrt(jnp.sum(jnp.square(x / safe)))


def _root_mean_square(rows: Array) -> Array:
    largest = jnp.max(jnp.abs(rows), axis=1)
    safe = jnp.where(largest > 0, largest, 1.0)
    return largest * jnp.sqrt(jnp.mean(jnp.square(rows / safe[:, None]), axis=1))


def _root_mean(old: Array, new: Array, b2: ArrayLike) -> Array:
    """`sqrt(b2 old^2 + (1 - b2) new^2)`, without the squares."""
    largest = jnp.maximum(old, new)
    safe = jnp.where(largest > 0, largest, 1.0)
    return largest * jnp.sqrt(b2 * jnp.square(old / safe) + (1 - b2) * jnp.square(new / safe))


def _unit(x: Array) -> Array:
    size = norm(x)
    return x / jnp.where(size > 0, size, 1.0)


def dense_square(
    factor: Float[Array, "d_out rank"], a: Float[Array, "rank d_in"]
) -> Float[Array, ""]:
    """`||F A||^2 = <F (A A^T), F>`, without the matrix F A (methods 2.1).

    Args:
        factor: a sketch or a proposal.
        a: the projection that it belongs to.

    Returns:
        Scalar, float32.

    Example:
        >>> float(dense_square(jnp.array([[1.0], [2.0]]), jnp.array([[3.0, 4.0]])))
        125.0
    """
    return gram_square(factor, gram(a))


def gram(a: Float[Array, "rank d_in"]) -> Float[Array, "rank rank"]:
    """`A A^T`, float32: all that the norm of `F A` needs of the projection.

    Example:
        >>> gram(jnp.array([[3.0, 4.0]])).tolist()
        [[25.0]]
    """
    wide = a.astype(jnp.float32)
    return jnp.matmul(wide, wide.T, precision="highest")


def gram_square(
    factor: Float[Array, "*n d_out rank"], gram: Float[Array, "*n rank rank"]
) -> Float[Array, "*n"]:
    """`<F (A A^T), F>` of one layer or of a stack, `dense_square` where `gram` is known.

    Example:
        >>> float(gram_square(jnp.array([[1.0], [2.0]]), jnp.array([[25.0]])))
        125.0
    """
    moved = jnp.matmul(factor, gram, precision="highest")
    return jnp.maximum(jnp.sum(moved * factor, axis=(-2, -1)), 0.0)


def update_scale(
    ratio: ArrayLike, weight_square: ArrayLike, proposal_square: ArrayLike
) -> Float[Array, ""]:
    """What all proposals are multiplied with: `ratio sqrt(sum ||W||^2 / sum ||D A||^2)`.

    Args:
        ratio: the step's size, relative to the weights' (`update_ratio`; methods 2.2).
        weight_square: summed over all target layers, and over all devices.
        proposal_square: the same of the dense proposals, `dense_square`.

    Returns:
        Scalar; 0 where no proposal moves anything.

    Example:
        >>> float(update_scale(0.5, 16.0, 4.0))
        1.0
    """
    moves = jnp.asarray(proposal_square) > 0
    over = jnp.where(moves, proposal_square, 1.0)
    return jnp.where(moves, ratio * jnp.sqrt(weight_square / over), 0.0).astype(jnp.float32)


def clip_scale(gradient_square: ArrayLike, max_norm: ArrayLike | None) -> Float[Array, ""]:
    """The factor, at most 1, that brings sketches to a dense gradient norm of `max_norm`.

    Args:
        gradient_square: `sum ||S A||^2` over all target layers.
        max_norm: None leaves them.

    Returns:
        Scalar, float32.

    Example:
        >>> float(clip_scale(16.0, 1.0))
        0.25
    """
    if max_norm is None:
        return jnp.ones((), jnp.float32)
    size = jnp.sqrt(jnp.asarray(gradient_square, jnp.float32))
    return jnp.minimum(1.0, max_norm / jnp.maximum(size, jnp.finfo(jnp.float32).tiny))


def is_usable(sketches: object) -> tuple[Array, Array]:
    """Whether all sketches of a tree are finite, and whether any of them is not zero.

    Args:
        sketches: a tree of arrays.

    Returns:
        Two boolean scalars.

    Example:
        >>> [bool(x) for x in is_usable({"q": jnp.zeros((2, 1))})]
        [True, False]
    """
    leaves = jax.tree.leaves(sketches)
    finite = jnp.all(jnp.array([jnp.all(jnp.isfinite(x)) for x in leaves], bool))
    return finite, jnp.any(jnp.array([jnp.any(x != 0) for x in leaves], bool))
