"""The actor update against a plain reference, and what must never move it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import hilore_jax as hl
from hilore_jax.models.decoder import segment
from hilore_jax.training.step import (
    check_batch,
    init_state,
    jit_update,
    make_actor_update,
    make_gradients,
    make_score,
    raise_if_nonfinite,
)

CLIP, BETA, TEMPERATURE, MAX_NORM = 0.2, 0.05, 0.7, 0.5
GC = (hl.Policy({}),) * 2
STORE = (hl.Policy(default=hl.Store()),) * 2
INT8 = (hl.Policy({"mlp_gate": hl.Compress("int8"), "mlp_up": hl.Compress("int8")}),) * 2
OPTIONS = {"clip": CLIP, "beta": BETA, "temperature": TEMPERATURE}


def optimizer():
    # A large eps keeps the first step a smooth function of the gradient: Adam's own would turn
    # rounding noise in a vanishing gradient into a full step.
    return optax.adamw(1e-2, eps=1e-3, weight_decay=0.1)


@functools.cache
def compiled(model):
    """(state, gradients, update) of a model, each compiled once for all tests; nothing donated."""
    graphdef, state = init_state(model, optimizer(), jax.random.key(0))
    gradients = make_gradients(graphdef, **OPTIONS)
    update = make_actor_update(graphdef, optimizer(), max_grad_norm=MAX_NORM, **OPTIONS)
    options = {"static_argnums": 0, "compiler_options": hl.compiler_options()}
    return graphdef, state, jax.jit(gradients, **options), jax.jit(update, **options)


def setup(model, policies=GC):
    graphdef, state = init_state(segment(model, policies), optimizer(), jax.random.key(0))
    return graphdef, jax.tree.map(jnp.copy, state)  # may be donated; models are shared


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


@pytest.mark.parametrize("lora", [False, True])
def test_update_equals_the_plain_reference(tiny, batch, lora):
    graphdef, state, _, update = compiled(tiny(lora=lora))
    data = batch(micro=2)
    reference = jax.jit(jax.value_and_grad(plain_loss), static_argnums=1)
    loss, grads = reference(state.params, graphdef, state.frozen, data)
    norm = optax.tree.norm(grads)
    assert norm > MAX_NORM  # else the clipping below would go untested
    scaled = jax.tree.map(lambda g: g * MAX_NORM / norm, grads)
    step, opt_state = optimizer().update(scaled, state.opt_state, state.params)
    expected = optax.apply_updates(state.params, step)

    new, metrics = update(GC, state, data)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-5)
    assert_close(new.opt_state, opt_state, 1e-4)
    moves = jax.tree.map(jnp.subtract, new.params, state.params)
    assert_close(moves, jax.tree.map(jnp.subtract, expected, state.params), 1e-3)
    assert_equal(new.frozen, state.frozen)
    assert int(new.step) == 1
    assert int(metrics["n_tokens"]) == 10
    assert int(metrics["nonfinite"]) == 0


def test_only_adapters_train_with_lora(tiny):
    _, state = setup(tiny(lora=True))

    def kinds(tree):
        leaves = jax.tree.leaves(tree, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
        return {type(leaf) for leaf in leaves}

    assert (kinds(state.params), kinds(state.frozen)) == ({nnx.LoRAParam}, {nnx.Param})


@pytest.mark.parametrize("policies", [GC, INT8])
def test_gradients_are_the_same_for_every_microbatch_split(tiny, batch, policies):
    # Tiles lie along features, so that compression does not mix rows.
    _, state, gradients, _ = compiled(tiny())
    whole, expected = gradients(policies, state, batch(micro=1))
    for micro in (2, 4):
        grads, metrics = gradients(policies, state, batch(micro=micro))
        assert_close(grads, whole)
        assert metrics.keys() == expected.keys()
        for name in expected:
            np.testing.assert_allclose(metrics[name], expected[name], rtol=1e-5, err_msg=name)
    # Witness that a mean of means would be wrong: microbatches hold different token counts.
    counts = np.asarray(batch(micro=4).completion_mask).sum(axis=(1, 2))
    assert len(set(counts.tolist())) == 4


def program(tiny, batch, policies):
    _, state, gradients, _ = compiled(tiny())
    text = str(gradients.trace(policies, state, batch()).jaxpr)
    return text, gradients(policies, state, batch())[0]


def test_policies_change_the_program_and_not_the_exact_gradient(tiny, batch):
    store, exact = program(tiny, batch, STORE)
    gc, same = program(tiny, batch, GC)
    compressed, near = program(tiny, batch, INT8)
    assert gc.count("dot_general") > store.count("dot_general")
    assert "i8[" in compressed and "i8[" not in store + gc
    assert_close(same, exact, 1e-5)
    error = optax.tree.norm(jax.tree.map(jnp.subtract, near, exact)) / optax.tree.norm(exact)
    assert 1e-4 < float(error) < 0.03


def test_state_is_donated_and_batch_is_not(tiny, batch):
    graphdef, state = setup(tiny())
    data = batch()
    update = jit_update(make_actor_update(graphdef, optimizer(), **OPTIONS))
    new, _ = update(GC, state, data)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves((state.params, state.opt_state)))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(data))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(new))


def test_one_trace_for_equal_policies_and_new_states(tiny, batch):
    graphdef, state = setup(tiny())
    inner, traces = make_actor_update(graphdef, optimizer(), **OPTIONS), []

    def counted(*args):
        traces.append(1)
        return inner(*args)

    update = jit_update(counted)
    for seed in range(3):
        state, _ = update((hl.Policy({}),) * 2, state, batch(seed=seed))
    assert len(traces) == 1
    assert int(state.step) == 3


def test_no_optimized_token_moves_nothing(tiny, batch):
    _, state, _, update = compiled(tiny())
    moved, _ = update(GC, state, batch())  # momentum and weight decay now want to move on
    empty = dataclasses.replace(batch(), completion_mask=jnp.zeros((1, 4, 4), bool))
    still, metrics = update(GC, moved, empty)
    assert_equal((still.params, still.opt_state), (moved.params, moved.opt_state))
    assert int(still.step) == 2
    for name in ("loss", "grad_norm", "exposure", "n_tokens", "nonfinite", "kl"):
        assert float(metrics[name]) == 0.0, name


FIELDS = ["logp_old", "logp_ref"]


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_non_finite_under_the_mask_never_leaks(tiny, batch, field, value):
    _, state, gradients, _ = compiled(tiny())
    data = batch()
    dirty = jnp.where(data.completion_mask, getattr(data, field), value)
    expected = gradients(GC, state, data)
    assert_equal(gradients(GC, state, dataclasses.replace(data, **{field: dirty})), expected)


@pytest.mark.parametrize("field", [*FIELDS, "advantages"])
def test_non_finite_leaves_the_state_and_names_row_and_position(tiny, batch, field):
    _, state, _, update = compiled(tiny())
    data = batch(micro=2)
    index = (1, 0) if field == "advantages" else (1, 0, 2)  # row 2 of the batch
    data = dataclasses.replace(data, **{field: getattr(data, field).at[index].set(jnp.nan)})
    new, metrics = update(GC, state, data)
    moving = lambda s: (s.params, s.frozen, s.opt_state, s.step)  # noqa: E731
    assert_equal(moving(new), moving(state))
    assert int(metrics["nonfinite"]) == 1
    position = 0 if field == "advantages" else 2
    with pytest.raises(FloatingPointError, match=rf"row 2 .*completion position {position};"):
        raise_if_nonfinite(metrics, data)


def test_non_finite_gradient_is_told_apart(tiny, batch):
    _, state, _, update = compiled(tiny())
    # Finite log-probs whose loss overflows: the reference is too far away for float32.
    data = batch()
    data = dataclasses.replace(data, advantages=jnp.full((1, 4), 3e38, jnp.float32))
    new, metrics = update(GC, state, data)
    assert_equal(new.params, state.params)
    assert (int(metrics["nonfinite"]), int(metrics["nonfinite_index"])) == (1, -1)
    with pytest.raises(FloatingPointError, match="loss or a gradient"):
        raise_if_nonfinite(metrics, data)


def test_bfloat16_parameters_keep_their_dtype_and_float32_moments(tiny, batch):
    graphdef, state = setup(tiny(param_dtype="bfloat16", dtype="bfloat16"))
    update = jit_update(make_actor_update(graphdef, optimizer(), **OPTIONS))
    for _ in range(2):
        state, _ = update(GC, state, batch())
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {jnp.dtype("bfloat16")}
    moments = [x for x in jax.tree.leaves(state.opt_state) if jnp.issubdtype(x.dtype, jnp.floating)]
    assert {leaf.dtype for leaf in moments} == {jnp.dtype("float32")}


def test_score_equals_whole_log_softmax(tiny, batch):
    model = tiny()
    graphdef, state = setup(model)
    data = batch(micro=2)
    score = make_score(graphdef, temperature=TEMPERATURE)
    found = score(state.params, state.frozen, data.tokens, data.attention_mask, completion=4)
    tokens, mask = data.tokens.reshape(4, -1), data.attention_mask.reshape(4, -1)
    logp = jax.nn.log_softmax(model.logits(tokens, mask) / TEMPERATURE)[:, -5:-1]
    expected = jnp.take_along_axis(logp, tokens[:, -4:, None], axis=-1)[..., 0]
    np.testing.assert_allclose(found.reshape(4, 4), expected, atol=1e-5)


@pytest.mark.parametrize(
    ("field", "shape"),
    [
        ("logp_old", (1, 4, 3)),
        ("logp_ref", (1, 3, 4)),
        ("advantages", (1, 4, 1)),
        ("attention_mask", (1, 4, 8)),
        ("tokens", (4, 9)),
        ("completion_mask", (1, 4, 9)),
    ],
)
def test_shapes_that_do_not_fit_name_the_field(batch, field, shape):
    dtype = getattr(batch(), field).dtype
    wrong = {field: jnp.zeros(shape, dtype)}
    fields = {f.name: getattr(batch(), f.name) for f in dataclasses.fields(batch())}
    # The width of the completion mask decides: another one makes the log-probs wrong.
    named = "logp_old" if field == "completion_mask" else field
    with pytest.raises((ValueError, TypeError), match=named):
        check_batch(type(batch())(**(fields | wrong)))
