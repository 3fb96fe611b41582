"""The laddered update against the plain one, its bookkeeping, and what it never accepts."""

import dataclasses
import functools
import logging
import math
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import hilore_jax as hl
from hilore_jax.grpo import ratio_metrics
from hilore_jax.grpo.gradient_norm import next_ghat
from hilore_jax.models.restack import restack
from hilore_jax.planning.buckets import Buckets
from hilore_jax.planning.ladder import refined_segments
from hilore_jax.training.laddered import LadderedUpdate, one_bucket
from hilore_jax.training.step import init_state, make_actor_update, raise_if_nonfinite

GC = (hl.Policy({}),) * 2
INT8 = (hl.Policy({"mlp_gate": hl.Compress("int8"), "mlp_up": hl.Compress("int8")}),) * 2
MIXED = (INT8[0], GC[0])
NORM = 0.3  # the gradient norm at which edges were calibrated
OPTIONS: dict[str, Any] = {"clip": 0.2, "beta": 0.0, "temperature": 0.7, "max_grad_norm": 0.5}


def optimizer():
    return optax.adamw(1e-2, eps=1e-3, weight_decay=0.1)


@pytest.fixture(scope="module", autouse=True)
def compiled_sooner():
    """LLVM's optimizer off, as in `quick`; what is rematerialized stays so."""
    quick = hl.compiler_options() | {"xla_backend_optimization_level": 0}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hilore_jax.training.laddered.compiler_options", lambda: quick)
        yield


@pytest.fixture(scope="module")
def start(tiny):
    """Weights in stacks that suit every plan of the tests."""
    lengths = refined_segments([GC, INT8, MIXED])
    assert lengths == (1, 1)
    graphdef, state = init_state(restack(tiny(), lengths), optimizer(), jax.random.key(0), NORM)
    return types.SimpleNamespace(graphdef=graphdef, state=state)


@pytest.fixture(scope="module")
def plain(start, quick):
    update = make_actor_update(start.graphdef, optimizer(), **OPTIONS)
    jitted = quick(update, static_argnums=0)
    return lambda policies, data: jitted(policies, start.state, data)


@pytest.fixture(scope="module")
def ladders(start):
    """Laddered updates, each compiled once for all tests."""

    @functools.cache
    def made(kind):
        buckets, policies = {
            "one": lambda: one_bucket(INT8),
            "three": lambda: (
                Buckets((0.25, 0.5, math.inf), (0.01, 0.01, 0.0), norm=NORM),
                (INT8, MIXED, GC),
            ),
        }[kind]()
        return LadderedUpdate(start.graphdef, optimizer(), buckets, policies, **OPTIONS)

    def make(kind="one", skip=False, pack=False):
        laddered = made(kind)
        laddered.skip_rows, laddered.pack_by_exposure = skip, pack
        return laddered

    return make


def run(start, laddered, data, ghat=NORM):
    state = dataclasses.replace(start.state, ghat=jnp.float32(ghat))
    return laddered.update(jax.tree.map(jnp.copy, state), data)


def no_reference(batch, advantages=(1.0, -1.5, 0.5, -0.25), micro=2, scale=1.0):
    data = batch(micro=micro, reference=False)
    made = scale * np.asarray(advantages, np.float32).reshape(data.advantages.shape)
    return dataclasses.replace(data, advantages=jnp.asarray(made))


def moves(start, state):
    return jax.tree.map(jnp.subtract, state.params, start.state.params)


def assert_close(found, expected, tolerance=1e-5):
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        scale = max(float(jnp.max(jnp.abs(other))), 1e-6)
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerance * scale)


SHARED = ["loss", "grad_norm", "exposure", "n_tokens", "is_ratio/mean", "clip_ratio/region_mean"]


def test_one_bucket_equals_the_plain_update_with_the_same_policies(start, plain, ladders, batch):
    data = no_reference(batch)
    state, metrics = run(start, ladders("one"), data)
    expected, seen = plain(INT8, data)
    assert_close(moves(start, state), moves(start, expected), 1e-4)
    assert_close(state.opt_state, expected.opt_state, 1e-4)
    assert int(state.step) == 1 and metrics["rows_skipped"] == 0
    assert set(seen) <= set(metrics)
    for name in SHARED:
        np.testing.assert_allclose(metrics[name], seen[name], rtol=1e-5, err_msg=name)
    np.testing.assert_allclose(metrics["micro_exposure"].sum(), seen["exposure"], rtol=1e-6)
    assert "risk_used" not in metrics  # no risk is known of a policy that was not planned
    # Witness: under another policy the gradient differs by more than the tolerance.
    exact, _ = plain(GC, data)
    with pytest.raises(AssertionError):
        assert_close(moves(start, state), moves(start, exact), 1e-4)


def test_microbatches_take_the_bucket_of_their_exposure(start, plain, ladders, batch):
    laddered = ladders("three")
    exposures = []
    for scale, hits in ((0.01, [2, 0, 0]), (100.0, [0, 0, 2]), (0.01, [2, 0, 0])):
        data = no_reference(batch, scale=scale)
        state, metrics = run(start, laddered, data)
        found = [metrics[f"ladder_hits/{edge}"] for edge in ("0.25", "0.5", "inf")]
        assert found == hits
        assert metrics["risk_used"] <= metrics["risk_budget"] == pytest.approx(0.015)
        expected, seen = plain(INT8 if scale < 1 else GC, data)
        assert_close(moves(start, state), moves(start, expected), 1e-4)
        np.testing.assert_allclose(metrics["grad_norm"], seen["grad_norm"], rtol=1e-5)
        exposures.append(metrics["micro_exposure"])
    np.testing.assert_array_equal(exposures[0], exposures[2])
    assert laddered.n_traces <= 3


def test_half_the_norm_allows_what_was_allowed_at_twice_the_exposure(start, ladders, batch):
    laddered, seen = ladders("three"), set()
    for scale in (0.3, 0.6, 1.2, 2.4):
        data = no_reference(batch, scale=scale)
        state, found = run(start, laddered, data, NORM / 2)
        _, same = run(start, laddered, no_reference(batch, scale=2 * scale))
        hits = [int(found[f"ladder_hits/{edge}"]) for edge in ("0.25", "0.5", "inf")]
        assert hits == [int(same[f"ladder_hits/{edge}"]) for edge in ("0.25", "0.5", "inf")]
        assert found["ladder_redo"] == same["ladder_redo"]
        np.testing.assert_allclose(found["risk_used"], same["risk_used"], rtol=1e-5)
        np.testing.assert_allclose(2 * found["micro_exposure"], same["micro_exposure"], rtol=1e-5)
        assert found["grad_norm_ema"] == np.float32(NORM / 2)
        np.testing.assert_array_equal(state.ghat, next_ghat(NORM / 2, found["grad_norm"]))
        seen.add(tuple(hits))
    assert len(seen) > 1 and laddered.n_traces <= 3


def test_a_microbatch_above_its_bucket_is_done_again_before_it_counts(
    start, plain, ladders, batch, monkeypatch
):
    laddered = ladders("three")
    data = no_reference(batch, scale=100.0)
    look = laddered._look

    def wrong(batch):  # as if nothing mattered
        estimate, dead, tokens = look(batch)
        return 0 * estimate, dead, tokens

    monkeypatch.setattr(laddered, "_look", wrong)
    state, metrics = run(start, laddered, data)
    assert metrics["ladder_redo"] == 2
    assert [metrics[f"ladder_hits/{edge}"] for edge in ("0.25", "0.5", "inf")] == [0, 0, 2]
    expected, seen = plain(GC, data)
    assert_close(moves(start, state), moves(start, expected), 1e-4)
    np.testing.assert_allclose(metrics["exposure"], seen["exposure"], rtol=1e-5)
    np.testing.assert_allclose(metrics["loss"], seen["loss"], rtol=1e-5)


def test_the_first_choice_leaves_room_for_what_a_clipped_ratio_may_become(start, ladders, batch):
    laddered = ladders("three")
    data = no_reference(batch, (-1.0,) * 4)
    mask = np.asarray(data.completion_mask)
    counts, total = mask.sum(axis=(1, 2)), int(mask.sum())
    # Log-probs of the policy at hand, read off ratios that no clipping cuts: A < 0, and large.
    apart = dataclasses.replace(data, logp_old=jnp.full_like(data.logp_old, -12.0))
    ratio = np.abs(run(start, laddered, apart)[1]["omega"]) * total
    assert ratio[mask].min() > 1
    logp = np.where(mask, np.log(np.where(mask, ratio, 1.0)) - 12.0, 0.0)
    # Every ratio is 1.1, within the margin of 0.2, and the sum of |A| just below the first edge:
    # the exact exposure is above it.
    limits = np.array([laddered.buckets.limit(0, int(count), total) for count in counts])
    calm = dataclasses.replace(
        data,
        logp_old=jnp.asarray(logp - np.log(1.1), jnp.float32),
        advantages=jnp.asarray((-0.96 * limits * total / counts)[:, None] * np.ones((2, 2)), "f"),
    )
    _, metrics = run(start, laddered, calm)
    np.testing.assert_allclose(metrics["micro_exposure"], 1.1 * 0.96 * limits, rtol=1e-4)
    assert metrics["ladder_redo"] == 0
    assert [metrics[f"ladder_hits/{edge}"] for edge in ("0.25", "0.5", "inf")] == [0, 2, 0]


@pytest.mark.parametrize("pack", [False, True])
def test_rows_of_zero_advantage_change_nothing_when_left_out(start, plain, ladders, batch, pack):
    data = no_reference(batch, (0.0, -1.5, 0.0, 2.5), micro=4)
    state, metrics = run(start, ladders("one", True, pack), data)
    expected, seen = plain(INT8, data)
    assert metrics["rows_skipped"] == 2 and len(metrics["micro_exposure"]) == 2
    assert_close(moves(start, state), moves(start, expected), 1e-4)
    for name in ("loss", "grad_norm", "exposure", "n_tokens"):
        np.testing.assert_allclose(metrics[name], seen[name], rtol=1e-5, err_msg=name)
    # Witness: without their tokens in N the gradient would be larger.
    counts = np.asarray(data.completion_mask).sum(axis=(1, 2))
    assert counts.sum() > counts[[1, 3]].sum()


def test_skipped_rows_keep_their_part_of_the_risk_budget(start, ladders, batch):
    data = no_reference(batch, (0.0, -1.5, 0.5, -0.25), scale=0.01)
    tokens = np.asarray(data.completion_mask).sum(axis=-1).reshape(-1)
    _, metrics = run(start, ladders("three", True), data)
    assert metrics["rows_skipped"] == 1
    expected = 0.015 * math.sqrt(tokens[1:].sum() / tokens.sum())
    assert metrics["risk_budget"] == pytest.approx(expected) and expected < 0.013


def test_packing_sorts_rows_into_full_microbatches_and_keeps_the_update(
    start, plain, ladders, batch
):
    data = no_reference(batch, (3.0, -0.1, 2.0, 0.0))
    laddered = ladders("one", True, True)
    state, metrics = run(start, laddered, data)
    expected, seen = plain(INT8, data)
    assert_close(moves(start, state), moves(start, expected), 1e-4)
    np.testing.assert_allclose(metrics["loss"], seen["loss"], rtol=1e-5)
    assert metrics["rows_skipped"] == 1
    low, high = metrics["micro_exposure"]
    # Rows 1 and 2 (sums 0.1, 6) lie together, row 0 (12) alone: not as they came.
    assert low < high
    # Coefficients lie where their rows came from, and places say where these were put.
    assert metrics["micro_of_row"].tolist() == [1, 0, 0, -1]
    np.testing.assert_allclose(metrics["omega"], seen["omega"], rtol=1e-5)
    of_row = np.abs(seen["omega"]).sum(axis=-1).reshape(-1)
    np.testing.assert_allclose(low, of_row[1] + of_row[2], rtol=1e-5)
    np.testing.assert_allclose(high, of_row[0], rtol=1e-5)
    unpacked = run(start, ladders("one", True), data)[1]["micro_exposure"]
    assert unpacked[0] > unpacked[1]


def test_an_update_of_dead_rows_moves_nothing_and_says_so(start, ladders, batch, caplog):
    data = no_reference(batch, (0.0, 0.0, 0.0, 0.0))
    laddered = ladders("one", True, False)
    state, _ = run(start, laddered, no_reference(batch))
    before, ghat = jax.tree.map(np.asarray, (state.params, state.opt_state)), np.asarray(state.ghat)
    with caplog.at_level(logging.WARNING, logger="hilore_jax"):
        state, metrics = laddered.update(state, data)
    assert "no row of this update can move the policy" in caplog.text
    jax.tree.map(np.testing.assert_array_equal, (state.params, state.opt_state), before)
    assert int(state.step) == 2 and state.ghat == ghat != np.float32(NORM)
    assert (metrics["rows_skipped"], metrics["n_tokens"]) == (4, 10)
    for name in ("loss", "grad_norm", "exposure", "nonfinite", "is_ratio/mean"):
        assert float(metrics[name]) == 0.0, name
    # Witness: momentum and decay would have moved the parameters.
    moved, _ = ladders("one").update(state, data)
    assert any(
        np.any(np.asarray(a) != b)
        for a, b in zip(jax.tree.leaves(moved.params), jax.tree.leaves(before[0]), strict=True)
    )


@pytest.mark.parametrize("kind", ["one", "three"])
@pytest.mark.parametrize("field", ["logp_old", "advantages"])
def test_a_bad_number_leaves_the_state_and_is_named_where_it_came_from(
    start, ladders, batch, kind, field
):
    data = no_reference(batch, (0.0, -1.5, 0.5, -0.25))
    index = (1, 0) if field == "advantages" else (1, 0, 2)
    data = dataclasses.replace(data, **{field: getattr(data, field).at[index].set(jnp.nan)})
    state, metrics = run(start, ladders(kind, kind == "one", kind == "one"), data)
    jax.tree.map(np.testing.assert_array_equal, state.params, start.state.params)
    assert (int(metrics["nonfinite"]), int(state.step)) == (1, 0)
    assert state.ghat == np.float32(NORM)
    with pytest.raises(FloatingPointError, match=r"row 2 .*microbatch 1, row 0"):
        raise_if_nonfinite(metrics, data)


def test_a_thousand_jumps_trace_each_bucket_once_and_keep_every_budget(start, batch, monkeypatch):
    """A tiny loss stands in for the model: what is tested is the choice, not the gradient."""
    rng = np.random.default_rng(0)
    edges = (*(2.0**i for i in range(-3, 4)), math.inf)
    risks = (*[0.014] * (len(edges) - 1), 0.0)
    buckets = Buckets(edges, risks, norm=NORM)
    policies = tuple((hl.Policy({f"n{i}": hl.Store()}),) for i in range(len(edges)))
    laddered = LadderedUpdate(start.graphdef, optimizer(), buckets, policies, **OPTIONS)
    traced = []

    def gradients(policies, params, frozen, micro, update_tokens):
        traced.append(policies)
        # What is exact is up to four times the estimate, so that many have to be done again.
        factor = micro.tokens[0, 0].astype(jnp.float32) / 2
        omega = jnp.abs(micro.advantages[:, None]) * micro.completion_mask / update_tokens
        total = factor * jnp.sum(omega)
        rung = float(policies[0].names(hl.Store)[0][1:])
        grads = jax.tree.map(lambda p: jnp.full(p.shape, rung), params)
        seen = {
            "loss": total,
            "exposure": total,
            "entropy": None,
            "bad": micro.completion_mask & False,
            "omega": omega,
        }
        ratios = ratio_metrics(
            micro.logp_old, micro.logp_old, None, micro.advantages, micro.completion_mask
        )
        return grads, {**seen, "ratios": ratios}

    laddered._gradients = gradients
    average = jax.jit(next_ghat)

    def finish(state, total, seen):
        moved = dataclasses.replace(state, ghat=average(state.ghat, norm))
        return moved, {"total": total, "nonfinite": 0}

    monkeypatch.setattr(laddered, "_finish", finish)
    state = dataclasses.replace(start.state, params=nnx.State({"w": jnp.zeros(2)}))
    data = no_reference(batch)
    width = data.completion_mask.shape[-1]
    full = np.ones((1, 2, width), bool)
    redone = hits = 0
    norm, lowest, highest = NORM, NORM, NORM
    for _ in range(1000):
        norm *= math.exp(rng.normal() * 0.2) * (NORM / norm) ** 0.02  # wanders, and comes back
        factors = rng.integers(1, 9, (2, 2, 1)).astype(np.int32)
        tokens = np.concatenate([factors, np.asarray(data.tokens)[..., 1:]], axis=-1)
        mask = np.asarray(data.attention_mask).copy()
        mask[...] = True
        made = dataclasses.replace(
            data,
            tokens=tokens,
            attention_mask=mask,
            completion_mask=np.concatenate([full, rng.random((1, 2, width)) < 0.5]),
            advantages=(rng.normal(size=(2, 2)) * 10 ** rng.uniform(-2, 2, (2, 1))).astype(
                np.float32
            ),
        )
        assert state.ghat is not None
        ghat = float(state.ghat)
        lowest, highest = min(lowest, ghat), max(highest, ghat)
        state, metrics = laddered.update(state, made)
        assert float(metrics["grad_norm_ema"]) == ghat
        update_tokens = made.completion_mask.sum()
        counts = made.completion_mask.sum(axis=(1, 2))
        names = [float(n) for n in edges for _ in range(int(metrics[f"ladder_hits/{n:g}"]))]
        assert len(names) == 2
        assert metrics["risk_used"] <= metrics["risk_budget"] * (1 + 1e-6)
        # The gradients that were added name their buckets: each is allowed its exposure.
        added = sorted([edges.index(n) for n in names])
        assert float(metrics["total"]["w"][0]) == sum(added)
        for exposure, count in zip(metrics["micro_exposure"], counts, strict=True):
            # As much as a calibrated exposure that is smaller by what the norm has grown.
            calibrated = float(exposure) * float(np.float32(NORM)) / ghat
            least = buckets.select(calibrated / (1 + 1e-12), int(count), int(update_tokens))
            risk = buckets.risk(max(added), calibrated)
            assert max(added) >= least
            assert risk <= buckets.allowed(int(count), int(update_tokens)) * (1 + 1e-6)
        redone += int(metrics["ladder_redo"])
        hits += 2
    assert redone > 100 and hits == 2000
    assert len(traced) == len(set(traced)) == laddered.n_traces <= len(edges)
    assert laddered.n_traces >= 6
    assert lowest < NORM / 2 and highest > 2 * NORM
