"""Exposure: compensated sums against exact ones, the causal profile, refused input."""

import math

import hypothesis
import hypothesis.extra.numpy as hnp
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from hilore_jax.grpo import exposure


def fsum(values) -> np.float32:
    return np.float32(math.fsum(np.abs(np.asarray(values, np.float64)).ravel()))


def adversarial(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """One large entry a row, the rest below half its last digit."""
    values = rng.uniform(0, 2.0**-25, shape).astype(np.float32)
    values[:, 0] = 1.0
    return values * rng.choice([-1, 1], shape).astype(np.float32)


def test_literals():
    omega = jnp.array([[0.5, -0.25, 9.0], [0.125, 0.0, jnp.nan]])
    mask = jnp.array([[1, 1, 0], [1, 1, 0]])
    assert float(exposure(omega, mask)) == 0.875
    np.testing.assert_array_equal(exposure(omega, mask, per_row=True), [0.75, 0.125])
    np.testing.assert_array_equal(
        exposure(omega, mask, profile=True), [[0.75, 0.25, 0], [0.125, 0, 0]]
    )
    weighted = exposure(omega, mask, weights=jnp.array([2.0, 4.0]), per_row=True)
    np.testing.assert_array_equal(weighted, [1.5, 0.5])
    assert float(exposure(omega, mask, weights=2.0)) == 1.75
    position = jnp.array([[1.0, 0.0, jnp.nan]] * 2)  # a weight under the mask alone must be legal
    assert float(exposure(omega, mask, weights=position)) == 0.625


@pytest.mark.parametrize("jit", [False, True])
def test_compensation_beats_a_plain_sum_and_survives_xla(jit):
    values = adversarial(np.random.default_rng(0), (3, 301))
    wrap = jax.jit if jit else lambda f: f
    for form, exact in (
        (lambda x: exposure(x), fsum(values)),
        (lambda x: exposure(x, per_row=True), np.array([fsum(row) for row in values])),
    ):
        np.testing.assert_array_equal(wrap(form)(values), exact)
    # Witness: one float32 accumulator drops every small term, and the tree without its
    # compensation drops enough of them to show.
    naive = np.float32(0)
    for value in np.abs(values[0]):
        naive += value
    assert naive != fsum(values[0]) and fsum(values[0]) > 1
    profile = np.asarray(wrap(lambda x: exposure(x, profile=True))(values[:1]))[0]
    exact = [fsum(values[0, start:]) for start in range(0, 301, 50)]
    np.testing.assert_allclose(profile[::50], exact, rtol=6e-8)


@hypothesis.given(
    hnp.arrays(
        np.float32,
        st.sampled_from([(0, 3), (2, 0), (1, 1), (3, 5), (2, 9)]),
        elements=st.floats(-(2.0**20), 2.0**20, width=32, allow_subnormal=False),
    ),
)
def test_profile_never_increases_and_starts_at_the_row(omega):
    rows = np.asarray(exposure(omega, per_row=True))
    profile = np.asarray(exposure(omega, profile=True))
    assert profile.shape == omega.shape and rows.shape == omega.shape[:1]
    if omega.shape[1]:
        np.testing.assert_array_equal(profile[:, 0], rows)
    assert (np.diff(profile, axis=1) <= 0).all() and (profile >= 0).all()
    np.testing.assert_allclose(rows, [fsum(row) for row in omega], rtol=2e-7)
    np.testing.assert_allclose(exposure(omega), fsum(omega), rtol=2e-7)


def test_long_profile_never_increases():
    omega = adversarial(np.random.default_rng(1), (2, 301))
    omega[:, 5:150] = 0
    profile = np.asarray(jax.jit(lambda x: exposure(x, profile=True))(omega))
    assert (np.diff(profile, axis=1) <= 0).all()
    np.testing.assert_array_equal(profile[:, 0], exposure(omega, per_row=True))


def test_nan_stays_visible():
    omega = jnp.array([[1.0, jnp.nan], [1.0, 1.0]])
    assert np.isnan(exposure(omega))
    np.testing.assert_array_equal(exposure(omega, per_row=True), [np.nan, 2.0])


@pytest.mark.parametrize("value", [-1.0, np.nan, np.inf])
def test_refused_weights(value):
    weights = jnp.array([[1.0, 1.0], [1.0, value]])
    with pytest.raises(ValueError, match=r"weights is .* at \(1, 1\)"):
        exposure(jnp.ones((2, 2)), weights=weights)


def test_refused_forms():
    with pytest.raises(ValueError, match=r"mask has shape \(2, 3\) but omega has shape \(2, 2\)"):
        exposure(jnp.ones((2, 2)), jnp.ones((2, 3)))
    with pytest.raises(ValueError, match="choose one"):
        exposure(jnp.ones((2, 2)), per_row=True, profile=True)
    with pytest.raises(ValueError, match="scalar"):
        exposure(jnp.ones(()))


def test_microbatches_and_bfloat16():
    omega = jnp.arange(24.0).reshape(2, 3, 4).astype(jnp.bfloat16)
    assert exposure(omega).dtype == jnp.float32 and float(exposure(omega)) == 276.0
    assert exposure(omega, per_row=True).shape == (2, 3)
