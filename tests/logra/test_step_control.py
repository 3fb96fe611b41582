"""The step's size against the KL budget, the budget's schedule, and the mismatch that it pays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hilore_jax.logra import kl_budget, step_control
from hilore_jax.logra.step_control import MISMATCH_WEIGHT, less_mismatch, next_mismatch

decide = jax.jit(lambda q, budget: step_control(q, budget))


@pytest.mark.parametrize(
    ("q", "budget", "alpha"),
    [
        (4e-4, 1e-4, 0.5),
        (1e-4, 1e-4, 1.0),
        (2.5e-5, 1e-4, 2.0),
        (1e-6, 1e-4, 3.0),  # held back
        (1e-37, 1e-4, 3.0),
        (1e30, 1e-4, 1e-17),
        (0.0, 1e-4, 1.0),
    ],
)
def test_alpha(q, budget, alpha):
    for decided in (step_control(q, budget), decide(q, budget)):
        assert bool(decided.usable)
        assert float(decided.alpha) == pytest.approx(alpha, rel=1e-5)
        assert decided.alpha.dtype == jnp.float32


def test_a_step_that_is_not_held_back_hits_the_budget():
    """KL is quadratic in the step: alpha^2 q is what the step is predicted to cause."""
    for q in (2e-5, 1e-4, 3e-2):
        alpha = float(step_control(q, 1.5e-4).alpha)
        assert alpha**2 * q == pytest.approx(1.5e-4, rel=1e-5)


def test_alpha_max():
    assert float(step_control(1e-9, 1e-4, alpha_max=7.0).alpha) == 7.0
    assert float(step_control(1e-9, 1e-4).alpha) == 3.0


@pytest.mark.parametrize("q", [-1e-9, -1.0, np.nan, np.inf, -np.inf])
def test_a_prediction_that_is_no_prediction(q):
    for decided in (step_control(q, 1e-4), decide(q, 1e-4)):
        assert not bool(decided.usable) and float(decided.alpha) == 0.0


@pytest.mark.parametrize("budget", [0.0, -1e-4, np.nan, np.inf])
def test_a_budget_that_is_none(budget):
    with pytest.raises(ValueError, match=r"KL budget is .* nats a token, expected a number above"):
        step_control(1e-4, budget)
    for q in (1e-4, 0.0):
        decided = decide(q, budget)  # traced: known too late for an error
        assert not bool(decided.usable) and float(decided.alpha) == 0.0


def test_bad_alpha_max():
    for alpha_max in (0.0, -1.0, np.nan):
        with pytest.raises(ValueError, match=r"alpha_max is .*, expected above 0"):
            step_control(1e-4, 1e-4, alpha_max=alpha_max)


def test_the_budgets_schedule():
    assert float(kl_budget(1)) == pytest.approx(2e-4, rel=1e-6)
    assert float(kl_budget(300)) == pytest.approx(2e-5, rel=1e-5)
    assert float(kl_budget(10_000)) == float(kl_budget(300))
    assert float(kl_budget(0)) == float(kl_budget(1))
    assert float(kl_budget(150.5)) == pytest.approx(1.1e-4, rel=1e-5)
    quarter = 2e-5 + 1.8e-4 * 0.5 * (1 + np.cos(np.pi / 4))
    assert float(kl_budget(1 + 299 / 4)) == pytest.approx(quarter, rel=1e-5)
    every = np.asarray(jax.jit(jax.vmap(kl_budget))(jnp.arange(1, 301)))
    assert np.all(np.diff(every) <= 0) and every.dtype == np.float32


def test_another_schedule():
    settings = {"first": 1e-3, "last": 5e-3, "updates": 10}
    assert float(kl_budget(1, **settings)) == pytest.approx(1e-3)
    assert float(kl_budget(10, **settings)) == pytest.approx(5e-3)
    assert float(kl_budget(1, updates=1)) == pytest.approx(2e-4)


@pytest.mark.parametrize(
    "settings", [{"first": 0.0}, {"last": -1e-5}, {"updates": 0}, {"first": np.inf}]
)
def test_bad_schedules(settings):
    with pytest.raises(ValueError, match=r"budget from .* expected budgets above 0 and at least 1"):
        kl_budget(1, **settings)


def test_the_mismatch_is_a_moving_average():
    gaps = [1e-3, 2e-3, -5e-3, 4e-4]
    m = 0.0
    expected = 0.0
    for gap in gaps:
        m = next_mismatch(m, gap)
        expected = 0.7 * expected + 0.3 * max(0.0, gap)
        assert float(m) == pytest.approx(expected, rel=1e-5)
    assert MISMATCH_WEIGHT == 0.3
    for bad in (np.nan, np.inf, -np.inf):
        assert float(next_mismatch(m, bad)) == pytest.approx(expected, rel=1e-5)


def test_the_mismatch_takes_at_most_half_of_the_budget():
    for mismatch, left in ((0.0, 2e-4), (5e-5, 1.5e-4), (1e-4, 1e-4), (1.5e-4, 1e-4), (1.0, 1e-4)):
        got = less_mismatch(2e-4, mismatch)
        assert float(got) == pytest.approx(left, rel=1e-5) and got.dtype == jnp.float32
