"""Sampling filters against a brute-force numpy reference, and draws against their distribution."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hilore_jax.training.sampling import (
    check_sampling,
    sample,
    token_logp,
    top_k_filter,
    top_p_filter,
)


def softmax(row):
    shifted = np.exp(row.astype(np.float64) - row.max())
    return shifted / shifted.sum()


def brute_top_k(row, k):
    threshold = sorted(row, reverse=True)[min(k, len(row)) - 1] if k else -np.inf
    return np.array([value if value >= threshold else -np.inf for value in row])


def brute_top_p(row, p):
    order = sorted(range(len(row)), key=lambda i: -row[i])
    probabilities, mass, threshold = softmax(row), 0.0, np.inf
    for index in order:
        threshold = row[index]
        mass += probabilities[index]
        if mass >= p:
            break
    return np.array([value if value >= threshold else -np.inf for value in row])


def random_logits(seed, rows, vocab):
    return np.random.default_rng(seed).normal(size=(rows, vocab)).astype(np.float32) * 3


# One shape, so that each operation is compiled once.
@given(st.integers(0, 10**6), st.sampled_from([0, 1, 2, 5, 10, 11, 12]))
def test_top_k_matches_brute_force(seed, k):
    logits = random_logits(seed, 3, 11)
    found = np.asarray(top_k_filter(jnp.asarray(logits), k))
    np.testing.assert_array_equal(found, [brute_top_k(row, k) for row in logits])


@given(st.integers(0, 10**6), st.floats(0.01, 0.99))
def test_top_p_matches_brute_force(seed, p):
    logits = random_logits(seed, 3, 11)
    found = np.asarray(top_p_filter(jnp.asarray(logits), p))
    np.testing.assert_array_equal(found, [brute_top_p(row, p) for row in logits])


def test_top_p_keeps_the_token_that_crosses_and_nothing_after():
    logits = jnp.log(jnp.array([[0.5, 0.3, 0.15, 0.05]]))
    kept = [int(np.isfinite(top_p_filter(logits, p)).sum()) for p in (0.2, 0.49, 0.51, 0.79, 0.81)]
    assert kept == [1, 1, 2, 2, 3]


def test_filters_keep_ties_with_the_last_kept_token():
    logits = jnp.array([[1.0, 2.0, 2.0, 2.0, 0.0]])
    assert np.isfinite(top_k_filter(logits, 2)).sum() == 3
    assert np.isfinite(top_p_filter(logits, 0.3)).sum() == 3


def test_neutral_settings_are_the_identity():
    logits = jnp.asarray(random_logits(0, 2, 7))
    assert top_k_filter(logits, 0) is logits
    assert top_k_filter(logits, 7) is logits
    assert top_p_filter(logits, 1.0) is logits


def test_filters_take_banned_tokens():
    logits = jnp.array([[-jnp.inf, 0.0, -jnp.inf, 1.0]])
    for filtered in (top_k_filter(logits, 3), top_p_filter(logits, 0.999)):
        np.testing.assert_array_equal(np.isfinite(filtered), [[False, True, False, True]])


def test_temperature_zero_is_greedy_whatever_the_key():
    logits = jnp.asarray(random_logits(1, 5, 11))
    for seed in range(3):
        keys = jax.random.split(jax.random.key(seed), 5)
        found = sample(keys, logits, temperature=0.0)
        np.testing.assert_array_equal(found, np.argmax(logits, axis=-1))


def test_draws_follow_the_filtered_distribution():
    row = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))
    keys = jax.random.split(jax.random.key(0), 4000)
    drawn = sample(keys, jnp.tile(row, (4000, 1)), temperature=2.0, top_k=3)
    expected = softmax(brute_top_k(row / 2.0, 3))
    found = np.bincount(drawn, minlength=4) / 4000
    assert found[3] == 0
    np.testing.assert_allclose(found, expected, atol=0.03)


def test_a_row_depends_on_its_own_key_only():
    logits = jnp.asarray(random_logits(2, 4, 50)) * 0.1
    keys = jax.random.split(jax.random.key(3), 4)
    whole = sample(keys, logits)
    alone = [int(sample(keys[i : i + 1], logits[i : i + 1])[0]) for i in range(4)]
    assert whole.tolist() == alone
    others = keys.at[0].set(jax.random.key(9))
    assert sample(others, logits)[1:].tolist() == alone[1:]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_token_logp_is_untruncated_at_the_temperature(temperature):
    logits = random_logits(4, 3, 9)
    tokens = np.array([0, 4, 8])
    expected = [
        np.log(softmax(row / temperature)[t]) for row, t in zip(logits, tokens, strict=True)
    ]
    found = token_logp(jnp.asarray(logits), jnp.asarray(tokens), temperature)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_greedy_tokens_are_scored_at_temperature_one():
    logits = jnp.asarray(random_logits(5, 2, 6))
    tokens = jnp.array([1, 2])
    np.testing.assert_array_equal(token_logp(logits, tokens, 0.0), token_logp(logits, tokens, 1.0))


def test_settings_out_of_range_are_all_named():
    assert check_sampling(1.0, 0, 1.0) == []
    faults = check_sampling(float("nan"), -1, 0.0)
    assert [fault.split()[0] for fault in faults] == ["temperature", "top_k", "top_p"]
