"""Acceptance: a good plan passes, a bad one does not, idle names go; plans with a calibration."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import pytest

import hilore_jax as hl
from blocks import D, mlp, params, relative
from hilore_jax.planning.accept import accept
from hilore_jax.planning.calibration import Calibration, Measured, model_fingerprint
from hilore_jax.planning.menu import Entry
from hilore_jax.planning.plan import Plan
from hilore_jax.planning.target import parse_target

N = 3
STACK = jax.tree.map(lambda *x: jnp.stack(x), *(params(seed=s) for s in range(N)))
UPDATES = [jax.random.normal(jax.random.key(s), (2, 64, D)) for s in (1, 2)]
INT8, INT4 = hl.Compress("int8", tile=None), hl.Compress("int4", tile=None)
GOOD = hl.Policy({"up": INT8})
BAD = hl.Policy({"up": INT4, "gate": INT4})
BLOCKS = hl.Blocks(mlp, (params(), UPDATES[0]), N)
CPU = dataclasses.replace(parse_target("cpu"), flops=(("float32", 1e9),), bandwidth=2e10)


@functools.partial(jax.jit, static_argnums=0)
def compute(policies, x):
    return jax.grad(lambda s: jnp.mean(jnp.sin(hl.scan_blocks(mlp, s, x, policies))))(STACK)


def gradients(policies, x):
    return compute(policies, x), [0.25, 0.5]


def update(policies, stack, x):
    grads = jax.grad(lambda s: jnp.mean(jnp.sin(hl.scan_blocks(mlp, s, x, policies))))(stack)
    return jax.tree.map(lambda a, g: a - g, stack, grads), {}


def calibration(kappas):
    measured = [
        Measured(p, b, k, 0.1, 0.01, 1) for p, row in kappas.items() for b, k in enumerate(row)
    ]
    return Calibration(
        tuple(measured), 2.0, 1.0, (0.2, 0.5, 0.4), model_fingerprint(BLOCKS), 9, 1.0, 2, {}
    )


@functools.cache
def planned(risk=0.015, exposure=None, kappas=((GOOD, (0.5, 4.0, 0.5)), (BAD, (20.0,) * N))):
    return hl.plan(
        update,
        (STACK, UPDATES[0]),
        blocks=BLOCKS,
        budget=hl.Budget("9x gc", risk),
        target=CPU,
        codecs=[INT8, INT4],
        risks=lambda name, codec: 0.001,
        calibration=calibration(dict(kappas)),
        exposure=exposure,
    )


def under(policy):
    """The plan with every block under one policy."""
    made = planned()
    menu = tuple(e for e in made.menu if e.policy != policy)
    entry = Entry(policy, 10, 1e-6, 0, 0, 0.01)
    risks = tuple((*(0.01,) * len(menu), 0.01) for _ in range(N))
    return dataclasses.replace(made, policies=(policy,) * N, menu=(*menu, entry), block_risks=risks)


def test_a_calibrated_plan_uses_each_blocks_own_risk(tmp_path):
    made = planned(risk=0.002)
    kept = [p.names(hl.Compress) for p in made.policies]
    # Risks kappa e E / Ghat at the median exposure 0.4: 0.001, 0.008, 0.001.
    assert kept[1] == () and made.risk <= 0.002 and made.exposure == 0.4
    assert made.block_risks is not None
    for block, entry in enumerate(made.entries):
        expected = {(): 0.0, ("up",): (0.001, 0.008, 0.001)[block]}[kept[block]]
        assert entry.risk == pytest.approx(expected)
    made.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == made and made.norm == 2.0
    assert "calibrated" in made.explain() and "at exposure 0.4" in made.explain()
    assert made.pareto(points=3)[-1]["risk"] <= 0.002


def test_less_exposure_lets_more_be_compressed():
    count = lambda plan: sum(bool(p.names(hl.Compress)) for p in plan.policies)  # noqa: E731
    exact = planned(risk=0.0)
    assert count(exact) == 0 and exact.risk == 0
    menus = [planned(risk=0.002, exposure=e).menus for e in (0.1, 0.4)]
    low, high = ([e.risk for menu in m for e in menu] for m in menus)
    assert low != high and [4 * r for r in low] == pytest.approx(high)


def test_what_was_not_measured_is_not_used():
    only = ((GOOD, (0.5, math.inf, 0.5)),)
    made = planned(risk=0.5, kappas=only)
    assert not made.policies[1].names(hl.Compress)
    assert all(set(p.names(hl.Compress)) <= {"up"} for p in made.policies)


def test_a_calibration_of_another_shape_is_refused():
    other = dataclasses.replace(
        calibration({GOOD: (1.0,) * N}), fingerprint={"blocks": "7", "activations": "up[9]"}
    )
    with pytest.raises(ValueError, match=r"another model shape: blocks: measured on 7; found 3"):
        hl.plan(
            update,
            (STACK, UPDATES[0]),
            blocks=BLOCKS,
            budget=hl.Budget("9x gc"),
            target=CPU,
            calibration=other,
        )
    with pytest.raises(ValueError, match="exposure is -1"):
        planned(exposure=-1.0)


def test_a_good_plan_is_accepted_and_says_by_how_much(tmp_path):
    made = accept(under(GOOD), gradients, UPDATES, limit=0.015)
    exact = [compute((hl.Policy({}),) * N, x) for x in UPDATES]
    errors = [relative(compute((GOOD,) * N, x), e) for x, e in zip(UPDATES, exact, strict=True)]
    assert made.accepted and made.acceptance is not None
    assert made.acceptance["errors"] == pytest.approx(errors, rel=1e-4) and min(errors) > 1e-4
    # Risk 0.01 sqrt(3) at exposure 0.4, in microbatches of 0.25 and 0.5, and at the norm 2 of the
    # calibration, relative to the updates' own gradients.
    predicted = 0.01 * 3**0.5 * math.hypot(0.25, 0.5) / 0.4
    own = [
        predicted * 2.0 / float(jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(e))))
        for e in exact
    ]
    assert made.acceptance["predicted"] == pytest.approx(sum(own) / len(own), rel=1e-5)
    unknown = accept(dataclasses.replace(under(GOOD), norm=None), gradients, UPDATES)
    assert unknown.acceptance is not None
    assert unknown.acceptance["predicted"] == pytest.approx(predicted)
    made.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert again.accepted and "accepted: peak" in again.explain()


def test_a_bad_plan_is_rejected():
    made = accept(under(BAD), gradients, UPDATES)
    assert made.accepted is False and made.acceptance is not None
    assert made.acceptance["error"] > 0.015
    assert "mean gradient error" in made.acceptance["reason"]
    large = accept(under(GOOD), gradients, UPDATES, peak=lambda policies: 10**12)
    assert large.accepted is False and large.acceptance is not None
    assert "exceeds the budget" in large.acceptance["reason"]
    with pytest.raises(ValueError, match="held out"):
        accept(under(GOOD), gradients, [])
    with pytest.raises(FloatingPointError, match="update 0 is not finite"):
        accept(under(GOOD), gradients, [UPDATES[0] * jnp.nan])


def test_names_that_do_not_pay_are_left_out():
    two = hl.Policy({**dict(GOOD.actions), "norm": hl.Store()})
    seconds = {two: 1e-6, GOOD: 1e-6, hl.Policy({"norm": hl.Store()}): 5e-6, hl.Policy({}): 6e-6}

    def entry(policy):
        return Entry(policy, 5, seconds[policy], 0, 0, 0.0)

    made = accept(under(two), gradients, UPDATES, entry=entry)
    assert made.policies == (GOOD,) * N and made.accepted and made.acceptance is not None
    assert made.acceptance["removed"] == (f"norm of [{two}]",)
    assert made.risk == pytest.approx(0.01 * 3**0.5)
    seconds[GOOD] = 2e-6  # now norm pays
    assert accept(under(two), gradients, UPDATES, entry=entry).policies == (two,) * N
