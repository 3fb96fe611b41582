"""Which way of updating the settings ask for."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import hilore_jax as hl
from hilore_jax.planning.fingerprint import fingerprint
from hilore_jax.planning.ladder import Ladder
from hilore_jax.planning.menu import Entry
from hilore_jax.training.abstract import training_update
from hilore_jax.training.batch import Batch
from hilore_jax.training.config import TrainConfig, faults
from hilore_jax.training.laddered import LadderedUpdate
from hilore_jax.training.parts import check_model
from hilore_jax.training.planned import gate_options
from hilore_jax.training.step import init_state
from hilore_jax.training.strategy import (
    StaticUpdate,
    Strategy,
    calibrated_norm,
    make_strategy,
    plans,
    segment_lengths,
)
from plans import bare_plan

CONFIG = TrainConfig(policy="mlp_gate=int8", beta=0.0)


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({}, StaticUpdate),
        ({"skip_rows": True}, LadderedUpdate),
        ({"pack_by_exposure": True}, LadderedUpdate),
    ],
)
def test_only_what_is_asked_for_leaves_the_one_program(tiny, changes, kind):
    model = tiny()
    config = dataclasses.replace(CONFIG, **changes)
    made = make_strategy(config, model.config, nnx.graphdef(model), optax.sgd(1.0))
    assert type(made) is kind and isinstance(made, Strategy)
    assert made.n_traces == 0 and made.about == {}
    if isinstance(made, LadderedUpdate):
        assert made.policies == ((hl.Policy({"mlp_gate": hl.Compress()}),) * 2,)
        assert made.skip_rows is config.skip_rows
        assert made.pack_by_exposure is config.pack_by_exposure


def test_static_policies_are_one_plan_in_one_stack(tiny):
    shape = tiny().config
    (policies,) = plans(CONFIG, shape)
    assert policies == (CONFIG.parsed_policy,) * 2 and segment_lengths(CONFIG, shape) == (2,)


POLICY = hl.Policy({"mlp_gate": hl.Compress("int8"), "mlp_up": hl.Compress("int8")})


def planned(where, risks=((0.0, 0.002), (0.0, 0.004)), **changes):
    """A plan file of blocks that compress, one for each row of risks, calibrated unless changed."""
    menu = Entry(hl.Policy({}), 0, 3e-3, 7, 700, 0.0), Entry(POLICY, 100, 1e-3, 5, 500, 0.0)
    fields = {"fingerprint": {"jax": jax.__version__, "blocks": "2"}, "exposure": 0.5}
    bare_plan((POLICY,) * len(risks), menu, **{**fields, "block_risks": risks, **changes}).save(
        where
    )
    return dataclasses.replace(CONFIG, policy="gc", plan=str(where), gate=True)


def test_the_gate_reads_risks_by_exposure_from_a_calibrated_plan(tmp_path):
    config = planned(tmp_path / "plan.json")
    options = gate_options(hl.Plan.load(config.plan))
    np.testing.assert_allclose(options["coefficients"], [0.004, 0.008])
    np.testing.assert_allclose(options["seconds"], [2e-3, 2e-3])
    assert options["paper"] is False
    linear = planned(tmp_path / "paper.json", paper=True)
    assert gate_options(hl.Plan.load(linear.plan))["paper"] is True


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_risks": None}, "needs risks measured by exposure"),
        ({"exposure": 0.0}, "this plan is for exposure 0, at which all of them are 0: plan for"),
    ],
)
def test_a_plan_without_such_risks_cannot_be_gated(tmp_path, tiny, changes, message):
    config, model = planned(tmp_path / "plan.json", **changes), tiny()
    with pytest.raises(ValueError, match=message):
        make_strategy(config, model.config, nnx.graphdef(model), optax.sgd(1.0))


def test_risks_follow_the_gradients_norm_from_the_calibrations(tmp_path, tiny, caplog):
    path, shape = tmp_path / "plan.json", tiny().config
    config = planned(path, norm=0.5)
    assert calibrated_norm(config, shape) == gate_options(hl.Plan.load(path))["norm"] == 0.5
    assert calibrated_norm(dataclasses.replace(config, fixed_gradient_norm=True), shape) is None
    made = hl.Plan.load(path)
    exact = dataclasses.replace(made, policies=(hl.Policy({}),) * 2)
    Ladder((0.5, math.inf), (made, exact)).save(tmp_path / "ladder.json")
    ladder = dataclasses.replace(CONFIG, policy="gc", ladder=str(tmp_path / "ladder.json"))
    assert calibrated_norm(ladder, shape) == Ladder.load(ladder.ladder).buckets.norm == 0.5
    # Without risks, or with those of a form that has no such norm, there is nothing to follow.
    for without in (CONFIG, planned(path, paper=True), planned(path, block_risks=None)):
        assert calibrated_norm(without, shape) is None
    assert not caplog.records
    assert calibrated_norm(planned(path), shape) is None
    assert f"{path} was written before plans kept the gradient norm" in caplog.text


def test_a_rejected_plan_of_a_ladder_is_refused_unless_that_is_allowed(tmp_path, tiny):
    path, shape = tmp_path / "ladder.json", tiny().config
    made = hl.Plan.load(planned(tmp_path / "plan.json").plan)
    exact = dataclasses.replace(made, policies=(hl.Policy({}),) * 2)
    config = dataclasses.replace(CONFIG, policy="gc", ladder=str(path))
    found = {"accepted": False, "reason": "it is bad", "peak": 1, "errors": (0.5,), "removed": ()}
    found |= {"measured": None, "predicted": 0.5, "error": 0.5, "limit": 0.015}
    bad = dataclasses.replace(made, accepted=False, acceptance=found)
    good = dataclasses.replace(made, accepted=True, acceptance={**found, "accepted": True})
    Ladder((0.25, 0.5, math.inf), (good, bad, exact)).save(path)
    message = r"bucket up to exposure 0.5 in .*ladder.json was rejected: it is bad.*allow-rejected"
    for use in (plans, segment_lengths, calibrated_norm):
        with pytest.raises(ValueError, match=message):
            use(config, shape)
    allowed = dataclasses.replace(config, allow_rejected=True)
    assert len(plans(allowed, shape)) == 3
    Ladder((0.25, 0.5, math.inf), (good, made, exact)).save(path)  # not tried is not rejected
    assert len(plans(config, shape)) == 3


def test_settings_that_do_not_go_with_a_gate(tmp_path):
    config = dataclasses.replace(CONFIG, gate=True, skip_rows=True, run_dir=str(tmp_path))
    found = " ".join(faults(config))
    assert "gate needs a plan" in found and "gate and skip_rows" in found
    assert "risk must be" in " ".join(faults(dataclasses.replace(config, risk=-1.0)))


def test_a_gated_update_decodes_as_far_as_its_risk_allows(tmp_path, tiny):
    model = tiny()
    rows = jnp.arange(2 * 6).reshape(1, 2, 6) % 5 + 3
    scored = jnp.full((1, 2, 3), -2.0)
    batch = Batch(
        rows, rows > 0, scored < 0, logp_old=scored, logp_ref=None, advantages=jnp.ones((1, 2))
    )
    decoded = {}
    for risk in (0.0, 10.0):
        config = dataclasses.replace(planned(tmp_path / "plan.json"), risk=risk)
        graphdef, state = init_state(model, optax.sgd(1e-3), jax.random.key(0))
        made = make_strategy(config, model.config, graphdef, optax.sgd(1e-3))
        state = jax.tree.map(jnp.copy, state)  # the update donates it
        _, metrics = made.compile(state, batch)(state, batch)
        assert metrics["gate/risk_used"] <= metrics["gate/risk_budget"]
        decoded[risk] = int(metrics["gate/decoded"])
        assert made.n_traces == 1
    assert decoded == {0.0: 0, 10.0: 2}


def test_a_plan_for_another_model_or_batch_is_refused_before_anything_is_loaded(tmp_path, tiny):
    shape = tiny().config
    small = {"prompt_length": 9, "completion_length": 4, "micro_rows": 2}
    update = training_update(shape, dataclasses.replace(CONFIG, **small))
    blocks = update.blocks()
    args = update.arguments((hl.Policy({}),) * 2)
    made_for = fingerprint(blocks.fn, blocks.args, args, blocks=2)
    config = dataclasses.replace(planned(tmp_path / "plan.json", fingerprint=made_for), **small)
    check_model(config, shape)
    with pytest.raises(ValueError, match="update arguments: the plan has"):
        check_model(dataclasses.replace(config, prompts=2 * config.prompts), shape)
    with pytest.raises(ValueError, match="block arguments: the plan has"):
        check_model(config, dataclasses.replace(shape, d_ff=2 * shape.d_ff))
    # Kernels and layouts of another platform cannot be compared with those here.
    other = planned(tmp_path / "other.json", fingerprint=made_for, target="cuda:h200")
    check_model(dataclasses.replace(other, **small, prompts=2 * other.prompts), shape)
    for_three = {"fingerprint": {"jax": jax.__version__, "blocks": "3"}, "target": "cuda:h200"}
    three = planned(tmp_path / "three.json", risks=((0.0, 0.002),) * 3, **for_three)
    with pytest.raises(ValueError, match="blocks: the plan has 3, this run has 2"):
        check_model(dataclasses.replace(three, **small), shape)
