"""Input checks shared by the GRPO functions: shapes always, values when they are concrete."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike


def is_concrete(*values: Any) -> bool:
    """True if every value can be read on this host now, so that values may decide about an error.

    Args:
        *values: Arrays, Python numbers or None.

    Returns:
        False as soon as one of them is a tracer (`jit`, `vmap`, `grad`, `scan`) or an array that
        is spread over several hosts.

    Example:
        >>> is_concrete(jnp.zeros(3), 0.2, None)
        True
        >>> bool(jax.jit(lambda x: is_concrete(x))(1.0))
        False
    """
    return not any(
        isinstance(value, jax.core.Tracer) or not getattr(value, "is_fully_addressable", True)
        for value in values
    )


def at_least_float32(*values: Any) -> DTypeLike:
    """The dtype to compute in: float32, or float64 if an input already is.

    Args:
        *values: Arrays (None is skipped).

    Returns:
        `float32` or `float64`.

    Example:
        >>> at_least_float32(jnp.zeros(2, jnp.bfloat16), None)
        dtype('float32')
    """
    found = (jnp.asarray(value).dtype for value in values if value is not None)
    wide = any(dtype == jnp.float64 for dtype in found)
    return jnp.dtype(jnp.float64 if wide else jnp.float32)


def check_shapes(
    arrays: Mapping[str, Any], *, reference: str, allowed: Mapping[str, tuple[tuple[int, ...], ...]]
) -> None:
    """Raise unless each array has one of its allowed shapes.

    Args:
        arrays: Name -> array; None is skipped.
        reference: Name of the array that fixes the sizes; the error shows its shape too.
        allowed: Name -> legal shapes.

    Raises:
        ValueError: Naming both arrays, both shapes and the legal ones.
    """
    for name, legal in allowed.items():
        array = arrays[name]
        if array is None or tuple(np.shape(array)) in legal:
            continue
        choices = " or ".join(str(shape) for shape in legal)
        raise ValueError(
            f"{name} has shape {tuple(np.shape(array))} but {reference} has shape "
            f"{tuple(np.shape(arrays[reference]))}; expected {name} of shape {choices}."
        )


def check_mask(mask: Any) -> jax.Array:
    """The mask as booleans; numbers other than 0 and 1 are refused, not rounded.

    Args:
        mask: `[...]`, booleans or 0/1 numbers.

    Returns:
        `[...]` bool.

    Raises:
        ValueError: A concrete mask holds something else than 0 and 1.
    """
    mask = jnp.asarray(mask)
    if mask.dtype == jnp.bool_:
        return mask
    if is_concrete(mask):
        found = np.asarray(mask)
        odd = (found != 0) & (found != 1)
        if odd.any():
            raise ValueError(
                f"mask holds {found[odd][0]}; expected booleans or 0 and 1. Weights do not belong "
                "in the mask: scale the advantages instead."
            )
    return mask != 0


def check_finite(name: str, array: Any, mask: Any) -> None:
    """Raise on a non-finite value under an active mask, if everything is concrete.

    Args:
        name: What to call the array in the error.
        array: `[batch, seq]`; None is skipped.
        mask: `[batch, seq]` bool.

    Raises:
        ValueError: Naming the array, the row and the position of the first such value.
    """
    if array is None or not is_concrete(array, mask):
        return
    # NumPy: while a function is traced, jnp would turn even constants into tracers.
    array = np.asarray(array)
    bad = np.asarray(mask) & ~np.isfinite(array)
    if not bad.any():
        return
    row, position = (int(i) for i in np.argwhere(bad)[0])
    raise ValueError(
        f"{name} is {float(array[row, position])} at row {row}, position {position}, where the "
        f"mask is on ({int(bad.sum())} such values); expected finite numbers. Mask the position "
        "out, or find out where the value comes from (a banned token, an overflow, a padded row)."
    )


def check_number(
    name: str, value: Any, *, above: float | None = None, least: float | None = None
) -> None:
    """Raise unless a concrete scalar is finite and in range; traced scalars pass.

    Args:
        name: What to call it in the error.
        value: A number or scalar array.
        above: The value must be greater than this.
        least: The value must be at least this.

    Raises:
        ValueError: Not a scalar, not finite, or out of range.
    """
    if np.shape(value) != ():
        raise ValueError(f"{name} has shape {np.shape(value)}; expected a scalar.")
    if not is_concrete(value):
        return
    number = float(value)
    wanted = f"> {above}" if above is not None else f">= {least}"
    low = above if above is not None else least
    inside = low is None or (number > low if above is not None else number >= low)
    if not np.isfinite(number) or not inside:
        raise ValueError(f"{name} is {number}; expected a finite number {wanted}.")


def check_divisors(name: str, value: Any, rows: int) -> None:
    """Raise unless concrete divisors, one of all rows or one a row, are finite and >= 0.

    Args:
        name: What to call them in the error.
        value: A number or scalar array, or `[rows]`.
        rows: Rows of the batch.

    Raises:
        ValueError: Another shape, not finite, or negative.
    """
    if np.shape(value) not in ((), (rows,)):
        raise ValueError(
            f"{name} has shape {np.shape(value)}; expected a scalar or one number for each of the "
            f"{rows} rows."
        )
    if not np.shape(value):
        check_number(name, value, least=0.0)
    elif is_concrete(value):
        found = np.asarray(value)
        bad = np.flatnonzero(~(np.isfinite(found) & (found >= 0)))
        if len(bad):
            raise ValueError(
                f"{name} is {found[bad[0]]} at row {bad[0]}; expected finite numbers >= 0."
            )
