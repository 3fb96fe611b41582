"""The choice of blocks that decode, against brute force and in real numbers."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hilore_jax.gate_rule import choose_flags, share_of_budget

CHOOSE = jax.jit(choose_flags, static_argnames="paper")
INF, NAN = np.inf, np.nan
N = 7


def flags(coefficients, seconds, exposure, budget, paper=False):
    arrays = np.asarray(coefficients, np.float32), np.asarray(seconds, np.float32)
    chosen = CHOOSE(*arrays, np.float32(exposure), np.float32(budget), paper=paper)
    assert set(np.unique(chosen.flags)) <= {0.0, 1.0}
    return np.asarray(chosen.flags), chosen


def squares(coefficients, exposure, flags, power=2):
    """Sum of squared risks of the flagged blocks; of risks, where `power` is 1."""
    c, e = np.asarray(coefficients, np.float32).astype(float), float(np.float32(exposure))
    return np.sum((c * e) ** power * flags)


def best(coefficients, seconds, exposure, budget, power=2):
    """Most seconds of any subset within the budget, in float64."""
    choices = [np.array(choice) for choice in itertools.product((0, 1), repeat=len(seconds))]
    fit = [c for c in choices if squares(coefficients, exposure, c, power) <= budget**power]
    return max(float(np.dot(c, seconds)) for c in fit)


positive = st.floats(1e-3, 1e3)
draws = st.lists(positive, min_size=N, max_size=N)


@pytest.mark.parametrize("power", [2, 1])
@given(draws, st.floats(1e-4, 10), st.floats(1e-4, 1e3))
def test_equal_seconds_are_chosen_exactly(power, coefficients, exposure, budget):
    found, _ = flags(coefficients, np.ones(N), exposure, budget, paper=power == 1)
    # The room kept for rounding: the optimum of a budget smaller by that much.
    budget = float(np.float32(budget))
    spared = best(coefficients, np.ones(N), exposure, budget * (1 - 1e-5), power)
    assert found.sum() >= spared
    assert squares(coefficients, exposure, found, power) <= budget**power


@pytest.mark.parametrize("power", [2, 1])
@given(draws, draws, st.floats(1e-3, 1), st.floats(1e-3, 1e2))
def test_greedy_loses_less_than_a_block_and_half(power, coefficients, seconds, exposure, budget):
    found, chosen = flags(coefficients, seconds, exposure, budget, paper=power == 1)
    budget = float(np.float32(budget))
    assert squares(coefficients, exposure, found, power) <= budget**power
    seconds = np.asarray(seconds, np.float32).astype(float)
    most = best(coefficients, seconds, exposure, budget * (1 - 1e-5), power)
    got = float(found @ seconds)
    assert got >= most / 2 - 1e-9
    assert got >= most - seconds.max()
    used = squares(coefficients, exposure, found, power) ** (1 / power)
    np.testing.assert_allclose(chosen.risk_used, used, rtol=1e-5, atol=1e-12)


def test_each_part_of_the_choice_is_needed():
    # By hand: density order is 2 (4/1), 0 (9/4), 1 (2/1); the budget^2 5.1 holds 2 and 0.
    assert flags([2, 1, 1], [9, 2, 4], 1, 5.1**0.5)[0].tolist() == [1, 0, 1]
    # The first in density order fits, the second does not, the third does: the second round.
    assert flags([1, 2.2, 2], [4, 11, 8], 1, 5.1**0.5)[0].tolist() == [1, 0, 1]
    # One dense crumb keeps out the one block that matters: the best single block.
    assert flags([0.1, 3], [0.1, 20], 1, 3.001)[0].tolist() == [0, 1]
    # Equal risks: the one that saves more.
    assert flags([1, 1], [1, 2], 1, 1.01)[0].tolist() == [0, 1]


@pytest.mark.parametrize("power", [2, 1])
def test_the_budget_holds_in_real_numbers_at_its_very_edge(power):
    rng, touched, paper = np.random.default_rng(0), 0, power == 1
    for scale in (1e-18, 1e-6, 1.0, 1e12):
        for _ in range(60):
            c = rng.uniform(0.5, 2, 40).astype(np.float32) * np.float32(scale)
            e = np.float32(rng.uniform(0.1, 10))
            sums = np.sort((c.astype(float) * float(e)) ** power).cumsum()
            edge = sums[rng.integers(40)] ** (1 / power)
            for budget in np.float32(edge) * (1 + np.arange(-3, 4) * np.float32(6e-8)):
                found, _ = flags(c, np.ones(40), e, budget, paper)
                assert squares(c, e, found, power) <= float(budget) ** power
            # Just above the room for rounding the block at the edge is taken.
            found, _ = flags(c, np.ones(40), e, np.float32(edge * (1 + 3e-5)), paper)
            touched += squares(c, e, found, power) >= edge**power * (1 - 1e-9)
    assert touched == 240


def test_linear_risks_add_up_linearly():
    # 0.6 and 0.8 make 1 as squares, and 1.4 as they are.
    assert flags([0.6, 0.8], [1, 1], 1, 1.01)[0].tolist() == [1, 1]
    found, chosen = flags([0.6, 0.8], [1, 1], 1, 1.01, paper=True)
    assert found.tolist() == [1, 0] and float(chosen.risk_used) == pytest.approx(0.6)
    assert flags([0.6, 0.8], [1, 1], 1, 1.41, paper=True)[0].tolist() == [1, 1]
    # Seconds by risk, not by its square: 3/2 before 1/1, where 3/4 came after.
    assert flags([2, 1.5], [3, 1.6], 1, 2.5)[0].tolist() == [1, 0]
    shares = [float(share_of_budget(0.015, n, 16, paper=True)) for n in (3, 5, 8)]
    assert sum(shares) == pytest.approx(0.015)
    assert np.isnan(share_of_budget(0.015, 5, 4, paper=True))


@pytest.mark.parametrize("exposure", [NAN, INF, -1e-6])
def test_an_unknown_exposure_licenses_nothing(exposure):
    assert flags([0.0, 1e-3], [1, 1], exposure, 1.0)[0].sum() == 0


def test_edges_of_exposure_and_budget():
    c, s = [0.0, 1.0, 1e30, INF, NAN, -1.0, 1.0], [1, 1, 1, 1, 1, 1, 0.0]
    assert flags(c, s, 0.0, 0.01)[0].tolist() == [1, 1, 1, 0, 0, 0, 0]
    for exposure in (0.0, 1e-30, 1.0):  # no budget: not even what has no risk
        found, chosen = flags(c, s, exposure, 0.0)
        assert found.sum() == 0 and float(chosen.risk_used) == 0
    assert flags(c, s, 1.0, 2.0)[0].tolist() == [1, 1, 0, 0, 0, 0, 0]
    for budget in (-1.0, NAN, INF):
        assert flags(c, s, 1.0, budget)[0].sum() == 0
    for saved in (NAN, INF, -1.0):
        assert flags([0.0], [saved], 1.0, 1.0)[0].sum() == 0
    assert float(flags(c, s, NAN, 1.0)[1].risk_used) == 0


def test_shares_add_up_as_squares():
    parts = np.array([3, 5, 8])
    shares = [float(share_of_budget(0.015, n, 16)) for n in parts]
    np.testing.assert_allclose(np.sum(np.square(shares)), 0.015**2, rtol=1e-5)
    assert float(share_of_budget(0.015, 0, 0)) == 0
    assert np.isnan(share_of_budget(0.015, 5, 4))
    assert jnp.asarray(share_of_budget(0.0, 1, 2)) == 0
