"""The moving norm of the gradient: by hand, what it ignores, and how far one norm can move it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hilore_jax.grpo.gradient_norm import WEIGHT, drift, first_ghat, next_ghat


def test_three_updates_by_hand():
    ghat = first_ghat(2.0)
    assert ghat.dtype == jnp.float32 and ghat == 2.0
    for norm, expected in ((1.0, 1.7), (3.0, 2.09), (0.5, 1.613)):
        ghat = next_ghat(ghat, norm)
        assert float(ghat) == pytest.approx(expected, rel=1e-6)  # 0.7 of it and 0.3 of the norm
    assert WEIGHT == 0.3
    assert float(next_ghat(2.0, 1.0, weight=0.5)) == 1.5
    assert next_ghat(2.0, 1.0, weight=0.0) == 2.0


@pytest.mark.parametrize("norm", [0.0, np.nan, np.inf])
def test_without_a_gradient_it_stays(norm):
    assert next_ghat(0.1, norm) == np.float32(0.1)


def test_an_update_that_did_not_count_leaves_it():
    assert next_ghat(0.1, 0.5, False) == np.float32(0.1)
    assert next_ghat(0.1, 0.5, True) != np.float32(0.1)


def test_one_huge_norm_hardly_moves_it_and_a_lasting_one_is_reached():
    assert float(next_ghat(1.0, 1e6)) == pytest.approx(1.3)
    assert float(next_ghat(1.0, 1e-6)) == pytest.approx(0.7, rel=1e-5)
    ghat = first_ghat(1.0)
    for _ in range(40):
        ghat = next_ghat(ghat, 64.0)
    assert float(ghat) == pytest.approx(64.0, rel=0.01)


def test_one_program_for_all_norms():
    traced = []

    @jax.jit
    def step(ghat, norm, applied):
        traced.append(1)
        return next_ghat(ghat, norm, applied)

    ghat = first_ghat(0.3)
    for norm, applied in ((1.0, True), (np.nan, True), (2.0, False)):
        ghat = step(ghat, np.float32(norm), np.bool_(applied))
    assert float(ghat) == pytest.approx(0.7 * 0.3 + 0.3 * 0.6) and len(traced) == 1


def test_drift_is_exactly_one_until_the_first_update():
    for norm in (0.1, 1 / 3, 7.7e-5):  # none of them a float32
        assert drift(first_ghat(norm), norm) == 1.0
    assert drift(np.float32(0.25), 0.5) == 0.5


@pytest.mark.parametrize("norm", [0.0, -1.0, np.nan, np.inf, 1e-60])
def test_a_norm_that_nothing_can_be_relative_to(norm):
    for function in (first_ghat, lambda norm: drift(1.0, norm)):
        with pytest.raises(ValueError, match=r"gradient norm of a calibration is .* finite .* > 0"):
            function(norm)
