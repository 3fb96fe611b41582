"""Advantages: hand-computed values, exact zeros, large offsets, refused input."""

import hypothesis
import hypothesis.extra.numpy as hnp
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from hilore_jax.grpo import group_advantages, group_rewards


def reference(rewards: np.ndarray) -> np.ndarray:
    rewards = rewards.astype(np.float64)
    std = rewards.std(axis=1, keepdims=True)
    out = (rewards - rewards.mean(axis=1, keepdims=True)) / (std + 1e-6)
    return np.where(np.ptp(rewards, axis=1, keepdims=True) == 0, 0.0, out)


def test_literals():
    # [1, 0, 0, 0]: mean 1/4, population std sqrt(3)/4, so 3/sqrt(3) = 1.7320508 and -0.57735027
    # but for the 1e-6: 0.75 / (0.4330127 + 1e-6) = 1.7320468.
    out = group_advantages(jnp.array([[1.0, 0.0, 0.0, 0.0], [2.0, 4.0, 4.0, 2.0]]))
    expected = [[1.7320468, -0.5773489, -0.5773489, -0.5773489], [-0.999999, 0.999999] * 2]
    expected[1] = [-0.999999, 0.999999, 0.999999, -0.999999]
    np.testing.assert_allclose(out, expected, rtol=3e-7)
    assert out.dtype == jnp.float32


@pytest.mark.parametrize("value", [0.35, 0.3, 0.1, 1e4 + 0.1, 0.0])
def test_equal_rewards_are_exactly_zero(value):
    rewards = jnp.full((2, 8), value, jnp.float32)
    assert not np.any(np.asarray(group_advantages(rewards)))
    assert not np.any(np.asarray(jax.jit(group_advantages)(rewards)))


def test_equality_is_max_equal_min_and_not_a_small_std():
    # The naive formula on the same rewards: the witness that the case needs care.
    rewards = jnp.full((8,), 0.35, jnp.float32)
    naive = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    assert float(jnp.abs(naive).max()) > 0.01
    # A spread of 1e-7 is not equality: population std 5e-8 gives 5e-8 / 1.05e-6.
    out = group_advantages(jnp.array([[0.0, 1e-7]]))
    np.testing.assert_allclose(out, [[-1 / 21, 1 / 21]], rtol=1e-5)


def test_large_offsets_cost_nothing():
    small = np.array([[0.0, 2**-9, 2**-8, 3 * 2**-9]])
    offset = jnp.asarray(small + 1e4, jnp.float32)  # exact in float32
    np.testing.assert_allclose(group_advantages(offset), reference(small), rtol=1e-6)
    # A host's float64 rewards are shifted before they are rounded to float32.
    tiny = np.array([[0.0, 1e-7, 3e-7]])
    np.testing.assert_allclose(group_advantages(tiny + 1e4), reference(tiny + 1e4), rtol=1e-5)


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_extreme_scales(scale):
    rewards = np.array([[1.0, 2.0, 4.0]], np.float32) * np.float32(scale)
    out = group_advantages(jnp.asarray(rewards))
    np.testing.assert_allclose(out, reference(rewards), rtol=1e-5, atol=1e-30)


@hypothesis.given(
    hnp.arrays(
        np.float32,
        st.sampled_from([(0, 2), (1, 2), (3, 5)]),
        elements=st.floats(-100, 100, width=32),
    ),
)
def test_matches_float64(rewards):
    out = np.asarray(group_advantages(rewards))
    np.testing.assert_allclose(out, reference(rewards), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.int32, jnp.bool_])
def test_other_dtypes(dtype):
    out = group_advantages(jnp.array([[1, 0], [0, 0]]).astype(dtype))
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, [[0.999998, -0.999998], [0, 0]], rtol=1e-6)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_non_finite(value):
    rewards = jnp.array([[1.0, 0.0], [value, value]])
    with pytest.raises(ValueError, match="prompt 1, response 0"):
        group_advantages(rewards)
    out = np.asarray(jax.jit(group_advantages)(rewards))
    assert np.isfinite(out[0]).all() and np.isnan(out[1]).all()


def test_refused_shapes():
    with pytest.raises(ValueError, match="GRPO needs a group of at least 2"):
        group_advantages(jnp.zeros((4, 1)))
    with pytest.raises(ValueError, match=r"group_rewards.*legal.*2, 3, 6"):
        group_advantages(jnp.zeros(6))
    with pytest.raises(ValueError, match=r"\[prompts, group\]"):
        group_advantages(jnp.zeros((2, 2, 2)))


def test_group_rewards():
    rewards = jnp.arange(6.0)
    np.testing.assert_array_equal(group_rewards(rewards, 3), [[0, 1, 2], [3, 4, 5]])
    with pytest.raises(ValueError, match=r"6 rewards.*groups of 4.*2, 3, 6"):
        group_rewards(rewards, 4)
    with pytest.raises(ValueError, match="at least 2"):
        group_rewards(rewards, 1)
    with pytest.raises(ValueError, match=r"\[prompts \* group\]"):
        group_rewards(rewards.reshape(2, 3), 2)


def test_lists_are_arrays():
    nested = [[1.0, 0.0, 0.0], [1, 1, 0]]
    np.testing.assert_array_equal(group_advantages(nested), group_advantages(np.array(nested)))
    np.testing.assert_array_equal(group_rewards([1.0, 0.0, 0.0, 1.0], 2), [[1, 0], [0, 1]])
    with pytest.raises(ValueError, match=r"groups of \[1, 2\] responses"):
        group_advantages([[1.0, 0.0], [1.0]])
    with pytest.raises(ValueError, match="group_rewards"):
        group_advantages([1.0, 0.0])


def test_scaled_by_the_batch_or_not_at_all():
    # Means 1 and 4; differences -1, 1 and 0, 0; all rewards 0, 2, 4, 4 have mean 2.5 and
    # population variance (6.25 + 0.25 + 2.25 + 2.25) / 4 = 2.75.
    rewards = [[0.0, 2.0], [4.0, 4.0]]
    assert group_advantages(rewards, "none").tolist() == [[-1, 1], [0, 0]]
    found = group_advantages(rewards, "batch")
    np.testing.assert_allclose(found[0], [-1 / 2.75**0.5, 1 / 2.75**0.5], rtol=1e-6)
    assert found[1].tolist() == [0, 0]
    assert not np.allclose(found, group_advantages(rewards))  # Witness.
    for scale in ("batch", "none"):
        equal = jnp.full((2, 8), 0.35)
        assert not np.any(np.asarray(group_advantages(equal, scale)))


@pytest.mark.parametrize(("size", "offset"), [(1e-15, 0), (1e30, 0), (1.0, 1e6)])
def test_the_batch_s_deviation_at_extreme_scales_and_offsets(size, offset):
    rewards = np.random.default_rng(3).normal(size=(4, 5)) * size + offset
    want = rewards - rewards.mean(axis=1, keepdims=True)
    want = want / (rewards.std() + 1e-6)
    for given in (rewards, jnp.asarray(rewards - offset, jnp.float32)):
        np.testing.assert_allclose(group_advantages(given, "batch"), want, rtol=2e-4, atol=1e-12)
    assert np.isnan(
        jax.jit(lambda x: group_advantages(x, "batch"))(jnp.array([[1.0, jnp.nan]]))
    ).any()
