"""Gated gradients: the static gradients of the plans that their flags spell, within the budget."""

import dataclasses
import functools
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import hilore_jax as hl
from hilore_jax.gate_rule import choose_flags
from hilore_jax.gated_scan import exact_part
from hilore_jax.grpo.gradient_norm import next_ghat
from hilore_jax.models.decoder import segment
from hilore_jax.training.gated import (
    coefficients_at,
    gated_metrics,
    make_gated_gradients,
    make_gated_update,
)
from hilore_jax.training.gradients import make_micro_gradients
from hilore_jax.training.step import init_state, make_actor_update

INT4 = hl.Policy({"mlp_gate": hl.Compress("int4"), "mlp_up": hl.Compress("int4")})
MIXED = hl.Policy({"mlp_gate": hl.Compress("int4"), "attn_out": hl.Store(), "q": hl.Store()})
GC = hl.Policy({})
COEFFICIENTS, SECONDS, RISK = np.array([0.01, 0.06]), np.array([1.0, 1.0]), 0.015
NORM = 0.3  # the Ghat in the coefficients
OPTIONS: dict[str, Any] = {"beta": 0.05, "temperature": 0.7}


def relative(tree, reference):
    norm = lambda t: float(optax.tree.norm(t))  # noqa: E731
    return norm(jax.tree.map(jnp.subtract, tree, reference)) / norm(reference)


@pytest.fixture(scope="module", params=["dense", "lora"])
def sides(request, tiny, quick):
    """Jitted gated and static gradients of one microbatch, by the same policies."""
    lora = request.param == "lora"
    policies = (INT4, INT4) if lora else (INT4, MIXED)
    graphdef, state = init_state(
        segment(tiny(lora=lora), policies), optax.sgd(1.0), jax.random.key(0)
    )
    gated = make_gated_gradients(
        graphdef, coefficients=COEFFICIENTS, seconds=SECONDS, risk=RISK, norm=NORM, **OPTIONS
    )
    static = make_micro_gradients(graphdef, **OPTIONS)
    traces = []

    def counted(*args):
        traces.append(1)
        return gated(policies, *args)

    run, plan = quick(counted), quick(static, static_argnums=0)
    params = state.params, state.frozen
    return types.SimpleNamespace(
        policies=policies,
        traces=traces,
        run=counted,
        params=params,
        gated=lambda micro, tokens=10.0, ghat=NORM: run(
            *params, micro, jnp.float32(tokens), jnp.float32(ghat)
        ),
        static=lambda policies, micro, tokens=10.0: plan(
            policies, *params, micro, jnp.float32(tokens)
        ),
    )


def scaled(data, factor):
    """The first microbatch with all advantages scaled, hence its exposure (beta aside)."""
    first = jax.tree.map(lambda x: x[0], data)
    return dataclasses.replace(first, advantages=first.advantages * factor)


def test_gradients_are_those_of_the_plan_that_the_flags_spell(sides, batch):
    seen_flags = set()
    for factor in (0.05, 0.4, 0.8, 20.0):
        micro = scaled(batch(), factor)
        grads, seen = sides.gated(micro)
        gate = seen["gate"]
        flags = tuple(int(f) for f in gate["flags"])
        spelled = tuple(
            p if f else exact_part(p) for p, f in zip(sides.policies, flags, strict=True)
        )
        want, want_seen = sides.static(spelled, micro)
        assert relative(grads, want) < 1e-5
        if any(flags):
            exact, _ = sides.static((GC, GC), micro)
            assert relative(grads, exact) > 1e-3  # the flags do change the gradients
        for name, value in want_seen.items():
            for a, b in zip(jax.tree.leaves(seen[name]), jax.tree.leaves(value), strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
        # The rule by hand: the least risky first, within R^2 times the share of the tokens.
        risks = COEFFICIENTS * float(want_seen["exposure"])
        allowed = RISK**2 * float(micro.completion_mask.sum()) / 10
        assert flags == tuple(int(s <= allowed) for s in np.cumsum(risks**2))
        np.testing.assert_allclose(gate["risk_budget"], allowed**0.5, rtol=1e-6)
        np.testing.assert_allclose(gate["risk_used"], np.linalg.norm(risks * flags), rtol=1e-5)
        assert gate["risk_used"] <= gate["risk_budget"]
        np.testing.assert_allclose(gate["exposure"], want_seen["exposure"], rtol=1e-6)
        seen_flags.add(flags)
    assert seen_flags == {(0, 0), (1, 0), (1, 1)}
    assert len(sides.traces) == 1


def test_the_flags_follow_the_norm_of_the_gradient(sides, batch):
    decided = {}
    for factor in (0.2, 0.8):
        micro = scaled(batch(), factor)
        allowed = RISK**2 * float(micro.completion_mask.sum()) / 10
        for ghat in (NORM / 4, NORM, 3 * NORM):
            gate = sides.gated(micro, ghat=ghat)[1]["gate"]
            risks = COEFFICIENTS * float(gate["exposure"]) * NORM / ghat
            decided[factor, ghat] = gate["flags"].tolist()
            assert decided[factor, ghat] == (np.cumsum(risks**2) <= allowed).tolist()
            used = np.linalg.norm(risks * np.asarray(gate["flags"]))
            np.testing.assert_allclose(gate["risk_used"], used, rtol=1e-5)
            np.testing.assert_allclose(gate["risk_budget"], allowed**0.5, rtol=1e-6)
    for factor in (0.2, 0.8):  # witness: the norm alone decides otherwise
        assert decided[factor, NORM / 4] != decided[factor, 3 * NORM]
    assert len(sides.traces) == 1


def test_half_the_norm_allows_what_was_allowed_at_twice_the_exposure():
    coefficients = np.array([0.011, 0.06, np.inf, 0.0, 0.034])
    np.testing.assert_array_equal(
        coefficients_at(coefficients, NORM, np.float32(NORM)), coefficients.astype(np.float32)
    )
    for ghat in (NORM / 2, 2 * NORM, 8 * NORM):
        relative = coefficients_at(coefficients, NORM, np.float32(ghat))
        for exposure in (0.0, 0.13, 0.4, 1.7):
            found = choose_flags(relative, np.ones(5), exposure, RISK)
            as_before = choose_flags(coefficients, np.ones(5), exposure * NORM / ghat, RISK)
            jax.tree.map(np.testing.assert_array_equal, found, as_before)


def test_a_nan_exposure_or_too_many_tokens_recompute(sides, batch):
    micro = scaled(batch(), 0.05)
    assert sides.gated(micro)[1]["gate"]["flags"].tolist() == [1, 1]
    assert sides.gated(micro, tokens=1.0)[1]["gate"]["flags"].tolist() == [0, 0]
    broken = dataclasses.replace(micro, advantages=micro.advantages.at[0].set(jnp.nan))
    gate = sides.gated(broken)[1]["gate"]
    assert gate["flags"].tolist() == [0, 0] and np.isnan(gate["exposure"])
    zero = dataclasses.replace(micro, completion_mask=jnp.zeros_like(micro.completion_mask))
    grads, seen = sides.gated(zero)
    assert float(optax.tree.norm(grads)) == 0 and float(seen["gate"]["exposure"]) == 0
    assert seen["gate"]["flags"].tolist() == [0, 0]  # without tokens it has no share of the budget


@pytest.mark.parametrize("sides", ["dense"], indirect=True)
def test_each_of_two_devices_gates_its_own_rows(sides, batch, quick):
    second = jax.tree.map(lambda x: x[::-1], batch())
    halves = [sides.gated(scaled(data, 0.8)) for data in (batch(), second)]
    flags = [seen["gate"]["flags"].tolist() for _, seen in halves]
    assert flags == [[1, 0], [1, 1]]
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    whole = scaled(batch(micro=1), 0.8)

    def on_each(params, frozen, micro, tokens, ghat):
        grads, seen = sides.run(params, frozen, micro, tokens, ghat)
        return grads, seen["gate"]["flags"], seen["gate"]["risk_used"][None]

    places = (P(), P("data"), P("data"))
    mapped = jax.shard_map(
        on_each, mesh=mesh, in_specs=(P(), P(), P("data"), P(), P()), out_specs=places
    )
    jitted = quick(mapped)
    grads, found, used = jitted(*sides.params, whole, jnp.float32(10), jnp.float32(NORM))
    assert np.asarray(found).reshape(2, 2).tolist() == flags
    assert relative(grads, jax.tree.map(jnp.add, halves[0][0], halves[1][0])) < 1e-5
    np.testing.assert_allclose(used, [s["gate"]["risk_used"] for _, s in halves], rtol=1e-5)
    halves = [sides.gated(scaled(data, 0.8), ghat=NORM / 4)[1] for data in (batch(), second)]
    _, found, _ = jitted(*sides.params, whole, jnp.float32(10), jnp.float32(NORM / 4))
    fewer = [seen["gate"]["flags"].tolist() for seen in halves]
    assert np.asarray(found).reshape(2, 2).tolist() == fewer != flags


def test_linear_risks_spend_their_share_linearly(tiny, batch, quick, monkeypatch):
    graphdef, state = init_state(tiny(), optax.sgd(0.1), jax.random.key(0))
    coefficients = np.array([0.01, 0.02])
    gate: dict[str, Any] = {"coefficients": coefficients, "seconds": np.ones(2), "paper": True}
    gated = make_gated_gradients(graphdef, risk=RISK, **gate, **OPTIONS)
    run = quick(lambda *args: gated((INT4, INT4), *args)[1]["gate"])  # no gradient is left of it
    found = [
        run(state.params, state.frozen, scaled(batch(), factor), jnp.float32(10))
        for factor in (0.1, 1.0, 2.0)
    ]
    budget = RISK * int(scaled(batch(), 1.0).completion_mask.sum()) / 10
    for one in found:
        risks = coefficients * float(one["exposure"])
        np.testing.assert_array_equal(one["flags"], np.cumsum(risks) <= budget)
        np.testing.assert_allclose(one["risk_used"], np.sum(risks * one["flags"]), rtol=1e-5)
        np.testing.assert_allclose(one["risk_budget"], budget, rtol=1e-6)
    assert len({tuple(one["flags"].tolist()) for one in found}) > 1
    # Over microbatches: sums, not roots of squares.
    monkeypatch.setattr("hilore_jax.training.gated.update_metrics", lambda grads, seen: {})
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *found)
    metrics = gated_metrics(state.params, {"gate": stacked}, paper=True)
    for name in ("risk_used", "risk_budget"):
        want = sum(float(one[name]) for one in found)
        np.testing.assert_allclose(metrics[f"gate/{name}"], want, rtol=1e-5)


def test_an_update_reports_its_gate_and_stays_within_the_risk(tiny, batch, quick):
    policies = (INT4, GC)
    graphdef, state = init_state(tiny(), optax.sgd(0.1), jax.random.key(0), NORM)
    gate: dict[str, Any] = {
        # The second would decode in every microbatch, if there were anything to decode.
        "coefficients": np.array([0.04, 1e-9]),
        "seconds": np.ones(2),
        "risk": RISK,
        "norm": NORM,
    }
    update = make_gated_update(graphdef, optax.sgd(0.1), max_grad_norm=1.0, **gate, **OPTIONS)
    exact = make_actor_update(graphdef, optax.sgd(0.1), max_grad_norm=1.0, **OPTIONS)
    data = batch(micro=4)
    jitted = quick(functools.partial(update, policies))
    new, metrics = jitted(state, data)
    want, want_metrics = quick(functools.partial(exact, (GC, GC)))(state, data)
    assert want_metrics.keys() < metrics.keys()
    np.testing.assert_allclose(metrics["loss"], want_metrics["loss"], rtol=1e-5)
    flags = np.asarray(metrics["gate/flags"])
    assert flags.shape == (4, 2) and flags[:, 1].sum() == 0  # nothing of an exact block to decode
    assert 0 < flags.sum() < 4
    assert metrics["gate/decoded"] == flags.sum()
    assert metrics["gate/decoded_fraction"] == flags.mean()
    exposures = np.asarray(metrics["gate/exposure"])
    np.testing.assert_allclose(exposures.sum(), metrics["exposure"], rtol=1e-5)
    used = np.linalg.norm(flags[:, 0] * exposures * 0.04)
    np.testing.assert_allclose(metrics["gate/risk_used"], used, rtol=1e-5)
    np.testing.assert_allclose(metrics["gate/risk_budget"], RISK, rtol=1e-5)
    moved = jax.tree.map(jnp.subtract, new.params, state.params)
    moved_exact = jax.tree.map(jnp.subtract, want.params, state.params)
    assert 1e-6 < relative(moved, moved_exact) < 0.1
    # The norm of this gradient enters the next update's risks, in the same program.
    assert metrics["grad_norm_ema"] == np.float32(NORM)
    np.testing.assert_array_equal(new.ghat, next_ghat(NORM, metrics["grad_norm"]))
    low = dataclasses.replace(state, ghat=jnp.float32(NORM / 8))
    _, other = jitted(low, data)
    assert other["grad_norm_ema"] == np.float32(NORM / 8)
    assert other["gate/decoded"] < metrics["gate/decoded"] and jitted._cache_size() == 1
    used = np.linalg.norm(np.asarray(other["gate/flags"])[:, 0] * exposures * 0.04 * 8)
    np.testing.assert_allclose(other["gate/risk_used"], used, rtol=1e-5)
    assert other["gate/risk_used"] <= other["gate/risk_budget"]


def test_no_risk_is_recompute(tiny, batch, quick):
    graphdef, state = init_state(tiny(), optax.sgd(0.1), jax.random.key(0))
    micro = scaled(batch(), 0.05)
    args = state.params, state.frozen, micro, jnp.float32(10)
    gated = make_gated_gradients(
        graphdef, coefficients=COEFFICIENTS, seconds=SECONDS, risk=0.0, **OPTIONS
    )
    grads, seen = quick(functools.partial(gated, (INT4, INT4)))(*args)
    want, _ = quick(functools.partial(make_micro_gradients(graphdef, **OPTIONS), (GC, GC)))(*args)
    assert seen["gate"]["flags"].tolist() == [0, 0]
    assert relative(grads, want) < 1e-5


def test_bad_input(tiny, batch):
    graphdef, params = nnx.split(tiny())
    with pytest.raises(ValueError, match=r"coefficients \[2\] and seconds \[3\]"):
        make_gated_gradients(graphdef, coefficients=COEFFICIENTS, seconds=np.ones(3))
    for risk in (-0.1, np.nan):
        with pytest.raises(ValueError, match=r"risk is (-0\.1|nan); expected R >= 0"):
            make_gated_gradients(graphdef, coefficients=COEFFICIENTS, seconds=SECONDS, risk=risk)
    gradients = make_gated_gradients(graphdef, coefficients=COEFFICIENTS, seconds=SECONDS)
    micro = scaled(batch(), 1.0)
    with pytest.raises(ValueError, match="give make_gated_gradients the calibration's norm"):
        gradients((INT4,) * 2, params, nnx.State({}), micro, 10, ghat=1.0)
    for policies in ((INT4,) * 3, None):
        with pytest.raises(ValueError, match=r"found 2 risk coefficients for [30] policies"):
            gradients(policies, params, nnx.State({}), micro, 10)
