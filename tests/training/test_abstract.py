"""The actor update by shapes: equal to the real one, and plannable."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import hilore_jax as hl
from hilore_jax.models.config import DecoderConfig, LoraConfig
from hilore_jax.models.decoder import Decoder, segment
from hilore_jax.planning.fingerprint import fingerprint
from hilore_jax.training.abstract import AbstractUpdate, check_plan
from hilore_jax.training.step import init_state
from plans import bare_plan

CONFIG = DecoderConfig(
    vocab_size=40, d_model=16, d_ff=24, n_layers=3, n_heads=2, n_kv_heads=1, head_dim=8
)
LORA = dataclasses.replace(CONFIG, lora=LoraConfig(rank=2))
GC, INT8 = hl.Policy({}), hl.parse_policy("mlp_gate=int8,mlp_up=int8")
MIXED = (GC, INT8, INT8)


OPTIMIZER = optax.adamw(1e-3)


def make(config=CONFIG, **fields):
    defaults = {"micro": 2, "rows": 2, "seq": 8, "completion": 5, "optimizer": OPTIMIZER}
    return AbstractUpdate(config, **(defaults | fields))


@functools.cache
def jitted(update):
    """One for equal updates, so that each is compiled once."""
    return jax.jit(update, static_argnums=0)


def random_batch(update):
    shapes = update.arguments(MIXED)[1]
    keys = iter(jax.random.split(jax.random.key(1), 10))
    real = dataclasses.replace(
        shapes,
        tokens=jax.random.randint(next(keys), shapes.tokens.shape, 0, 40),
        attention_mask=jnp.ones(shapes.attention_mask.shape, bool),
        completion_mask=jnp.ones(shapes.completion_mask.shape, bool),
        logp_old=-jax.random.uniform(next(keys), shapes.logp_old.shape) - 3,
        advantages=jax.random.normal(next(keys), shapes.advantages.shape),
    )
    return dataclasses.replace(real, logp_ref=real.logp_old - 0.1)


@pytest.mark.parametrize("config", [CONFIG, LORA], ids=["dense", "lora"])
def test_shapes_are_those_of_a_real_state_in_the_policies_segments(config):
    update = make(config)
    state, _ = update.arguments(MIXED)
    model = segment(Decoder(config, rngs=nnx.Rngs(0)), MIXED)
    _, real = init_state(model, update.optimizer, jax.random.key(0))
    describe = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)  # noqa: E731
    assert describe(state) == describe(real)
    new, metrics = jitted(update)(MIXED, real, random_batch(update))
    assert describe(new) == describe(real) and float(metrics["grad_norm"]) > 0


def test_random_arguments_have_those_shapes_and_make_an_update_that_moves():
    update = make(LORA)
    made = update.random_arguments()
    state, batch = made(MIXED)
    describe = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)  # noqa: E731
    assert describe((state, batch)) == describe(update.arguments(MIXED))
    # Equal segments share their arrays: a large model is there once.
    shared = zip(*map(jax.tree.leaves, ((state, batch), made((INT8, GC, GC)))), strict=True)
    assert all(a is b for a, b in shared)
    new, metrics = jitted(update)(MIXED, state, batch)
    assert float(metrics["grad_norm"]) > 0 and int(metrics["n_tokens"]) == 2 * 2 * 5
    moved = jax.tree.map(lambda a, b: bool((a != b).any()), new.params, state.params)
    assert any(jax.tree.leaves(moved))


@pytest.mark.parametrize("target", ["cpu", "cpux1", "cpux8", "device", "devicex1", "cuda:h100-80"])
def test_a_plan_is_for_its_batch_where_it_is_for_this_platform(target):
    update = make()
    blocks, args = update.blocks(), update.arguments((GC,) * CONFIG.n_layers)
    facts = {"blocks": blocks.count, "argnums": blocks.argnums}
    facts = fingerprint(blocks.fn, blocks.args, args, **facts) | update.facts()
    plan = bare_plan((GC,) * CONFIG.n_layers, [], target=target, fingerprint=facts)
    check_plan(plan, update)
    longer, wider = make(seq=16), make(dataclasses.replace(CONFIG, d_ff=32))
    if target.startswith("cuda"):  # of another platform only the model can be compared
        check_plan(plan, longer)
    else:
        with pytest.raises(ValueError, match="tokens of a sequence: the plan has 8, this run has"):
            check_plan(plan, longer)
    with pytest.raises(ValueError, match="model's shape: the plan has width of the MLP 24"):
        check_plan(plan, wider)


def test_whole_and_chunked_logits_give_the_same_update():
    update = make()
    model = segment(Decoder(CONFIG, rngs=nnx.Rngs(0)), MIXED)
    _, state = init_state(model, update.optimizer, jax.random.key(0))
    batch = random_batch(update)
    ours = jitted(update)(MIXED, state, batch)[1]
    whole = jitted(dataclasses.replace(update, head="whole"))(MIXED, state, batch)[1]
    assert float(ours["loss"]) == pytest.approx(float(whole["loss"]), abs=1e-6)
    assert float(ours["grad_norm"]) == pytest.approx(float(whole["grad_norm"]), rel=1e-4)


def test_without_lora_hidden_compression_spares_nothing_under_lora():
    blocks = make(LORA).blocks()
    kept = "q=int8,attn_out=int8,mlp_gate=int8,mlp_up=int8,k=store,v=store,attn_lse=store"
    kept += ",attn_residual=store"

    def matmuls(policy):
        explained = hl.explain(
            hl.parse_policy(policy), blocks.fn, *blocks.args, argnums=blocks.argnums
        )
        return explained.recomputed.matmuls

    assert matmuls(kept) > 7
    assert matmuls(kept + ",lora_hidden=store") == 0
    assert blocks.count == 3


def test_a_model_by_shape_is_planned():
    update = make(LORA, rows=4, seq=64, completion=63)
    plan = hl.plan(
        update,
        update.arguments,
        blocks=update.blocks(),
        budget=hl.Budget("9x gc"),
        target="cpu",
    )
    assert plan.memory.peak <= plan.budget and len(plan.policies) == 3
    assert plan.removed_flops > 0
