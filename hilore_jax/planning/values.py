"""Whether two trees hold the same values: to the bit, or but for the rounding of floats."""

import hashlib
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_DIGITS = 1e-3  # far above what another order of summation does to a log-prob
_SUMS = 3


def content(tree: Any, *, floats: bool = True) -> str:
    """A hash of a tree's values, with their shapes and dtypes.

    Args:
        tree: of arrays.
        floats: False: of floats only which are finite, see `sketch` for the rest.
    """
    sha = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        array = _array(leaf)
        sha.update(f"{array.dtype}{array.shape}".encode())
        if not floats and _is_float(array):
            array = np.isfinite(array.astype(np.float64))
        sha.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return sha.hexdigest()


def sketch(tree: Any) -> list[list[float]]:
    """A few sums of each float leaf, by which another one is told apart, but not its rounding.

        ||x||,  sum_n x_n cos(k n)  for k = 1 .. 3

    Args:
        tree: of arrays; what is not finite counts as 0, see `content`.

    Returns:
        The sums of each leaf of floats.

    Example:
        >>> sketch({"a": jnp.array([3.0, 4.0]), "b": jnp.array([1, 2])})[0][0]
        5.0
    """
    found = []
    for array in filter(_is_float, map(_array, jax.tree.leaves(tree))):
        x = array.astype(np.float64).reshape(-1)
        x = np.where(np.isfinite(x), x, 0.0)
        waves = (np.cos(k * np.arange(x.size)) for k in range(1, _SUMS + 1))
        found.append([float(np.linalg.norm(x)), *(float(x @ wave) for wave in waves)])
    return found


def alike(one: Sequence[Sequence[float]], other: Sequence[Sequence[float]]) -> bool:
    """Whether two `sketch`es are of the same values, but for rounding.

    Example:
        >>> x = jnp.linspace(-1.0, 1.0, 5)
        >>> alike(sketch(x), sketch(x * (1 + 1e-6))), alike(sketch(x), sketch(x[::-1]))
        (True, False)
    """
    if [len(sums) for sums in one] != [len(sums) for sums in other]:
        return False
    pairs = itertools.chain.from_iterable(
        ((a, b, max(left[0], right[0])) for a, b in zip(left, right, strict=True))
        for left, right in zip(one, other, strict=True)
    )
    return all(abs(a - b) <= _DIGITS * norm for a, b, norm in pairs)


def _array(leaf: Any) -> np.ndarray:
    keys = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.ascontiguousarray(jax.random.key_data(leaf) if keys else leaf)


def _is_float(array: np.ndarray) -> bool:
    return jnp.issubdtype(array.dtype, jnp.floating)
