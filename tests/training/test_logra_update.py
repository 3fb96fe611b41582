"""The LoGRA update against NumPy in float64, its budget, and what must never move it."""

import dataclasses
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import hilore_jax as hl
from hilore_jax.logra import Follower, Packet, Sketches
from hilore_jax.models.config import DecoderConfig
from hilore_jax.models.sketched import sketched_config, sketched_stacks, stack_keys, stacked
from hilore_jax.training.abstract import AbstractUpdate
from hilore_jax.training.logra_probe import probes_of
from hilore_jax.training.logra_state import (
    LograSettings,
    dense_part,
    init_logra_state,
    with_kernels,
)
from hilore_jax.training.logra_update import make_logra_update, make_sketch_gradients
from hilore_jax.training.publish import by_layer, full_sync
from hilore_jax.training.step import raise_if_nonfinite

CLIP, TEMPERATURE, MAX_NORM, RATIO = 0.2, 0.7, 0.5, 1e-2
GC = (hl.Policy({}),) * 2
OPTIONS: dict[str, Any] = {"clip": CLIP, "beta": 0.0, "temperature": TEMPERATURE}
SKETCHES = Sketches(rank=3, seed=11)
TARGETS = ("q_proj", "down_proj")
BUDGET = (1e-3, 1e-6)
SETTINGS = LograSettings(update_ratio=RATIO, kl_budget=BUDGET, kl_updates=2, realized_kl_every=1)


def setup(tiny, quick, settings=SETTINGS, targets=TARGETS, dense=None, **changes):
    model = tiny(**changes)
    config = sketched_config(model.config, SKETCHES, targets)
    key = jax.random.key(0)
    graphdef, state = init_logra_state(model, config, key, dense=dense, norm=0.7)
    update = make_logra_update(
        config, (2,), settings, dense=dense, max_grad_norm=MAX_NORM, factors=True, **OPTIONS
    )
    jitted = quick(update, static_argnums=0)
    return types.SimpleNamespace(
        config=config,
        graphdef=graphdef,
        state=state,
        stacks=sketched_stacks(config, (2,)),
        update=lambda state, batch: jitted(GC, state, batch),
    )


@pytest.fixture(scope="module")
def learner(tiny, quick):
    return setup(tiny, quick)


@pytest.fixture(scope="module")
def data(batch):
    """Without a reference; the rollouts' log-probs a little above the old ones."""
    made = batch(micro=2, reference=False)
    return dataclasses.replace(made, logp_rollout=made.logp_old)


@pytest.fixture(scope="module")
def plain(learner, quick):
    """Loss, log-probs and gradient of the kernels by autodiff of whole logits; and the logits'
    derivative along a displacement of the kernels."""

    def logits(kernels, state, tokens, mask):
        model = nnx.merge(learner.graphdef, with_kernels(state.params, kernels), state.frozen)
        return model.logits(tokens, mask)[:, -5:-1] / TEMPERATURE

    def loss(kernels, state, batch):
        flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batch)
        every = jax.nn.log_softmax(logits(kernels, state, flat.tokens, flat.attention_mask))
        logp = jnp.take_along_axis(every, flat.tokens[:, -4:, None], axis=-1)[..., 0]
        ratio, a = jnp.exp(logp - flat.logp_old), flat.advantages[:, None]
        terms = -jnp.minimum(ratio * a, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * a)
        mask = flat.completion_mask
        return jnp.sum(jnp.where(mask, terms, 0)) / jnp.sum(mask), logp

    def slope(kernels, along, state, tokens, mask):
        with hl.disabled():
            return jax.jvp(lambda k: logits(k, state, tokens, mask), (kernels,), (along,))

    gradient = quick(jax.grad(loss, has_aux=True))
    return types.SimpleNamespace(gradient=gradient, slope=quick(slope))


@pytest.fixture(scope="module")
def two(learner, data):
    """States before and after two updates, and their metrics."""
    states, found = [learner.state], []
    for _ in range(2):
        state, metrics = learner.update(states[-1], data)
        states.append(state)
        found.append(metrics)
    return states, found


def kernels_of(learner, state):
    held = stacked(state.params, "kernel")
    return {stack.name: held[stack.name] for stack in learner.stacks}


def same_bits(found, expected):
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        one, other = (
            jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
            for x in (one, other)
        )
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


def wide(x):
    return np.asarray(x, np.float64)


def transcribed(learner, plain, state, data, number):
    """Methods 2 in float64, from float32 gradients and derivatives of a plain program."""
    kernels, old = kernels_of(learner, state), state.opt_state
    grads, logp = plain.gradient(kernels, state, data)
    keys = stack_keys(learner.stacks, SKETCHES, number)
    a = {s.name: wide(SKETCHES.projections(keys[s.name], s.shape[0])) for s in learner.stacks}
    s = {n: np.einsum("nio,nri->nor", wide(g), a[n]) for n, g in grads.items()}
    square = sum(np.sum((s[n] @ a[n]) ** 2) for n in s)
    clip = min(1.0, MAX_NORM / np.sqrt(square))
    assert clip < 1  # else the clipping would go untested
    d, v = {}, {}
    for name, sketch in s.items():
        mean = np.mean((clip * sketch) ** 2, axis=2)
        second = 0.95 * wide(old.v[name]) ** 2 + 0.05 * mean
        h = np.sqrt(second / (1 - 0.95 ** (number + 1)))
        scale = 1 / (h + 1e-8 * h.mean(axis=1, keepdims=True))
        row = scale[..., None] * clip * sketch
        norms = [np.linalg.norm(x, axis=(1, 2), keepdims=True) for x in (clip * sketch, row)]
        d[name], v[name] = row * norms[0] / norms[1], np.sqrt(second)
    weights = sum(np.sum(wide(w) ** 2) for w in kernels.values())
    moved = sum(np.sum((d[n] @ a[n]) ** 2) for n in d)
    d = {n: x * RATIO * np.sqrt(weights / moved) for n, x in d.items()}
    along = {n: -np.swapaxes(d[n] @ a[n], 1, 2).astype(np.float32) for n in d}
    probes = probes_of(data)
    z, dz = map(wide, plain.slope(kernels, along, state, probes.tokens, probes.attention_mask))
    p = np.exp(z - z.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    centred = dz - np.sum(p * dz, -1, keepdims=True)
    kl = 0.5 * np.sum(p * centred**2, -1)
    q = kl[np.asarray(probes.completion_mask)].mean()
    mask = np.asarray(data.completion_mask).reshape(logp.shape)
    gap = wide(data.logp_rollout).reshape(logp.shape) - wide(logp)
    mismatch = 0.7 * wide(old.mismatch) + 0.3 * max(0.0, gap[mask].mean())
    budget = max(BUDGET[number] - mismatch, BUDGET[number] / 2)
    return types.SimpleNamespace(
        a=a, d=d, v=v, norm=np.sqrt(square), q=q, budget=budget, mismatch=mismatch,
        alpha=min(3.0, np.sqrt(budget / q)),
    )  # fmt: skip


def test_two_updates_are_those_of_the_equations(learner, plain, two, data):
    states, found = two
    for number, metrics in enumerate(found):
        before, after = states[number], states[number + 1]
        expected = transcribed(learner, plain, before, data, number)
        one = {
            "sketch_norm": expected.norm,
            "mismatch": expected.mismatch,
            "kl_budget": expected.budget,
            "alpha": expected.alpha,
            "predicted_kl": expected.alpha**2 * expected.q,
            "update_ratio": expected.alpha * RATIO,
        }
        for name, value in one.items():
            np.testing.assert_allclose(metrics[name], value, rtol=3e-3, atol=1e-7, err_msg=name)
        assert expected.alpha < 3
        new, old = (kernels_of(learner, state) for state in (after, before))
        for name, factor in metrics["factors"].items():
            assert factor.dtype == jnp.bfloat16
            want = expected.alpha * expected.d[name]
            np.testing.assert_allclose(
                wide(factor), want, rtol=6e-3, atol=2e-3 * np.abs(want).max()
            )
            step = np.swapaxes(wide(factor) @ expected.a[name], 1, 2)
            np.testing.assert_allclose(new[name], wide(old[name]) - step, atol=1e-6)
            assert np.abs(step).max() > 1e-5
            np.testing.assert_allclose(after.opt_state.v[name], expected.v[name], rtol=2e-3)
        assert int(after.opt_state.count) == int(after.step) == number + 1
        same_bits(after.frozen, learner.state.frozen)
        norm = float(metrics["grad_norm"])
        mean = 0.7 * float(before.ghat) + 0.3 * min(norm, 2 * float(before.ghat))
        assert float(after.ghat) == pytest.approx(mean, rel=1e-5)
    # Other projections each time: the same ones would make factors of another update alike.
    first, second = (stack_keys(learner.stacks, SKETCHES, n)["0.q_proj"] for n in (0, 1))
    assert not np.array_equal(first, second)


def test_the_step_hits_its_budget_and_small_ones_cause_what_was_predicted(two):
    for metrics, apart in zip(two[1], (0.3, 0.02), strict=True):
        assert float(metrics["alpha"]) < 3
        np.testing.assert_allclose(metrics["predicted_kl"], metrics["kl_budget"], rtol=1e-5)
        np.testing.assert_allclose(metrics["realized_kl"], metrics["predicted_kl"], rtol=apart)
    assert float(two[1][0]["kl_budget"]) > 100 * float(two[1][1]["kl_budget"])


def test_followers_of_the_packets_have_the_trainers_weights_bit_for_bit(learner, two):
    states, found = two
    follower = Follower.start(full_sync(0, SKETCHES, learner.stacks, states[0].params))
    for number, metrics in enumerate(found):
        factors = by_layer(learner.stacks, metrics["factors"])
        follower = follower.apply(Packet(update=number, sketches=SKETCHES, factors=factors))
        trained = by_layer(learner.stacks, kernels_of(learner, states[number + 1]))
        same_bits(dict(follower.kernels), trained)
    first = by_layer(learner.stacks, kernels_of(learner, states[0]))
    assert not np.array_equal(first["blocks.1.down_proj"], trained["blocks.1.down_proj"])


def test_microbatches_and_policies_leave_the_sketches_as_they_are(learner, batch, quick):
    gradients = make_sketch_gradients(learner.config, (2,), **OPTIONS)
    jitted = quick(gradients, static_argnums=0)
    whole, _ = jitted(GC, learner.state, batch(micro=1, reference=False))
    keeps = (hl.parse_policy("sketch_hidden=store,attn_out=store"),) * 2
    cut, _ = jitted(keeps, learner.state, batch(micro=4, reference=False))
    for one, other in zip(jax.tree.leaves(cut), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5 * np.abs(other).max())
    # Witness that microbatches differ: their rows hold different token counts.
    counts = np.asarray(batch(micro=4).completion_mask).sum(axis=(1, 2))
    assert len(set(counts.tolist())) == 4


def weights(state):
    return state.params, state.frozen, state.opt_state, state.ghat


@pytest.mark.parametrize("kind", ["zero advantages", "no optimized token"])
def test_what_teaches_nothing_moves_nothing(learner, two, data, kind):
    field = "advantages" if kind == "zero advantages" else "completion_mask"
    still = dataclasses.replace(data, **{field: jnp.zeros_like(getattr(data, field))})
    state = two[0][1]
    new, metrics = learner.update(state, still)
    same_bits(weights(new), weights(state))
    assert int(new.step) == int(state.step) + 1 and int(metrics["nonfinite"]) == 0
    assert float(metrics["update_ratio"]) == float(metrics["predicted_kl"]) == 0.0
    assert not any(np.any(f) for f in metrics["factors"].values())


def test_a_number_that_is_not_finite_leaves_the_state_and_is_named(learner, two, data):
    bad = dataclasses.replace(data, logp_old=data.logp_old.at[1, 0, 2].set(jnp.nan))
    state = two[0][1]
    new, metrics = learner.update(state, bad)
    same_bits((*weights(new), new.step, new.key), (*weights(state), state.step, state.key))
    assert int(metrics["nonfinite"]) == 1
    with pytest.raises(FloatingPointError, match=r"row 2 .*completion position 2;"):
        raise_if_nonfinite(metrics, bad)


def test_a_predicted_kl_that_is_not_finite_leaves_the_state_and_is_named(tiny, quick, data):
    settings = LograSettings(update_ratio=1e30)
    far = setup(tiny, quick, settings, ("q_proj",))
    new, metrics = far.update(far.state, data)
    same_bits((*weights(new), new.step), (*weights(far.state), far.state.step))
    assert int(metrics["nonfinite"]) == 1 and np.isfinite(metrics["grad_norm"])
    with pytest.raises(FloatingPointError, match="predicted KL of this LoGRA step is not finite"):
        raise_if_nonfinite(metrics, data)


def test_bfloat16_weights_follow_bit_for_bit_and_others_train_densely(tiny, quick, data):
    settings = LograSettings(update_ratio=RATIO, step_control=False)
    sgd = optax.sgd(0.1)
    one = setup(tiny, quick, settings, ("q_proj",), sgd, param_dtype="bfloat16")
    new, metrics = one.update(one.state, data)
    assert float(metrics["alpha"]) == 1.0 and "predicted_kl" not in metrics
    same_bits(new.opt_state.mismatch, one.state.opt_state.mismatch)
    kernel = new.params["segments"][0]["q_proj"]["kernel"][...]
    assert kernel.dtype == jnp.bfloat16
    factors = by_layer(one.stacks, metrics["factors"])
    follower = Follower.start(full_sync(0, SKETCHES, one.stacks, one.state.params))
    follower = follower.apply(Packet(update=0, sketches=SKETCHES, factors=factors))
    same_bits(dict(follower.kernels), by_layer(one.stacks, {"0.q_proj": kernel}))
    # Some entries moved by a whole last place, most not at all: they were rounded at random.
    still = np.mean(np.asarray(kernel == one.state.params["segments"][0]["q_proj"]["kernel"][...]))
    assert 0.01 < still < 0.99
    dense, before = (dense_part(s.params, ["0.q_proj"]) for s in (new, one.state))
    moved = [bool(np.any(np.asarray(a != b))) for a, b in zip(
        jax.tree.leaves(dense), jax.tree.leaves(before), strict=True)]  # fmt: skip
    assert len(moved) == 10 and sum(moved) > 5  # k_proj among them; norms' steps may be too small
    assert np.any(np.asarray(dense["segments"][0]["k_proj"]["kernel"][...]
                             != before["segments"][0]["k_proj"]["kernel"][...]))  # fmt: skip


def test_the_weights_move_in_place_and_no_gradient_of_theirs_exists():
    config = DecoderConfig(
        vocab_size=40, d_model=128, d_ff=512, n_layers=8, n_heads=2, n_kv_heads=1, head_dim=8
    )
    targets = ("up_proj", "down_proj")
    sketched = sketched_config(config, Sketches(rank=4), targets)
    kernels = len(targets) * 8 * 128 * 512 * 4
    options = hl.compiler_options() | {"xla_backend_optimization_level": 0}

    def compiled(config):
        update = AbstractUpdate(
            config, micro=2, rows=1, seq=8, completion=4, optimizer=optax.sgd(0.1), beta=0.0
        )
        jitted = jax.jit(update, static_argnums=0, donate_argnums=1, compiler_options=options)
        analysis = jitted.lower(GC * 4, *update.arguments(GC * 4)).compile().memory_analysis()
        assert analysis is not None
        return analysis

    found = compiled(sketched)
    assert found.alias_size_in_bytes > kernels
    assert found.temp_size_in_bytes < kernels / 2  # four of the 16 kernels, whatever the layers
    assert compiled(config).temp_size_in_bytes > kernels  # the witness: dense gradients


def test_probes_are_the_first_rows_with_response_tokens(data):
    mask = data.completion_mask.at[0, 0].set(False)
    some = dataclasses.replace(data, completion_mask=mask)
    np.testing.assert_array_equal(probes_of(some).tokens, data.tokens.reshape(4, -1)[1:3])
    # Two rows of nine tokens are too many: one is always taken.
    for tokens in (17, 1):
        np.testing.assert_array_equal(
            probes_of(data, tokens=tokens).tokens, data.tokens.reshape(4, -1)[:1]
        )
    empty = dataclasses.replace(data, completion_mask=jnp.zeros_like(mask))
    with pytest.raises(ValueError, match="no row of the batch has an optimized response token"):
        probes_of(empty)


@pytest.mark.parametrize(
    "wrong",
    [{"update_ratio": 0.0}, {"kl_budget": (1e-4, 0.0)}, {"kl_updates": 0}, {"alpha_max": -1.0}],
)
def test_settings_out_of_range_are_named(wrong):
    with pytest.raises(ValueError, match="expected finite numbers above 0"):
        LograSettings(**wrong)


def test_a_state_is_made_of_a_plain_decoder(tiny):
    config = sketched_config(tiny().config, SKETCHES, TARGETS)
    with pytest.raises(ValueError, match="takes a plain decoder"):
        init_logra_state(tiny(lora=True), config, jax.random.key(0))
