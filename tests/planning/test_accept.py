"""Acceptance: a good plan passes, a bad one does not, idle names go; plans with a calibration."""

import dataclasses
import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import hilore_jax as hl
from blocks import D, mlp, params, relative
from hilore_jax import tracing
from hilore_jax.planning.accept import accept
from hilore_jax.planning.calibration import Calibration, Measured, model_fingerprint
from hilore_jax.planning.device_memory import DevicePeak
from hilore_jax.planning.frontier import distortion
from hilore_jax.planning.leave_names import BlockView
from hilore_jax.planning.memory import Memory
from hilore_jax.planning.menu import Entry
from hilore_jax.planning.plan import Plan, Trial
from hilore_jax.planning.target import parse_target

N = 3
STACK = jax.tree.map(lambda *x: jnp.stack(x), *(params(seed=s) for s in range(N)))
UPDATES = [jax.random.normal(jax.random.key(s), (2, 64, D)) for s in (1, 2)]
INT8, INT4 = hl.Compress("int8", tile=None), hl.Compress("int4", tile=None)
GOOD = hl.Policy({"up": INT8})
BAD = hl.Policy({"up": INT4, "gate": INT4})
BLOCKS = hl.Blocks(mlp, (params(), UPDATES[0]), N)
TRACED = tracing.trace(mlp, *BLOCKS.args)
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
    large = accept(under(GOOD), gradients, UPDATES, memory=lambda policies: bytes_of(10**12))
    assert large.accepted is False and large.acceptance is not None
    assert "exceeds the budget" in large.acceptance["reason"]
    with pytest.raises(ValueError, match="held out"):
        accept(under(GOOD), gradients, [])
    with pytest.raises(FloatingPointError, match="update 0 is not finite"):
        accept(under(GOOD), gradients, [UPDATES[0] * jnp.nan])


def bytes_of(peak):
    return Memory(peak, 0, 0, 0, 0, 0)


def view(seconds):
    """Figures by hand, and the distortions of the block as it is traced."""

    def entry(policy):
        return Entry(policy, 5, seconds[policy], 0, 0, 0.0)

    return BlockView(entry, functools.partial(distortion, traced=TRACED))


def test_names_that_do_not_pay_are_left_out():
    two = hl.Policy({**dict(GOOD.actions), "norm": hl.Store()})
    seconds = {two: 1e-6, GOOD: 1e-6, hl.Policy({"norm": hl.Store()}): 5e-6, hl.Policy({}): 6e-6}
    memory = {(two,) * N: bytes_of(60), (GOOD,) * N: bytes_of(50)}
    options: Any = {"block": view(seconds), "memory": memory.__getitem__}
    made = accept(under(two), gradients, UPDATES, **options)
    assert made.policies == (GOOD,) * N and made.accepted and made.acceptance is not None
    assert made.acceptance["removed"] == (f"norm of [{two}]",)
    assert made.risk == pytest.approx(0.01 * 3**0.5)
    # Memory, prediction and trials are those of the plan that is left.
    assert made.memory == bytes_of(50) and made.acceptance["peak"] == 50
    before = under(two)
    kept, now = (sum(entry.nbytes for entry in plan.entries) for plan in (before, made))
    slope = (before.memory.peak - before.gc.peak) / kept
    assert before.share is not None
    low, high = before.gc.peak + slope * now, before.memory.peak + before.share * (now - kept)
    assert made.predicted == round(low if now <= kept else high) != before.predicted
    assert made.trials == (*before.trials, Trial(f"{N} x {GOOD}", made.predicted, 50, True))
    assert replace_of(made) == replace_of(before)
    seconds[GOOD] = 2e-6  # now norm pays
    stays = accept(under(two), gradients, UPDATES, **options)
    assert (stays.policies, stays.memory) == ((two,) * N, before.memory)
    with pytest.raises(ValueError, match=r"expected memory=\.\.\., found None"):
        accept(under(two), gradients, UPDATES, block=view(seconds))


def replace_of(made):
    """What leaving a name out does not change."""
    same = {"target", "risk_budget", "budget", "baseline", "gc", "bound_seconds", "norm"}
    return {name: getattr(made, name) for name in same}


def test_what_is_left_is_tried_again_before_it_takes_the_plans_place(caplog):
    two = hl.Policy({**dict(GOOD.actions), "norm": hl.Store()})
    seconds = {two: 2e-6, GOOD: 1e-6, hl.Policy({"norm": hl.Store()}): 5e-6, hl.Policy({}): 6e-6}
    short = (GOOD,) * N

    def judged(peak=50, error=1.0):
        """The plan that is left has another peak, or another error."""

        def worse(policies, x):
            grads, exposures = gradients(policies, x)
            factor = error if policies == short else 1.0
            return jax.tree.map(lambda g: factor * g, grads), exposures

        memory = lambda policies: bytes_of(peak if policies == short else 60)  # noqa: E731
        return accept(under(two), worse, UPDATES, block=view(seconds), memory=memory)

    assert judged().policies == short  # witness
    for made in (judged(peak=10**12), judged(error=1.5)):
        assert made.accepted and made.policies == (two,) * N and made.acceptance is not None
        assert made.acceptance["removed"] == () and made.acceptance["peak"] == 60
        assert made.memory == under(two).memory and made.trials == under(two).trials
        assert made.acceptance["error"] < 0.015
    assert "what does not pay stays in the plan: its peak of 1,000,000,000,000" in caplog.text
    assert "what does not pay stays in the plan: its mean gradient error of 0." in caplog.text


@pytest.mark.parametrize(
    ("spare", "reached", "text"),
    [
        (0, True, r"bytes, compiled, and [0-9,]+ measured, mean"),
        (0, False, r"bytes, compiled, and at most [0-9,]+ measured, mean"),
        (-1, True, r"peak on the device, [0-9,]+ bytes measured, exceeds the budget"),
        (-1, False, r"is not known to keep the budget: the process used more before"),
    ],
)
def test_a_measured_peak_is_held_to_the_budget_too(spare, reached, text, tmp_path):
    plan = under(GOOD)
    counted = DevicePeak(plan.budget - spare, reached)
    made = accept(plan, gradients, UPDATES[:1], measured=lambda policies: counted)
    assert made.accepted is (spare == 0) and made.acceptance is not None
    assert made.acceptance["peak"] == plan.memory.peak < plan.budget
    assert made.acceptance["measured"] == counted.nbytes
    assert re.search(text, made.acceptance["reason"])
    made.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == made


def test_what_is_not_measured_is_said_to_be_compiled_only():
    for measured in (None, lambda policies: None):
        made = accept(under(GOOD), gradients, UPDATES[:1], measured=measured)
        assert made.accepted and made.acceptance is not None
        assert made.acceptance["measured"] is None
        assert "bytes, compiled only, mean" in made.acceptance["reason"]
