"""Calibration: fits by hand, interventions against static policies, one executable, its file."""

import dataclasses
import functools
import json
import logging
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import hilore_jax as hl
from blocks import D, mlp, params, relative
from hilore_jax import codecs
from hilore_jax.intervene import Interventions, decoded_errors
from hilore_jax.planning import calibrate as module
from hilore_jax.planning.calibrated import calibrated_menu
from hilore_jax.planning.calibration import Calibration, Measured, model_fingerprint
from hilore_jax.planning.fits import Row, additive_spread, factors, fitted, joint_bias
from hilore_jax.planning.frontier import distortion, frontier
from hilore_jax.planning.measurements import row_of
from hilore_jax.planning.menu import Entry
from hilore_jax.tracing import trace
from planner_blocks import Device

N, M = 3, 4
INT8 = hl.Compress("int8", tile=None)
UP = hl.Policy({"up": INT8})
BOTH = hl.Policy({"gate": hl.Compress("int4", tile=4), "up": INT8})
ENTRIES = (UP, BOTH)
STACK = jax.tree.map(lambda *x: jnp.stack(x), *(params(seed=s) for s in range(N)))
DATA = [jax.random.normal(jax.random.key(10 + m), (2, 5, D)) * (1 + m / 3) for m in range(M)]
BLOCKS = hl.Blocks(mlp, (params(), DATA[0]), N)
EXACT = hl.Policy(default=hl.Store())


def loss(policies, stack, x):
    y = hl.scan_blocks(mlp, stack, x, policies)
    return jnp.mean(jnp.sin(y)), jnp.mean(jnp.abs(x))


def gradient(policies, x):
    return jax.jit(jax.grad(lambda p: loss(policies, p, x)[0]))(STACK)


@functools.cache
def calibrated(form="squared", passes=40):
    return hl.calibrate(
        loss,
        STACK,
        DATA,
        blocks=BLOCKS,
        policies=[hl.Policy({}), *ENTRIES],
        count=M,
        per_update=2,
        passes=passes,
        risk=form,
    )


@functools.cache
def intervene():
    def found(index, x):
        def objective(stack, token):
            return loss(Interventions(ENTRIES, index, token), stack, x)[0]

        return jax.grad(objective, argnums=(0, 1))(STACK, jnp.zeros((N, 2)))

    return jax.jit(found)


@pytest.mark.parametrize("index", [(0, 0, 0), (0, 1, 0), (2, 0, 0), (2, 1, 2)])
def test_an_intervention_is_the_static_policy_on_its_block_and_exact_elsewhere(index):
    static = tuple((EXACT, *ENTRIES)[i] for i in index)
    grads, errors = intervene()(jnp.array(index), DATA[1])
    expected, exact = gradient(static, DATA[1]), gradient((EXACT,) * N, DATA[1])
    assert relative(grads, expected) < 2e-6
    if any(index):
        assert relative(exact, expected) > 1e-4
    # Gradients of the blocks above the last intervention, which backward reaches first.
    above = max((b + 1 for b in range(N) if index[b]), default=0)
    later = [jax.tree.map(lambda a: a[above:], tree) for tree in (grads, exact)]
    if above < N:
        assert relative(*later) < 2e-6
    assert [float(e) > 0 for e in errors[:, 0]] == [i > 0 for i in index]


def test_an_intervention_in_segments_and_with_aux():
    def block(p, x):
        y = mlp(p, x)
        return y, jnp.sum(y)

    cut = tuple(jax.tree.map(lambda a, s=s: a[s], STACK) for s in (slice(0, 1), slice(1, N)))
    chosen = Interventions(ENTRIES, jnp.array([0, 1, 2]), jnp.zeros((N, 2)))
    y, aux = hl.scan_blocks(block, cut, DATA[0], chosen)
    wanted, whole = hl.scan_blocks(block, STACK, DATA[0], (EXACT,) * N)
    np.testing.assert_allclose(y, wanted, rtol=1e-6)
    np.testing.assert_allclose(aux, whole, rtol=1e-6)
    with pytest.raises(ValueError, match="3 interventions for 1 blocks"):
        hl.scan_blocks(mlp, cut[0], DATA[0], chosen)


def test_a_unit_measured_on_one_microbatch_does_not_take_on_its_factor():
    random = np.random.default_rng(0)
    true, own = {}, np.exp(random.normal(0, 0.5, 8))
    rows = [Row(m, (), 0.5 + m, 0.0, 1.0, ()) for m in range(8)]
    for unit in range(4 * 12):
        entry, block, micro = 1 + unit // 12, unit % 12, (unit + unit // 12) % 8
        true[entry, block] = entry * (1 + block / 4)
        x = (0.5 + micro) * 0.01
        distance = true[entry, block] * x * own[micro]
        rows.append(Row(micro, ((block, entry),), 0.5 + micro, distance, 1.0, ((0.01, 0.01),)))
    entries = [hl.Policy({"up": hl.Compress("int8", tile=t)}) for t in (4, 8, 16, 32)]
    squares = (0.5 + np.arange(8)) ** 2
    scale = np.sqrt(np.sum(squares * own**2) / np.sum(squares))
    assert list(factors(rows).values()) == pytest.approx(list(own / scale))
    for made in fitted(rows, entries):
        wanted = true[entries.index(made.policy) + 1, made.block] * scale
        assert made.kappa == pytest.approx(wanted) and made.kappa_error < 1e-6
    # Without a second look at each unknown there is nothing to tell a factor from a kappa.
    assert factors(rows[: 8 + 12]) == {}
    raw = [row.distance / (row.exposure * 0.01) for row in rows[8:]]
    assert np.std(np.log(np.array(raw) / list(true.values()))) > 0.2


def test_decoded_errors_against_numpy():
    x = np.array([[1.0, -0.3, 0.26], [0.1, 2.0, 0.7]], np.float32)

    def block(x):
        return checkpoint_name(x, "a") + checkpoint_name(2 * x, "b")

    policy = hl.Policy({"a": hl.Compress("int8", tile=None), "b": hl.Store()})
    own, paper = decoded_errors(policy, block, jnp.asarray(x))
    decoded = np.asarray(codecs.round_trip(jnp.asarray(x), "int8", axis=-1, tile=None))
    gap = np.linalg.norm(decoded - x)
    assert own == pytest.approx(gap / np.linalg.norm(x), rel=1e-5) and own > 1e-4
    both = math.hypot(np.linalg.norm(x), np.linalg.norm(2 * x))
    assert paper == pytest.approx(gap / (both + 1e-8), rel=1e-5)


def test_kappa_by_hand():
    one = lambda m, e, d, E: Row(m, ((0, 1),), E, d, 1.0, ((e, e / 2),))  # noqa: E731
    exact = [Row(m, (), E, 0.0, g, ()) for m, E, g in ((0, 2.0, 4.0), (1, 1.0, 2.0))]
    rows = [*exact, one(0, 0.1, 0.5, 2.0), one(1, 0.2, 0.4, 1.0)]
    # x = E e = 0.2, 0.2; d = 0.5, 0.4: kappa = (0.1 + 0.08) / (0.04 + 0.04).
    (made,) = fitted(rows, [UP])
    assert made.kappa == pytest.approx(2.25) and made.error == pytest.approx(0.15)
    # Residuals 0.05 and -0.05 of one degree of freedom: sqrt(0.005 / 0.08).
    assert made.kappa_error == pytest.approx(0.25) and made.count == 2
    # The paper: x = E e' = 0.1, 0.1; y = d / ||g|| = 0.125, 0.2.
    (paper,) = fitted(rows, [UP], "paper")
    assert paper.kappa == pytest.approx(1.625) and paper.error == pytest.approx(0.075)
    assert not math.isfinite(fitted([*exact, one(0, 0.1, math.inf, 2.0)], [UP])[0].kappa)


def test_standard_error_of_units_measured_once():
    kappas = {(p, b): math.exp(p + b / 3) for p in (1, 2) for b in range(4)}
    assert additive_spread(kappas) == pytest.approx(0, abs=1e-9)
    kappas[1, 0] *= math.exp(0.4)  # its share of the residual: 0.4^2 * (1 - 1/2)(1 - 1/4) / 3
    assert additive_spread(kappas) == pytest.approx(math.sqrt(0.16 * 0.375 / 3))
    assert additive_spread({(1, 0): 2.0}) == math.inf


def test_joint_policies_add_as_squares_or_linearly():
    fits = [Measured(UP, b, k, 0.0, 0.1, 1) for b, k in ((0, 3.0), (1, 4.0))]
    rows = [
        Row(0, (), 2.0, 0.0, 5.0, ()),
        Row(0, ((0, 1), (1, 1)), 2.0, 1.2, 5.0, ((0.1, 0.1),) * 2),
    ]
    assert joint_bias(rows, fits, [UP]) == (pytest.approx(1.2), ((1.0, 1.2),))
    bias, pairs = joint_bias(rows, fits, [UP], "paper")
    assert pairs == ((pytest.approx(1.4), pytest.approx(0.24)),)
    assert bias == pytest.approx(0.24 / 1.4)


def test_a_joint_policy_has_the_factor_of_its_microbatch():
    units = [(m, b, p) for m in range(4) for b in range(4) for p in (1, 2)]
    rows = [Row(m, (), 1.0, 0.0, 9.0, ()) for m in range(4)]
    rows += [Row(m, ((b, p),), 1.0, (m + 1.0) * p, 9.0, ((1.0, 1.0),)) for m, b, p in units]
    # Twice what both blocks do alone, on the microbatch of factor 4 (and of factor 1).
    rows += [Row(m, ((0, 1), (1, 2)), 1.0, 2 * (m + 1) * 5**0.5, 9.0, ()) for m in (0, 3)]
    entries = [UP, BOTH]
    bias, pairs = joint_bias(rows, fitted(rows, entries), entries)
    assert bias == pytest.approx(2.0)
    assert pairs[1][0] == pytest.approx(4 * pairs[0][0])


def test_calibration_of_a_model_against_isolated_gradients():
    made = calibrated()
    assert [(m.policy, m.block) for m in made.measured] == [
        (p, b) for p in ENTRIES for b in range(N)
    ]
    units = [(p, b) for p in ENTRIES for b in range(N)]
    exact = [gradient((EXACT,) * N, x) for x in DATA]
    norm = lambda t: math.sqrt(sum(float(jnp.sum(a**2)) for a in jax.tree.leaves(t)))  # noqa: E731
    for u in (0, 4):
        policy, block = units[u]
        m = (u + u // N) % M
        static = tuple(policy if b == block else EXACT for b in range(N))
        d = norm(jax.tree.map(jnp.subtract, gradient(static, DATA[m]), exact[m]))
        exposure = float(jnp.mean(jnp.abs(DATA[m])))
        assert made.measured[u].kappa * made.measured[u].error * exposure == pytest.approx(
            d, rel=1e-3
        )
        risk = made.bias * d / made.norm
        assert made.risk(policy, block, exposure) == pytest.approx(risk, rel=1e-3)
        assert made.risk(policy, block, 2 * exposure) == pytest.approx(2 * risk, rel=1e-3)
    # Two updates of two microbatches each.
    updates = [norm(jax.tree.map(jnp.add, *exact[i : i + 2])) for i in (0, 2)]
    assert made.norm == pytest.approx(sum(updates) / 2, rel=1e-5)
    assert made.exposures == pytest.approx([float(jnp.mean(jnp.abs(x))) for x in DATA])
    assert 0.5 < made.bias < 2 and len(made.joint) > 4
    assert made.passes == M + len(units) + len(made.joint)


def test_one_executable_measures_everything():
    traces = []

    def counted(policies, stack, x):
        traces.append(type(policies))
        return loss(policies, stack, x)

    made = hl.calibrate(
        counted, STACK, DATA, blocks=BLOCKS, policies=ENTRIES, count=M, passes=40, risk="paper"
    )
    assert traces == [Interventions] and made.compilations == 2 and made.passes > 12
    assert made.form == "paper" and made.risk(UP, 0, 0.0) == 0.0
    first = made.measured[0]
    assert made.risk(UP, 0, 0.7) == pytest.approx(made.bias * first.kappa * first.error * 0.7)


def test_an_interrupted_calibration_goes_on(tmp_path, monkeypatch):
    full, calls, limit = calibrated(), [], [11]

    class Stopping(module._Probe):
        def __call__(self, *args, **kwargs):
            calls.append(1)
            if len(calls) > limit[0]:
                raise KeyboardInterrupt
            return super().__call__(*args, **kwargs)

    monkeypatch.setattr(module, "_Probe", Stopping)
    call = functools.partial(
        hl.calibrate, loss, STACK, blocks=BLOCKS, policies=ENTRIES, resume=tmp_path / "part.json"
    )
    with pytest.raises(KeyboardInterrupt):
        call(DATA, count=M, per_update=2, passes=40)
    calls.clear()
    limit[0] = 1000
    before = json.loads((tmp_path / "part.json").read_text())["seconds"]
    made = call(DATA, count=M, per_update=2, passes=40)
    assert made.seconds > before > 0  # what the interrupted call took counts too
    # Only the exact gradients are computed again, one a microbatch, and what was under way.
    assert len(calls) <= full.passes - 11 + 1 + M
    assert [m.kappa for m in made.measured] == pytest.approx([m.kappa for m in full.measured])
    assert (made.norm, made.bias) == (pytest.approx(full.norm), pytest.approx(full.bias))
    with pytest.raises(ValueError, match="measurements of another calibration"):
        call(DATA[:2], count=2, passes=40)


def scaled(policies, stack, batch, scale, key, by=1.0):
    value, exposure = loss(policies, stack, batch["x"])
    return by * scale * value + 0 * jax.random.uniform(key), exposure


def resumed(path, fn=scaled, stack=STACK, scale=1.0, seed=0, data=DATA[:2], tokens=3, policy=UP):
    args = (jnp.array(scale), jax.random.key(seed))
    how = {"blocks": BLOCKS, "policies": [policy], "count": 2, "passes": 5, "args": args}
    batches = [{"x": x, "tokens": jnp.array(tokens)} for x in data]
    return hl.calibrate(fn, stack, batches, resume=path, **how)


def test_measurements_go_on_only_with_the_values_and_the_loss_they_were_made_with(
    tmp_path, monkeypatch
):
    call = functools.partial(resumed, tmp_path / "part.json")
    made = call()
    kept = (tmp_path / "part.json").read_text()
    other = jax.tree.map(lambda w: w.at[0, 0].add(1e-6), STACK)
    changes: tuple[dict[str, Any], ...] = (
        {"stack": other},
        {"scale": 2.0},
        {"seed": 1},
        {"data": DATA[2:]},
        {"data": DATA[1::-1]},
        {"tokens": 4},
    )
    for changed in changes:
        with pytest.raises(ValueError, match="other weights, arguments of the loss or microbatch"):
            call(**changed)
    # A loss whose exact gradients are the same but for rounding.
    with pytest.raises(ValueError, match=r"measurements of another loss: its traced program"):
        call(functools.partial(scaled, by=1 + 1e-6))
    with monkeypatch.context() as patch:
        patch.setattr("hilore_jax.planning.schedule.library_version", lambda: "0.0+0")
        with pytest.raises(ValueError, match=r"another calibration .*version of jax or hilore_jax"):
            call()
    assert (tmp_path / "part.json").read_text() == kept
    # Sampled again: what is computed of the samples differs in the last bit.
    again = call(data=[np.nextafter(x, np.float32(9)) for x in DATA[:2]])
    assert again.measured == made.measured and again.seconds > made.seconds
    body = json.loads(kept)
    body["rows"][0][2] *= 1.05
    (tmp_path / "part.json").write_text(json.dumps(body))
    with pytest.raises(ValueError, match=r"exact gradient of microbatch 0.*the loss is another"):
        call()


@dataclasses.dataclass(frozen=True)
class Halves(codecs.Codec):
    """A user's own: whole and half steps."""

    steps: int = 2

    def quantize(self, x):
        """See `Codec.quantize`."""
        return jnp.round(jnp.clip(x, -self.limit, self.limit) * self.steps).astype(self.dtype)

    def dequantize(self, payload, shape):
        """See `Codec.dequantize`."""
        return payload.astype(jnp.float32) / self.steps


def test_a_users_own_codec_is_calibrated_and_goes_on(tmp_path):
    def policy(**how):
        codec = Halves("int8", "int8", 63.0, False, **how)  # not to be taken for the built-in one
        return hl.Policy({"up": hl.Compress(codec, tile=None)})

    path = tmp_path / "part.json"
    made = resumed(path, policy=policy())
    assert made.policies == (policy(),) and made.risk(policy(), 0, 0.5) > 0
    assert resumed(None, policy=policy()).measured == made.measured
    assert resumed(path, policy=policy()).measured == made.measured
    for other in (policy(steps=1), UP):
        with pytest.raises(ValueError, match="measurements of another loss"):
            resumed(path, policy=other)


def test_bad_input():
    call = functools.partial(hl.calibrate, loss, STACK, blocks=BLOCKS, passes=40)
    with pytest.raises(ValueError, match="was given 4 microbatches, expected 16"):
        call(DATA, policies=ENTRIES)
    with pytest.raises(ValueError, match=r"take 10 passes.*but passes=9"):
        hl.calibrate(loss, STACK, DATA, blocks=BLOCKS, policies=ENTRIES, count=4, passes=9)
    with pytest.raises(ValueError, match="0 policies that compress"):
        call(DATA, policies=[hl.Policy({})], count=4)
    with pytest.raises(ValueError, match="whole updates of per_update=3"):
        call(DATA, policies=ENTRIES, count=4, per_update=3)
    with pytest.raises(ValueError, match="microbatch 1 has exposure 0"):
        call([DATA[0], 0 * DATA[0]], policies=[UP], count=2)
    with pytest.raises(FloatingPointError, match="microbatch 1's exact gradient"):
        call([DATA[0], DATA[0] * jnp.nan], policies=[UP], count=2)


def test_a_measurement_that_is_not_finite_is_named_and_forbids_its_unit(caplog):
    found = module._Found(0.5, math.inf, 1.0, np.array([[0.0, 0.0], [0.1, 0.1], [0.0, 0.0]]))
    with caplog.at_level(logging.WARNING):
        row = row_of(7, [0, 2, 0], found, ENTRIES)
    (record,) = caplog.records
    assert f"microbatch 7 is not finite with block 1 under {BOTH}" in record.getMessage()
    (made,) = fitted([Row(7, (), 0.5, 0.0, 1.0, ()), row], ENTRIES)
    one = dataclasses.replace(calibrated(), measured=(made,))
    assert one.risk(BOTH, 1, 0.5) == math.inf


def test_its_file_and_other_shapes(tmp_path):
    made = dataclasses.replace(
        calibrated(), measured=(*calibrated().measured, Measured(UP, 7, math.inf, math.inf, 0.1, 1))
    )
    made.save(tmp_path / "c.json")
    again = Calibration.load(tmp_path / "c.json", model_fingerprint(BLOCKS))
    assert again == made and again.risk(UP, 7, 0.1) == math.inf
    assert "calibration of 3 blocks" in str(again)
    other = hl.Blocks(mlp, (params(f=20), DATA[0]), N)
    with pytest.raises(ValueError, match=r"another model shape.*activations.*Calibrate again"):
        Calibration.load(tmp_path / "c.json", model_fingerprint(other))
    (tmp_path / "bad.json").write_text("[]")
    with pytest.raises(ValueError, match="not a calibration file"):
        Calibration.load(tmp_path / "bad.json")
    for bad in (-1.0, math.nan):
        with pytest.raises(ValueError, match="exposure is"):
            made.risk(UP, 0, bad)


def test_menus_have_the_risk_of_the_same_distortion():
    traced = trace(mlp, *BLOCKS.args)
    stored = hl.Policy({"up": INT8, "gate": hl.Store()})
    breaks = hl.Policy({"up": INT8, "act": hl.Store()})
    assert distortion(UP, traced) == distortion(stored, traced) != distortion(breaks, traced)
    same = [gradient((p,) * N, DATA[0]) for p in (UP, stored, breaks)]
    assert relative(same[0], same[1]) < 1e-6 < 1e-4 < relative(same[0], same[2])
    unknown = hl.Policy({"gate": INT8})
    menu = tuple(
        Entry(p, n, 1.0, 0, 0, 0.1) for n, p in enumerate((hl.Policy({}), stored, unknown))
    )
    found, risks = calibrated_menu(menu, BLOCKS, Device(), calibrated(), 0.5)
    policies = [e.policy for e in found]
    assert unknown not in policies and {hl.Policy({}), stored, *ENTRIES} - {UP} <= set(policies)
    for b in range(N):
        assert risks[b][policies.index(stored)] == calibrated().risk(UP, b, 0.5) > 0
    assert found[policies.index(stored)].risk == max(r[policies.index(stored)] for r in risks)
    with pytest.raises(ValueError, match="measured none of the codecs"):
        calibrated_menu(menu, BLOCKS, Device(), calibrated(), 0.5, [hl.Compress("fp8_e5m2")])


def test_the_frontier_has_one_policy_a_distortion():
    stored = hl.Policy({"up": INT8, "gate": hl.Store()})
    policies = (hl.Policy({}), UP, stored, BOTH)
    menu = [Entry(p, n, 1.0, 0, 0, 0.01 * n) for n, p in enumerate(policies)]
    assert frontier(menu, mlp, *BLOCKS.args, risk=1.0) == (UP, BOTH)
    assert frontier(menu, mlp, *BLOCKS.args, risk=0.02) == (UP,)
    assert frontier(menu, mlp, *BLOCKS.args, risk=1.0, most=1) == (UP,)
