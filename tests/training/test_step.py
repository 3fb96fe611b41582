"""The actor update against a plain reference, and what must never move it."""

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

import hilore_jax as hl
from hilore_jax.models.decoder import segment
from hilore_jax.training.gradients import make_gradients
from hilore_jax.training.step import (
    TrainState,
    init_state,
    jit_update,
    make_actor_update,
    make_apply,
    make_score,
    raise_if_nonfinite,
)

CLIP, BETA, TEMPERATURE, MAX_NORM = 0.2, 0.05, 0.7, 0.5
GC = (hl.Policy({}),) * 2
STORE = (hl.Policy(default=hl.Store()),) * 2
INT8 = (hl.Policy({"mlp_gate": hl.Compress("int8"), "mlp_up": hl.Compress("int8")}),) * 2
OPTIONS: dict[str, Any] = {"clip": CLIP, "beta": BETA, "temperature": TEMPERATURE}


def optimizer():
    # A large eps keeps the first step a smooth function of the gradient: Adam's own would turn
    # rounding noise in a vanishing gradient into a full step.
    return optax.adamw(1e-2, eps=1e-3, weight_decay=0.1)


@pytest.fixture(scope="module")
def learner(tiny, quick):
    """The library's own jitted update, which counts its traces and donates, and jitted gradients.

    Compiled once for all tests: `update` copies the state that it gives away.
    """
    graphdef, state = init_state(segment(tiny(), GC), optimizer(), jax.random.key(0), norm=0.7)
    inner = make_actor_update(graphdef, optimizer(), max_grad_norm=MAX_NORM, **OPTIONS)
    traces = []

    def counted(*args):
        traces.append(1)
        return inner(*args)

    donating = jit_update(counted)
    return types.SimpleNamespace(
        graphdef=graphdef,
        state=state,
        traces=traces,
        donating=donating,
        update=lambda state, batch: donating(GC, jax.tree.map(jnp.copy, state), batch),
        gradients=quick(make_gradients(graphdef, **OPTIONS), static_argnums=0),
    )


@pytest.fixture(scope="module")
def lora_learner(tiny, quick):
    graphdef, state = init_state(tiny(lora=True), optimizer(), jax.random.key(0))
    update = make_actor_update(
        graphdef, optimizer(), max_grad_norm=MAX_NORM, entropy=True, **OPTIONS
    )
    jitted = quick(update, static_argnums=0)
    return types.SimpleNamespace(
        graphdef=graphdef, state=state, update=lambda state, batch: jitted(GC, state, batch)
    )


def plain_loss(params, graphdef, frozen, batch):
    """Whole logits, textbook formulas, all rows at once, no library code but the model's."""
    flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batch)
    model = nnx.merge(graphdef, params, frozen)
    logits = model.logits(flat.tokens, flat.attention_mask) / TEMPERATURE
    width = flat.completion_mask.shape[-1]
    logp = jnp.take_along_axis(
        jax.nn.log_softmax(logits)[:, -width - 1 : -1], flat.tokens[:, -width:, None], axis=-1
    )[..., 0]
    ratio = jnp.exp(logp - flat.logp_old)
    a = flat.advantages[:, None]
    terms = -jnp.minimum(ratio * a, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * a)
    gap = flat.logp_ref - logp
    terms = terms + BETA * (jnp.exp(gap) - gap - 1)
    return jnp.sum(jnp.where(flat.completion_mask, terms, 0)) / jnp.sum(flat.completion_mask)


def assert_close(found, expected, tolerance=2e-5):
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        scale = max(float(jnp.max(jnp.abs(other))), 1e-6)
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerance * scale)


def assert_equal(found, expected):
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


@pytest.mark.parametrize("name", ["learner", "lora_learner"])
def test_update_equals_the_plain_reference(request, batch, quick, name):
    one = request.getfixturevalue(name)
    state, data = one.state, batch(micro=2)

    def reference(state, data):
        loss, grads = jax.value_and_grad(plain_loss)(state.params, one.graphdef, state.frozen, data)
        norm = optax.tree.norm(grads)
        scaled = jax.tree.map(lambda g: g * MAX_NORM / norm, grads)
        step, opt_state = optimizer().update(scaled, state.opt_state, state.params)
        return loss, norm, step, opt_state

    loss, norm, step, opt_state = quick(reference)(state, data)
    assert norm > MAX_NORM  # else the clipping would go untested
    new, metrics = one.update(state, data)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-5)
    # Rounding of two programs in float32, in gradients that nearly cancel: it differs by machine.
    assert_close(new.opt_state, opt_state, 5e-4)
    expected = optax.apply_updates(state.params, step)
    moves = jax.tree.map(jnp.subtract, new.params, state.params)
    assert_close(moves, jax.tree.map(jnp.subtract, expected, state.params), 1e-3)
    assert_equal(new.frozen, state.frozen)
    assert int(new.step) == 1
    if name == "learner":  # the norm before clipping
        assert metrics["grad_norm_ema"] == np.float32(0.7)
        mean = 0.7 * 0.7 + 0.3 * min(float(norm), 1.4)
        assert float(new.ghat) == pytest.approx(mean, rel=1e-5)
    else:
        assert new.ghat is None and "grad_norm_ema" not in metrics
    assert int(metrics["n_tokens"]) == 10
    assert int(metrics["nonfinite"]) == 0
    assert float(metrics["clip_ratio/region_mean"]) > 0  # else the clip would go untested


def test_only_adapters_train_with_lora(lora_learner):
    def kinds(tree):
        leaves = jax.tree.leaves(tree, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
        return {type(leaf) for leaf in leaves}

    state = lora_learner.state
    assert (kinds(state.params), kinds(state.frozen)) == ({nnx.LoRAParam}, {nnx.Param})


def test_entropy_is_the_mean_over_optimized_tokens_and_only_on_request(
    learner, lora_learner, tiny, batch, quick
):
    data = batch(micro=2)
    _, metrics = lora_learner.update(lora_learner.state, data)
    flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), data)
    logits = quick(tiny(lora=True).logits)(flat.tokens, flat.attention_mask)[:, -5:-1]
    logp = jax.nn.log_softmax(logits / TEMPERATURE)
    entropy = -np.sum(np.exp(logp) * logp, axis=-1)[np.asarray(flat.completion_mask)].mean()
    np.testing.assert_allclose(metrics["entropy"], entropy, rtol=1e-5)
    assert "entropy" not in learner.update(learner.state, data)[1]


@pytest.mark.parametrize(("policies", "splits"), [(GC, (2, 4)), (INT8, (4,))])
def test_gradients_are_the_same_for_every_microbatch_split(learner, batch, policies, splits):
    # Tiles lie along features, so that compression does not mix rows.
    whole, expected = learner.gradients(policies, learner.state, batch(micro=1))
    for micro in splits:
        grads, metrics = learner.gradients(policies, learner.state, batch(micro=micro))
        assert_close(grads, whole)
        assert metrics.keys() == expected.keys()
        assert metrics["micro_exposure"].shape == (micro,)
        by_micro = np.abs(metrics["omega"]).sum(axis=(1, 2))
        np.testing.assert_allclose(metrics["micro_exposure"], by_micro, rtol=1e-5)
        for name in expected.keys() - {"micro_exposure"}:
            found = np.reshape(metrics[name], np.shape(expected[name]))
            np.testing.assert_allclose(found, expected[name], rtol=1e-5, atol=1e-8, err_msg=name)
    # Witness that a mean of means would be wrong: microbatches hold different token counts.
    counts = np.asarray(batch(micro=4).completion_mask).sum(axis=(1, 2))
    assert len(set(counts.tolist())) == 4


def program(learner, data, policies):
    text = str(learner.gradients.trace(policies, learner.state, data).jaxpr)
    return text, learner.gradients(policies, learner.state, data)[0]


def test_policies_change_the_program_and_not_the_exact_gradient(learner, batch):
    data = batch(micro=1)
    store, exact = program(learner, data, STORE)
    gc, same = program(learner, data, GC)
    compressed, near = program(learner, data, INT8)
    assert gc.count("dot_general") > store.count("dot_general")
    assert "i8[" in compressed and "i8[" not in store + gc
    assert_close(same, exact, 1e-5)
    error = optax.tree.norm(jax.tree.map(jnp.subtract, near, exact)) / optax.tree.norm(exact)
    assert 1e-4 < float(error) < 0.03


def test_state_is_donated_and_batch_is_not(learner, batch):
    state, data = jax.tree.map(jnp.copy, learner.state), batch()
    new, _ = learner.donating(GC, state, data)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves((state.params, state.opt_state)))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(data))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(new))


def test_one_trace_for_equal_policies_and_new_states(learner, batch):
    state = jax.tree.map(jnp.copy, learner.state)
    for seed in range(3):
        state, _ = learner.donating((hl.Policy({}),) * 2, state, batch(seed=seed))
    assert len(learner.traces) == 1
    assert int(state.step) == 3


def test_no_optimized_token_moves_nothing(learner, batch):
    data = batch()
    moved, _ = learner.update(learner.state, data)  # momentum and decay now want to move on
    empty = dataclasses.replace(data, completion_mask=jnp.zeros_like(data.completion_mask))
    still, metrics = learner.update(moved, empty)
    assert_equal((still.params, still.opt_state), (moved.params, moved.opt_state))
    assert still.ghat == moved.ghat != learner.state.ghat
    assert int(still.step) == 2
    for name in ("loss", "grad_norm", "exposure", "n_tokens", "nonfinite", "kl"):
        assert float(metrics[name]) == 0.0, name


FIELDS = ["logp_old", "logp_ref"]


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_non_finite_off_the_mask_never_leaks(learner, batch, field, value):
    data = batch(micro=1)
    dirty = jnp.where(data.completion_mask, getattr(data, field), value)
    assert not np.all(np.isfinite(dirty))
    expected = learner.gradients(GC, learner.state, data)
    found = learner.gradients(GC, learner.state, dataclasses.replace(data, **{field: dirty}))
    assert_equal(found, expected)


@pytest.mark.parametrize("field", [*FIELDS, "advantages"])
def test_non_finite_leaves_the_state_and_names_row_and_position(learner, batch, field):
    state, data = learner.state, batch(micro=2)
    index = (1, 0) if field == "advantages" else (1, 0, 2)  # row 2 of the batch
    data = dataclasses.replace(data, **{field: getattr(data, field).at[index].set(jnp.nan)})
    new, metrics = learner.update(state, data)
    moving = lambda s: (s.params, s.frozen, s.opt_state, s.step, s.ghat)  # noqa: E731
    assert_equal(moving(new), moving(state))
    assert int(metrics["nonfinite"]) == 1
    position = 0 if field == "advantages" else 2
    with pytest.raises(FloatingPointError, match=rf"row 2 .*completion position {position};"):
        raise_if_nonfinite(metrics, data)


def test_non_finite_gradient_is_told_apart(learner, batch):
    # Finite log-probs and advantages whose loss overflows float32.
    state, data = learner.state, batch()
    data = dataclasses.replace(data, advantages=jnp.full((2, 2), 3e38, jnp.float32))
    new, metrics = learner.update(state, data)
    assert_equal((new.params, new.ghat), (state.params, state.ghat))
    assert (int(metrics["nonfinite"]), int(metrics["nonfinite_index"])) == (1, -1)
    with pytest.raises(FloatingPointError, match="loss or a gradient"):
        raise_if_nonfinite(metrics, data)


@pytest.mark.parametrize(("nonfinite", "tokens", "after"), [(0, 5, 1.5), (1, 5, 2.0), (0, 0, 2.0)])
def test_only_an_update_that_counts_moves_the_gradients_norm(nonfinite, tokens, after):
    params = nnx.State({"w": jnp.ones(2)})
    frozen, opt_state = nnx.State({}), optax.sgd(0.1).init(params)
    ghat = jnp.float32(2.0)
    state = TrainState(params, frozen, opt_state, jnp.int32(0), jax.random.key(0), ghat)
    metrics = {"nonfinite": nonfinite, "n_tokens": tokens, "grad_norm": 1.0}
    metrics = {name: jnp.asarray(value) for name, value in metrics.items()}
    new = make_apply(optax.sgd(0.1), norm_weight=0.5)(state, params, metrics)
    assert new.ghat == after


def test_bfloat16_parameters_keep_their_dtype_and_float32_moments(tiny, batch):
    model = tiny(param_dtype="bfloat16", dtype="bfloat16")
    graphdef, state = init_state(model, optimizer(), jax.random.key(0))
    update = functools.partial(make_actor_update(graphdef, optimizer(), **OPTIONS), GC)
    for _ in range(2):
        state, _ = jax.eval_shape(update, state, batch())
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {jnp.dtype("bfloat16")}
    moments = [x for x in jax.tree.leaves(state.opt_state) if jnp.issubdtype(x.dtype, jnp.floating)]
    assert {leaf.dtype for leaf in moments} == {jnp.dtype("float32")}


def test_score_equals_whole_log_softmax(learner, tiny, batch, quick):
    data, state = batch(micro=2), learner.state
    score = make_score(learner.graphdef, temperature=TEMPERATURE)
    found = score(state.params, state.frozen, data.tokens, data.attention_mask, completion=4)
    tokens, mask = data.tokens.reshape(4, -1), data.attention_mask.reshape(4, -1)
    logp = jax.nn.log_softmax(quick(tiny().logits)(tokens, mask) / TEMPERATURE)[:, -5:-1]
    expected = jnp.take_along_axis(logp, tokens[:, -4:, None], axis=-1)[..., 0]
    np.testing.assert_allclose(found.reshape(4, 4), expected, atol=1e-5)
