"""The exposure foretold against the exact one, for any policy and for any within the margin."""

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from hilore_jax.grpo import dead_rows, estimate_exposure, exposure, loss_and_coefficients

ROWS, SEQ = 3, 5


def draw(seed, positive, drift, reference):
    """`logp` is within `drift` of the old one in nats."""
    rng = np.random.default_rng(seed)
    old = rng.normal(-3, 2, (ROWS, SEQ)).astype(np.float32)
    logp = (old + rng.uniform(-drift, drift, old.shape)).astype(np.float32)
    advantages = rng.normal(0, 2, ROWS).astype(np.float32)
    mask = rng.random((ROWS, SEQ)) < 0.7
    ref = (old + rng.normal(0, 1, old.shape)).astype(np.float32) if reference else None
    return logp, old, ref, np.abs(advantages) if positive else advantages, mask


def exact(logp, old, ref, advantages, mask, tokens, **options):
    omega = loss_and_coefficients(logp, old, ref, advantages, mask, tokens, **options)[1]
    return exposure(omega, mask), exposure(omega, mask, per_row=True)


@pytest.mark.newest
@hypothesis.given(
    st.integers(0, 10**6), st.sampled_from([0.01, 1.0, 8.0]), st.sampled_from([None, 0.0, 0.4])
)
def test_a_bound_holds_for_any_policy(seed, drift, clip_high):
    logp, old, _, advantages, mask = draw(seed, True, drift, False)
    options = {"clip": 0.2, "clip_high": clip_high}
    total, rows = exact(logp, old, None, advantages, mask, 7, **options)
    found = estimate_exposure(old, None, advantages, mask, 7, **options)
    assert bool(found.is_bound) and total <= found.value
    by_row = estimate_exposure(old, None, advantages, mask, 7, per_row=True, **options)
    assert by_row.is_bound.all() and (np.asarray(rows) <= np.asarray(by_row.value)).all()


def test_a_bound_is_reached_and_never_looser_than_the_clip_range():
    old, mask, advantages = np.full((1, 4), -2.0), np.ones((1, 4)), np.array([1.5])
    at_the_clip = old + np.log1p(0.2 - 1e-6)
    total, _ = exact(at_the_clip, old, None, advantages, mask, 4)
    found = estimate_exposure(old, None, advantages, mask, 4)
    assert float(found.value) == pytest.approx(float(total), rel=4e-6)
    # Witness: without the clip range the estimate would be |A|/N summed, which is exceeded.
    assert float(total) > 1.5


@hypothesis.given(st.integers(0, 10**6), st.sampled_from([0.0, 0.05]), st.sampled_from([0.2, 1.0]))
def test_an_estimate_holds_where_ratios_keep_the_margin(seed, beta, margin):
    logp, old, ref, advantages, mask = draw(seed, False, np.log1p(margin) * 0.999, True)
    advantages[0] = -abs(advantages[0]) - 0.1
    mask[0, 0] = True
    total, rows = exact(logp, old, ref, advantages, mask, 7, beta=beta)
    options = {"beta": beta, "margin": margin}
    found = estimate_exposure(old, ref, advantages, mask, 7, **options)
    assert not bool(found.is_bound) and total <= found.value
    by_row = estimate_exposure(old, ref, advantages, mask, 7, per_row=True, **options)
    assert (np.asarray(rows) <= np.asarray(by_row.value)).all()


def test_beyond_the_margin_an_estimate_fails_and_says_that_it_may():
    old, mask = np.zeros((1, 2)), np.ones((1, 2))
    for advantage, ref in ((-1.0, None), (1.0, np.zeros((1, 2)))):
        logp = old + (2.0 if ref is None else -7.0)
        total, _ = exact(logp, old, ref, np.array([advantage]), mask, 2, beta=1.0)
        found = estimate_exposure(old, ref, np.array([advantage]), mask, 2, beta=1.0)
        assert total > found.value and not bool(found.is_bound)
    # A reference without weight leaves the bound a bound, and so does a masked negative token.
    free = estimate_exposure(old, old, np.array([1.0]), mask, 2, beta=0.0)
    masked = estimate_exposure(old, None, np.array([[1.0, -1.0]]), np.array([[1, 0]]), 2)
    assert bool(free.is_bound) and bool(masked.is_bound)


def test_under_jit_and_for_empty_updates():
    _, old, _, advantages, mask = draw(0, False, 0.1, False)
    jitted = jax.jit(lambda n: estimate_exposure(old, None, advantages, mask, n))
    plain = estimate_exposure(old, None, advantages, mask, 7)
    np.testing.assert_allclose(jitted(7).value, plain.value, rtol=1e-6)
    assert float(jitted(0).value) == 0
    none = estimate_exposure(old, None, advantages, np.zeros_like(mask), 7)
    assert float(none.value) == 0 and bool(none.is_bound)


def test_numbers_that_are_not_finite_stay_visible_under_jit():
    _, old, _, advantages, mask = draw(0, False, 0.1, False)
    mask[:] = True
    guess = jax.jit(lambda o, a: estimate_exposure(o, None, a, mask, 7, per_row=True).value)
    for bad in (guess(np.where(old == old[1, 2], np.nan, old), advantages),):
        assert np.isnan(bad[1]) and np.isfinite(bad[0])
    assert np.isnan(guess(old, np.array([1.0, np.nan, 1.0], np.float32))[1])
    with pytest.raises(ValueError, match="row 1, position 2"):
        estimate_exposure(np.where(old == old[1, 2], np.nan, old), None, advantages, mask, 7)
    with pytest.raises(ValueError, match=r"margin is -0\.1"):
        estimate_exposure(old, None, advantages, mask, 7, margin=-0.1)


def test_dead_rows_have_no_omega_for_any_policy_and_others_may():
    logp, old, ref, advantages, mask = draw(3, False, 1.0, True)
    mask[:] = True
    mask[2] = False
    advantages[0] = 0.0
    for beta, reference, expected in (
        (0.0, ref, [True, False, True]),
        (0.1, None, [True, False, True]),
        (0.1, ref, [False, False, True]),
    ):
        dead = np.asarray(dead_rows(old, reference, advantages, mask, beta=beta))
        assert dead.tolist() == expected
        _, rows = exact(logp, old, reference, advantages, mask, 7, beta=beta)
        np.testing.assert_array_equal(np.asarray(rows) == 0, dead)


def test_a_row_with_a_bad_number_is_never_dead():
    old, mask = np.zeros((2, 2)), np.ones((2, 2), bool)
    old[0, 1] = np.nan
    assert dead_rows(old, None, jnp.zeros(2), mask).tolist() == [False, True]
    mask[0, 1] = False
    assert dead_rows(old, None, jnp.zeros(2), mask).tolist() == [True, True]
