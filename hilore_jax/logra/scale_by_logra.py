"""LoGRA's step for a dense gradient: sketched on arrival, RowAdam, as large as the weights."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike
from jaxtyping import Array

from hilore_jax.logra.projection import KINDS, Kind, layer_key, projection, update_key
from hilore_jax.logra.row_adam import dense_square, norm, row_adam, update_scale


class ScaleByLograState(NamedTuple):
    """State of `scale_by_logra`: no projection, no first moment, nothing of a weight's size.

    Attributes:
        count: updates so far; the next projections are drawn from it.
        v: `row_adam`'s second moments, one for each output row, in the place of each weight.
    """

    count: Array  # shape=(), dtype=jnp.int32
    v: Any  # shapes=(*stack, out), dtype=jnp.float32


def scale_by_logra(
    rank: int = 256,
    *,
    seed: int = 0,
    kind: Kind = "rademacher",
    b2: ArrayLike = 0.95,
    eps: ArrayLike = 1e-8,
    axis: int = -2,
) -> optax.GradientTransformationExtraArgs:
    """The sketched part of `logra`: gradients become steps as large, together, as the weights.

    Args:
        rank: r of the projections.
        seed: base seed of the projections.
        kind: "rademacher" or "gaussian".
        b2: decay of the second moment of an output row.
        eps: added to a row's root mean square, in units of the rows' mean.
        axis: the inputs' axis, -2 or -1.

    Returns:
        A transformation of trees whose leaves have at least two axes each.

    Raises:
        ValueError: rank, seed, kind, b2, eps or axis is out of its range; from `init` and
            `update`, leaves that are no matrices; from `update`, no parameters.
        TypeError: rank, seed or axis is not an int; b2 or eps is no number.

    Example:
        >>> import jax.numpy as jnp
        >>> state = scale_by_logra(rank=2).init([jnp.ones((7, 6, 4))])
        >>> state.v[0].shape
        (7, 4)
    """
    _check(rank, seed, kind, axis)
    check_number("b2", b2, "at least 0 and below 1", below=1.0)
    check_number("eps", eps, "a number from 0")

    def init(params: optax.Params) -> ScaleByLograState:
        jax.tree_util.tree_map_with_path(_check_matrix, params)
        v = jax.tree.map(lambda w: jnp.zeros(_sides(w, axis)[0], jnp.float32), params)
        return ScaleByLograState(jnp.zeros([], jnp.int32), v)

    def update(
        updates: optax.Updates,
        state: ScaleByLograState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, ScaleByLograState]:
        del extra_args
        if params is None:
            raise ValueError(
                "logra makes a step relative to the weights: call update(gradients, state, params)"
            )
        paths, tree = jax.tree_util.tree_flatten_with_path(updates)
        count = jnp.asarray(optax.safe_increment(state.count))
        layers = [
            _Layer(g, _keys(path, g, seed, state.count), rank, kind, axis) for path, g in paths
        ]
        moments = tree.flatten_up_to(state.v)
        made = [x.propose(v, count, b2, eps) for x, v in zip(layers, moments, strict=True)]
        scales = _scales(made, tree.flatten_up_to(params))
        steps = [x.dense(y.d * s) for x, y, s in zip(layers, made, scales, strict=True)]
        return tree.unflatten(steps), ScaleByLograState(count, tree.unflatten([x.v for x in made]))

    return optax.GradientTransformationExtraArgs(init, update)  # pyright: ignore[reportArgumentType]


class _Proposals(NamedTuple):
    """Of the `n` matrices of a leaf."""

    d: Array  # [n, out, rank], each divided by its size
    size: Array  # [n], norms of D
    square: Array  # [n], ||D A||^2 of D divided by its size
    v: Array  # as it was given


class _Layer(NamedTuple):
    """One leaf's gradient, `[*stack, in, out]` by `axis`, and how it is sketched.

    Its matrices are taken one at a time: one projection exists, and one matrix in float32.
    """

    gradient: Array
    keys: Array  # [n, 2]
    rank: int
    kind: Kind
    axis: int

    def propose(self, v: Array, count: Array, b2: ArrayLike, eps: ArrayLike) -> _Proposals:
        def one(args: tuple[Array, Array, Array]) -> _Proposals:
            g, key, v = args
            a = self.projection(key)
            wide = g.astype(jnp.float32)
            sketch = jnp.matmul(a, wide if self.axis == -2 else wide.T, precision="highest").T
            d, v = row_adam(sketch, v, count, b2=b2, eps=eps)
            size = norm(d)
            # Squares of very large and of very small gradients do not fit in float32.
            d = d / jnp.where(size == 0, 1.0, size)
            return _Proposals(d, size, dense_square(d, a), v)

        stack = self.gradient.reshape(-1, *self.gradient.shape[-2:])
        made = jax.lax.map(one, (stack, self.keys, v.reshape(-1, v.shape[-1])))
        return made._replace(v=made.v.reshape(v.shape))

    def dense(self, d: Array) -> Array:
        """`D A`, of the gradient's shape and dtype."""

        def one(args: tuple[Array, Array]) -> Array:
            step = jnp.matmul(args[0], self.projection(args[1]), precision="highest")
            return (step.T if self.axis == -2 else step).astype(self.gradient.dtype)

        return jax.lax.map(one, (d, self.keys)).reshape(self.gradient.shape)

    def projection(self, key: Array) -> Array:
        """A, `[rank, in]`, of one matrix."""
        return projection(key, self.rank, self.gradient.shape[self.axis], self.kind)


def _scales(made: Sequence[_Proposals], weights: Sequence[Array]) -> list[Array]:
    """What each D, divided by its size, is multiplied with, for moves as large as the weights."""
    if not made:
        return []
    # A size that is not finite makes all of them so: nothing is hidden from apply_if_finite.
    largest = jnp.max(jnp.concatenate([x.size for x in made]))
    sizes = [x.size / jnp.where(largest == 0, 1.0, largest) for x in made]
    moved = sum(jnp.sum(y * y * x.square) for x, y in zip(made, sizes, strict=True))
    square = sum(jnp.sum(jnp.square(w.astype(jnp.float32))) for w in weights)
    scale = update_scale(1.0, jnp.where(square == 0, 1.0, square), moved)
    return [(scale * size)[:, None, None] for size in sizes]


def _keys(path: tuple, leaf: Array, seed: int, count: Array) -> Array:
    """Keys `[n, 2]` of this update's projections: a matrix is named by path and number."""
    numbers = range(math.prod(leaf.shape[:-2]))
    return update_key(
        np.stack([layer_key(seed, f"{leaf_name(path)}[{n}]") for n in numbers]), count
    )


def leaf_name(path: tuple) -> str:
    """A leaf's path in words, `blocks.0.kernel`: what projections are drawn from.

    Example:
        >>> leaf_name((jax.tree_util.DictKey("q"), jax.tree_util.SequenceKey(0)))
        'q.0'
    """
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _sides(leaf: Any, axis: int) -> tuple[tuple[int, ...], int]:
    """Shape of the second moments, `(*stack, out)`, and the number of inputs."""
    *stack, _, _ = leaf.shape
    return (*stack, leaf.shape[-3 - axis]), leaf.shape[axis]


def _check_matrix(path: tuple, leaf: Any) -> None:
    if jnp.ndim(leaf) < 2:
        raise ValueError(
            f"scale_by_logra found {leaf_name(path) or 'a leaf'} of shape {jnp.shape(leaf)}, "
            "expected at least 2 axes; `logra` leaves such leaves to its dense part"
        )


def _check(rank: Any, seed: Any, kind: str, axis: Any) -> None:
    for name, value in {"rank": rank, "seed": seed, "axis": axis}.items():
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            raise TypeError(
                f"logra's {name} is {value!r}, expected an int that is known when the program is "
                'built: inject_hyperparams(logra, static_args=("rank", "seed", "axis"))'
            )
    if rank < 1:
        raise ValueError(f"logra's rank is {rank}, expected at least 1")
    if not 0 <= seed < 2**64:
        raise ValueError(f"logra's seed is {seed}, expected 0 to 2^64 - 1")
    if kind not in KINDS:
        raise ValueError(f"logra's kind is {kind!r}, expected {' or '.join(KINDS)}")
    if axis not in (-2, -1):
        raise ValueError(f"logra's axis is {axis}, expected -2 for [in, out] or -1 for [out, in]")


def check_number(name: str, value: Any, expected: str, *, below: float = math.inf) -> None:
    """Refuses a setting that is no number, or one out of its range; schedules and arrays pass.

    Args:
        name: of the setting.
        value: a Python or NumPy number, a schedule, or an array, which may be traced.
        expected: the range in words.
        below: what it must be below; it must also be at least 0.

    Raises:
        ValueError: out of range.
        TypeError: no number, schedule or array.

    Example:
        >>> check_number("eps", -1.0, "a number from 0")
        Traceback (most recent call last):
        ...
        ValueError: logra's eps is -1.0, expected a number from 0
    """
    if callable(value) or isinstance(value, jax.Array):
        return
    number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    if not number and not (isinstance(value, np.ndarray) and value.shape == ()):
        raise TypeError(f"logra's {name} is {value!r}, expected {expected}")
    if not 0 <= value < below:
        raise ValueError(f"logra's {name} is {value}, expected {expected}")
