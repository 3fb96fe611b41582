"""Policy-update exposure: how much of the update's direction passes through a saved state."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Num, Shaped

from hilore_jax.grpo.checks import at_least_float32, check_mask, check_shapes, is_concrete

Pair = tuple[Array, Array]
"""A number as an unevaluated sum `high + low` of two floats, twice the digits of one."""


def exposure(
    omega: Num[Array | np.ndarray, "..."],
    mask: Shaped[Array | np.ndarray, "..."] | None = None,
    *,
    per_row: bool = False,
    profile: bool = False,
    weights: Num[Array | np.ndarray, "..."] | float | int | None = None,
) -> Float[Array, "..."]:
    """Exposure `E = sum_t w_t |omega_t|` of the states that every response token passes through.

    `profile` is its causal form: a state at position s reaches the tokens from s on, so
    `E_s = sum_{t >= s} w_t |omega_t|` (arXiv 2609.33570; the profile is ours). All sums are
    compensated (Knuth's two-sum in a pairwise tree), so float32 on the device gives what float64
    on the host would, rounded once.

    Args:
        omega: `[..., seq]`, usually `[batch, seq]`: coefficients of one update or microbatch.
        mask: `[..., seq]`, bool or 0/1; where it is off, omega may hold anything.
        per_row: One exposure a sequence.
        profile: One exposure a position; never increasing, and its first entry is the row's.
        weights: Influence weights >= 0: a scalar, `[...]` (one a row) or `[..., seq]`.

    Returns:
        A scalar; `[...]` with `per_row`; `[..., seq]` with `profile`. float32 (float64 if omega
        is). A NaN in omega under the mask makes the result NaN: nothing is licensed by it.

    Raises:
        ValueError: Shapes that differ, both forms asked for, or (concrete) a weight that is
            negative or not finite under the mask.

    Example:
        >>> import jax.numpy as jnp, hilore_jax as hl
        >>> omega = jnp.array([[0.5, -0.25, 0.0], [0.125, 0.0, 0.0]])
        >>> print(hl.grpo.exposure(omega), hl.grpo.exposure(omega, per_row=True))
        0.875 [0.75  0.125]
        >>> print(hl.grpo.exposure(omega, profile=True)[0])
        [0.75 0.25 0.  ]
    """
    if per_row and profile:
        raise ValueError(
            "per_row and profile are both True; choose one. The row's exposure is the first "
            "entry of its profile."
        )
    shape = tuple(np.shape(omega))
    if not shape:
        raise ValueError("omega is a scalar; expected [batch, seq].")
    check_shapes(
        {"omega": omega, "mask": mask, "weights": weights},
        reference="omega",
        allowed={"mask": (shape,), "weights": ((), shape[:-1], shape)},
    )
    dtype = at_least_float32(omega)
    terms = jnp.abs(jnp.asarray(omega).astype(dtype))
    active = jnp.ones(shape, bool) if mask is None else check_mask(mask)
    if weights is not None:
        terms = terms * _weights(weights, active, dtype)
    terms = jnp.where(active, terms, jnp.zeros_like(terms))

    row_pairs = _tree_sum((terms, jnp.zeros_like(terms)))
    rows = row_pairs[0] + row_pairs[1]
    if per_row:
        return rows
    if profile:
        return _suffix_sums(terms, rows)
    high, low = _tree_sum((row_pairs[0].reshape(-1), row_pairs[1].reshape(-1)))
    return high + low


def _weights(weights, active: Array, dtype) -> Array:
    weights = jnp.asarray(weights).astype(dtype)
    if weights.ndim == active.ndim - 1 and weights.ndim:
        weights = weights[..., None]
    weights = jnp.broadcast_to(weights, active.shape)
    if is_concrete(weights, active):
        # `not >=` rather than `<`, so that NaN is caught.
        bad = np.asarray(active) & ~((np.asarray(weights) >= 0) & np.isfinite(weights))
        if bad.any():
            where = tuple(int(i) for i in np.argwhere(bad)[0])
            raise ValueError(
                f"weights is {float(weights[where])} at {where}; expected finite influence "
                "weights >= 0. Exposure bounds an error, so a weight cannot subtract from it."
            )
    return weights


def _two_sum(a: Array, b: Array) -> Pair:
    """`a + b` and its rounding error, exactly (Knuth)."""
    total = a + b
    virtual_b = total - a
    return total, (a - (total - virtual_b)) + (b - virtual_b)


def _add(x: Pair, y: Pair) -> Pair:
    total, error = _two_sum(x[0], y[0])
    error = error + (x[1] + y[1])
    high = total + error
    return high, error - (high - total)


# Jitted so that an eager call compiles once; inside another jit both are inlined.
@jax.jit
def _tree_sum(pair: Pair) -> Pair:
    """Sum over the last axis by halving it; log2 depth, no loop."""
    size = pair[0].shape[-1]
    width = 1 << max(size - 1, 0).bit_length()
    padding = [(0, 0)] * (pair[0].ndim - 1) + [(0, width - size)]
    high, low = (jnp.pad(part, padding) for part in pair)
    while width > 1:
        width //= 2
        high, low = _add(
            (high[..., :width], low[..., :width]), (high[..., width:], low[..., width:])
        )
    return high[..., 0], low[..., 0]


@jax.jit
def _suffix_sums(terms: Array, rows: Array) -> Array:
    if terms.shape[-1] == 0:
        return terms
    high, low = jax.lax.associative_scan(
        _add, (terms, jnp.zeros_like(terms)), axis=terms.ndim - 1, reverse=True
    )
    # Different positions add in different orders; the true sums never increase and never exceed
    # the row's, so holding the rounded ones to that only moves them towards the truth.
    sums = jnp.minimum(high + low, rows[..., None])
    sums = jax.lax.cummax(sums, axis=terms.ndim - 1, reverse=True)
    return jnp.concatenate([rows[..., None], sums[..., 1:]], axis=-1)
