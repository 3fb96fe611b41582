"""Decoders on a mesh: the same numbers, rows and kernels in parts, and kernels gathered."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec
from jax.sharding import NamedSharding as Named

import hilore_jax as hl
from hilore_jax.logra.sketches import Sketches
from hilore_jax.models import sharding
from hilore_jax.models.block import Block
from hilore_jax.models.config import DecoderConfig, LoraConfig, SketchConfig
from hilore_jax.models.decoder import Decoder
from hilore_jax.training import logra_probe, logra_update
from hilore_jax.training.batch import Batch
from hilore_jax.training.logra_state import LograSettings, init_logra_state
from hilore_jax.training.logra_update import make_logra_update

# Kernels larger than activations: the compiler by itself would rather gather rows than kernels.
ROWS, SEQ, D, FF = 2, 5, 48, 200
CONFIG = DecoderConfig(
    vocab_size=18,
    d_model=D,
    d_ff=FF,
    n_layers=2,
    n_heads=2,
    n_kv_heads=1,
    head_dim=8,
    tie_embeddings=False,
)
POLICIES = (hl.Policy({}),) * 2


def gradient(params, tokens, graphdef):
    def loss(params):
        model = nnx.merge(graphdef, params)
        hidden = model.hidden(tokens, policies=POLICIES)
        return jnp.sum(hl.grpo.token_logprobs(hidden, model.unembedding(), tokens) ** 2)

    return jax.grad(loss)(params)


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=3)])
def test_gradients_on_a_mesh_are_the_same_and_no_device_has_all_rows(lora):
    config = dataclasses.replace(CONFIG, lora=lora)
    graphdef, params = nnx.split(Decoder(config, rngs=nnx.Rngs(0)))
    tokens = jax.random.randint(jax.random.key(1), (ROWS, SEQ), 0, 18)
    run = jax.jit(gradient, static_argnums=2)
    alone = run(params, tokens, graphdef)
    mesh = Mesh(np.array(jax.devices()[:2]).reshape(1, 2), ("data", "fsdp"))
    placed = jax.device_put(params, sharding.parameter_sharding(params, mesh))
    rows = jax.device_put(tokens, Named(mesh, PartitionSpec(("data", "fsdp"))))
    with jax.set_mesh(mesh):
        compiled = run.lower(placed, rows, graphdef).compile()
        found = compiled(placed, rows)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5), found, alone)
    kernel = placed["segments"][0]["up_proj"]["kernel"].get_value()
    assert kernel.sharding.shard_shape(kernel.shape) == (2, D // 2, FF)
    text = compiled.as_text() or ""
    assert re.search(rf"f32\[(1,)?{D},{FF}\]\S* all-gather\(", text)
    # Wide activations: half of the rows on each device, never all of them.
    assert f"[{ROWS // 2},{SEQ},{FF}]" in text or f"[{ROWS // 2 * SEQ},{FF}]" in text
    assert f"[{ROWS},{SEQ},{FF}]" not in text and f"[{ROWS * SEQ},{FF}]" not in text


@pytest.mark.parametrize(("lora", "constraints"), [(None, 1 + 7), (LoraConfig(rank=3), 1 + 3 * 7)])
def test_a_block_gathers_each_kernel_and_keeps_its_rows_apart(lora, constraints):
    config = dataclasses.replace(CONFIG, lora=lora)
    graphdef, params = nnx.split(Block(config, rngs=nnx.Rngs(0)))
    x, half = jnp.ones((ROWS, SEQ, D)), jnp.ones((1, SEQ, 4))
    auto = (AxisType.Auto,) * 2

    def block(params, x):
        return nnx.merge(graphdef, params)(x, half, half)

    with jax.sharding.use_abstract_mesh(AbstractMesh((1, 2), ("data", "fsdp"), axis_types=auto)):
        program = str(jax.make_jaxpr(block)(params, x))
    assert program.count("sharding_constraint") == constraints
    assert "sharding_constraint" not in str(jax.make_jaxpr(block)(params, x))


def test_without_a_mesh_or_with_axes_of_other_names_nothing_is_constrained():
    x, kernel = jnp.ones((4, 3)), jnp.ones((3, 2))

    def count(mesh):
        def fn(x, kernel):
            return sharding.by_rows(x) @ sharding.gathered(kernel)

        if mesh is None:
            return str(jax.make_jaxpr(fn)(x, kernel)).count("sharding_constraint")
        with jax.sharding.use_abstract_mesh(mesh):
            return str(jax.make_jaxpr(fn)(x, kernel)).count("sharding_constraint")

    auto = (AxisType.Auto,) * 2
    assert count(None) == 0
    assert count(AbstractMesh((1, 2), ("rows", "model"), axis_types=auto)) == 0
    assert count(AbstractMesh((1, 2), ("data", "fsdp"), axis_types=auto)) == 2
    assert count(AbstractMesh((2,), ("data",), axis_types=auto[:1])) == 1  # rows alone
    assert count(AbstractMesh((1, 3), ("data", "fsdp"), axis_types=auto)) == 1  # 4 rows: kernels


def test_what_is_cut_and_what_is_copied():
    mesh = AbstractMesh((2, 4), ("data", "fsdp"))
    shapes = {
        "stack": jax.ShapeDtypeStruct((3, 8, 5), jnp.bfloat16),
        "embedding": jax.ShapeDtypeStruct((12, 5), jnp.float32),
        "biases": jax.ShapeDtypeStruct((4, 8), jnp.float32),
        "odd": jax.ShapeDtypeStruct((3, 6, 8), jnp.float32),
        "bias": jax.ShapeDtypeStruct((8,), jnp.float32),
        "keys": jax.ShapeDtypeStruct((4, 2), jnp.uint32),
        "step": jax.ShapeDtypeStruct((), jnp.int32),
    }
    specs = {k: s.spec for k, s in sharding.parameter_sharding(shapes, mesh).items()}
    cut = {"stack": PartitionSpec(None, "fsdp", None), "embedding": PartitionSpec("fsdp", None)}
    assert specs == {**dict.fromkeys(shapes, PartitionSpec()), **cut}
    with pytest.raises(ValueError, match=r"axes \('data',\), expected one named 'fsdp'"):
        sharding.parameter_sharding(shapes, AbstractMesh((2,), ("data",)))


def seen_sizes(monkeypatch):
    """Rows and words that are taken at a time, filled while updates are traced."""
    found = {}

    def watch(module, function, name):
        inner = getattr(module, function)

        def call(*args, **options):
            found.setdefault(name, set()).add(options[name])
            return inner(*args, **options)

        monkeypatch.setattr(module, function, call)

    watch(logra_update, "move_stack", "rows")
    watch(logra_probe, "predicted_kl", "words")
    watch(logra_probe, "realized_kl", "words")
    return found


def test_sketches_are_cut_along_their_outputs(monkeypatch):
    # Alone, rows of kernels and words are taken a few at a time; on the mesh, those of a device.
    monkeypatch.setattr(logra_update, "ROWS", 20)
    monkeypatch.setattr(logra_probe, "WORDS", 5)
    sizes = seen_sizes(monkeypatch)
    config = dataclasses.replace(CONFIG, sketches=SketchConfig(Sketches(rank=7)))
    segments, rows = (2,), PartitionSpec(None, ("data", "fsdp"))
    settings = LograSettings(realized_kl_every=1)
    update = make_logra_update(config, segments, settings, factors=True, beta=0.0)
    model = Decoder(CONFIG, rngs=nnx.Rngs(0))
    _, state = init_logra_state(model, config, jax.random.key(0))
    scored = jnp.ones((1, ROWS, SEQ - 1), bool)
    tokens = jax.random.randint(jax.random.key(1), (1, ROWS, SEQ), 0, 18)
    advantages = jnp.array([[1.0, -0.5]])
    batch = Batch(tokens, tokens >= 0, scored, jnp.full(scored.shape, -3.0), None, advantages)
    run = jax.jit(update, static_argnums=0)
    alone, expected = run(POLICIES, state, batch)
    assert sizes.pop("rows") == {20} and sizes.pop("words") == {5}
    mesh = Mesh(np.array(jax.devices()[:2]).reshape(1, 2), ("data", "fsdp"))
    placed = jax.device_put(state, sharding.parameter_sharding(state, mesh))
    there = jax.device_put(batch, jax.tree.map(lambda _: Named(mesh, rows), batch))
    with jax.set_mesh(mesh):
        compiled = run.lower(POLICIES, placed, there).compile()
        found, metrics = compiled(placed, there)
    assert sizes == {"rows": {None}, "words": {18}}
    close = functools.partial(np.testing.assert_allclose, rtol=2e-2, atol=1e-5)
    for name in ("alpha", "predicted_kl", "realized_kl", "sketch_norm", "grad_norm"):
        close(metrics[name], expected[name], rtol=1e-3)
    # F is rounded to bfloat16: what was summed in another order may fall on the other side.
    jax.tree.map(lambda a, b: close(a, b, atol=1e-6), metrics["factors"], expected["factors"])
    jax.tree.map(close, found.params, alone.params)
    text = compiled.as_text() or ""
    assert f"[2,{FF // 2},7]" in text and f"[2,{FF},7]" not in text
    assert f"[{D // 2},{FF}]" in text  # moved a part of the rows on each device
