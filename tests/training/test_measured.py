"""The realized gradient error of an update: by every strategy, against gradients computed apart."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import hilore_jax as hl
from hilore_jax.planning.buckets import Buckets
from hilore_jax.planning.menu import Entry
from hilore_jax.training.gradients import make_gradients
from hilore_jax.training.laddered import LadderedUpdate
from hilore_jax.training.measured import measure_error, risk_metrics
from hilore_jax.training.step import init_state
from hilore_jax.training.strategy import StaticUpdate
from plans import bare_plan

GC = hl.Policy({})
INT4 = hl.Policy({"mlp_gate": hl.Compress("int4"), "mlp_up": hl.Compress("int4")})
OPTIONS: dict[str, Any] = {"clip": 0.2, "beta": 0.0, "temperature": 0.7}


@pytest.fixture(scope="module", autouse=True)
def compiled_sooner():
    quick = hl.compiler_options() | {"xla_backend_optimization_level": 0}
    with pytest.MonkeyPatch.context() as patch:
        for module in ("laddered", "strategy"):
            patch.setattr(f"hilore_jax.training.{module}.compiler_options", lambda: quick)
        yield


@pytest.fixture(scope="module")
def start(tiny):
    return init_state(tiny(), optax.sgd(1.0), jax.random.key(0))


def data(batch, scale=1.0):
    made = batch(reference=False)
    return dataclasses.replace(made, advantages=scale * made.advantages)


@pytest.fixture(scope="module")
def apart(start, batch, quick):
    """The error by gradients that nothing here measured, norms in float64."""
    graphdef, state = start
    gradients = quick(make_gradients(graphdef, **OPTIONS), static_argnums=0)

    def flat(policy):
        grads, _ = gradients((policy,) * 2, state, data(batch))
        return np.concatenate([np.asarray(g, np.float64).ravel() for g in jax.tree.leaves(grads)])

    exact, planned = flat(GC), flat(INT4)
    found = np.linalg.norm(planned - exact) / np.linalg.norm(exact)
    assert 1e-3 < found < 0.5  # witness: the two gradients differ
    return found


@pytest.fixture(scope="module")
def static(start):
    return StaticUpdate(start[0], optax.sgd(1.0), (INT4,) * 2, **OPTIONS)


MENU = Entry(GC, 0, 3e-3, 7, 700, 0.0), Entry(INT4, 100, 1e-3, 5, 500, 0.0)


def plan(menu=MENU, **changes):
    risks = ((0.0, 0.003), (0.0, 0.004))
    return bare_plan((INT4,) * 2, menu, **{"block_risks": risks, "exposure": 0.5, **changes})


def test_a_static_plan(start, static, batch, apart):
    before = jax.tree.map(np.asarray, start[1].params)
    found = measure_error(static, start[1], data(batch), plan())
    np.testing.assert_allclose(found["gradient_error"], apart, rtol=1e-4)
    # Risks by hand: 0.003 and 0.004 at an exposure of 0.5 add to 0.005 as squares.
    _, metrics = static.gradient(start[1], data(batch))
    exposures = np.asarray(metrics["micro_exposure"])
    assert exposures.shape == (2,) and exposures[0] != exposures[1]
    np.testing.assert_allclose(found["predicted_error"], 0.01 * np.linalg.norm(exposures))
    assert "predicted_error" not in measure_error(static, start[1], data(batch))
    # Nothing was applied, and the update itself was not traced.
    jax.tree.map(np.testing.assert_array_equal, start[1].params, before)
    assert static.n_traces == 0


def test_the_error_does_not_depend_on_the_scale_of_the_gradient(start, static, batch):
    errors = [
        measure_error(static, start[1], data(batch, scale))["gradient_error"] for scale in (1, 64)
    ]
    np.testing.assert_allclose(errors[0], errors[1], rtol=1e-4)


def test_without_a_gradient_there_is_no_error(start, static, batch):
    assert math.isnan(measure_error(static, start[1], data(batch, 0.0))["gradient_error"])


def test_a_ladder_is_measured_under_the_plans_that_it_chooses(start, batch, apart):
    buckets = Buckets((1e3, math.inf), (0.01, 0.0))
    made = LadderedUpdate(
        start[0], optax.sgd(1.0), buckets, ((INT4,) * 2, (GC,) * 2), skip_rows=True, **OPTIONS
    )
    found = measure_error(made, start[1], data(batch))
    np.testing.assert_allclose(found["gradient_error"], apart, rtol=1e-4)
    _, metrics = made.gradient(start[1], data(batch))
    used = 0.01 / 1e3 * np.linalg.norm(metrics["micro_exposure"])
    np.testing.assert_allclose(found["predicted_error"], used, rtol=1e-6)
    # Above the edge the plan is exact, and both gradients are by the same program.
    high = measure_error(made, start[1], data(batch, 1e4))
    assert high == {"gradient_error": 0.0, "predicted_error": 0.0}
    assert made.n_traces == 2


def test_a_gate_is_measured_with_the_flags_that_it_decides(start, static, batch, apart):
    gate = {"risk": 0.015, "coefficients": np.array([1e-4, 2e-4]), "seconds": np.ones(2)}
    made = StaticUpdate(start[0], optax.sgd(1.0), (INT4,) * 2, gate, **OPTIONS)
    made._exact = static._exact  # compiled before
    found = measure_error(made, start[1], data(batch))
    np.testing.assert_allclose(found["gradient_error"], apart, rtol=1e-3)
    exposures = np.asarray(made.gradient(start[1], data(batch))[1]["gate/exposure"])
    used = np.linalg.norm(np.outer(exposures, gate["coefficients"]))
    np.testing.assert_allclose(found["predicted_error"], used, rtol=1e-5)
    # Far above its budget it recomputes everything.
    high = measure_error(made, start[1], data(batch, 1e5))
    assert high["gradient_error"] < 1e-5 and high["predicted_error"] == 0


def test_risks_of_an_update():
    micro = {"micro_exposure": [0.3, 0.4]}
    assert risk_metrics(micro) == {}
    found = risk_metrics(micro, plan())
    # The plan's budget is a microbatch's: the update's is of both, as its risk is.
    whole = pytest.approx(0.015 * 2**0.5)
    assert found == {"risk_used": pytest.approx(0.005), "risk_budget": whole}
    linear = plan(paper=True)  # the paper's sums: (0.003 + 0.004) 0.7 / 0.5
    of_sums = {"risk_used": pytest.approx(0.0098), "risk_budget": pytest.approx(0.03)}
    assert risk_metrics(micro, linear) == of_sums
    ladder = {"risk_used": np.float64(0.25), "risk_budget": np.float64(0.5)}
    assert risk_metrics(ladder, plan()) == ladder
    gate = {f"gate/{name}": jnp.float32(value) for name, value in ladder.items()}
    assert risk_metrics(gate) == ladder
    # Relative to the norm that the update used, where the plan knows its own.
    at = {**micro, "grad_norm_ema": np.float32(0.25)}
    assert risk_metrics(at, plan(norm=0.5))["risk_used"] == pytest.approx(0.01)
    assert risk_metrics(micro, plan(norm=0.5)) == risk_metrics(at, plan()) == found
    # At exposure 0 nothing has a risk; what a plan for it does at more is not known, unless it is
    # exact.
    none = plan(exposure=0.0, block_risks=((0.0, 0.0),) * 2)
    for exposures, risk in ([0.0, 0.0], 0.0), ([0.0, 0.4], math.inf), ([math.nan], math.inf):
        assert risk_metrics({"micro_exposure": exposures}, none)["risk_used"] == risk
    exact = dataclasses.replace(none, policies=(GC, GC))
    assert risk_metrics(micro, exact)["risk_used"] == 0.0
    # Risks that were not calibrated do not follow the exposure.
    fixed = plan(exposure=None, block_risks=None, menu=(Entry(INT4, 1, 1.0, 1, 1, 0.003),))
    of_update = {"risk_used": pytest.approx(0.003 * 2**0.5), "risk_budget": 0.015}
    assert risk_metrics(micro, fixed) == of_update
