"""Sketched decoders: the gradients' sketches of every linear map, shared arrays, layer names."""

import dataclasses
import functools
import logging
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import hilore_jax as hl
from hilore_jax.logra import Sketches, SketchKey, SketchSlot
from hilore_jax.models import Decoder, DecoderConfig, LoraConfig, SketchConfig, add_sketches
from hilore_jax.models.adapters import add_lora
from hilore_jax.models.config import LINEARS
from hilore_jax.models.restack import restack
from hilore_jax.models.sketched import sketched_config, sketched_stacks, stack_keys, stacked

RANK, UPDATE = 3, 5
SKETCHES = Sketches(rank=RANK, seed=7)
CONFIG = DecoderConfig(
    vocab_size=23, d_model=10, d_ff=14, n_layers=2, n_heads=2, n_kv_heads=1, head_dim=6,
    qkv_bias=True,
)  # fmt: skip
TOKENS = jnp.asarray(np.random.default_rng(1).integers(0, 23, (2, 6)), jnp.int32)


def decoder_of(**changes):
    """Random weights, filled by NumPy: compiling an initializer would take longer than a test."""
    rng = np.random.default_rng(0)
    config = dataclasses.replace(CONFIG, **changes)
    abstract = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    return jax.tree.map(lambda x: jnp.asarray(0.3 * rng.normal(size=x.shape), x.dtype), abstract)


quick = functools.partial(
    jax.jit, compiler_options=hl.compiler_options() | {"xla_backend_optimization_level": 0}
)
project = quick(jax.vmap(SKETCHES.projection, (0, None)), static_argnums=1)


@functools.cache
def gradient_of(tied, segments=(2,), policy=None):
    """A loss's compiled gradient and its arguments; with a policy, of the sketched decoder."""
    decoder, kind, policies = decoder_of(tie_embeddings=tied), nnx.Param, None
    if policy is not None:
        decoder = add_sketches(restack(decoder, segments), SKETCHES, update=UPDATE)
        kind, policies = SketchSlot, (hl.parse_policy(policy),) * 2
    graphdef, params, rest = nnx.split(decoder, kind, ...)

    def loss(params, rest):
        model = nnx.merge(graphdef, params, rest)
        hidden = model.hidden(TOKENS, policies=policies)
        return jnp.mean(jnp.sin(3.0 * hidden @ model.unembedding().T))

    return quick(jax.grad(loss)).lower(params, rest).compile(), (params, rest)


@pytest.mark.parametrize(
    ("segments", "tied", "policy"),
    [((2,), True, "gc"), ((1, 1), False, "sketch_hidden=store,mlp_gate=store")],
)
def test_every_linears_slot_gradient_is_the_sketch_of_its_dense_gradient(segments, tied, policy):
    gradient, args = gradient_of(tied)
    dense = stacked(gradient(*args), "kernel")
    gradient, args = gradient_of(tied, segments, policy)
    found = stacked(gradient(*args), "slot")
    first = np.cumsum([0, *segments])
    assert found.keys() == {f"{i}.{name}" for i in range(len(segments)) for name in LINEARS}
    for name, value in found.items():
        segment, linear = int(name[0]), name[2:]
        # Layers' names count blocks of the model, whatever the segments.
        blocks = range(first[segment], first[segment] + len(value))
        keys = [SKETCHES.key(f"blocks.{block}.{linear}", UPDATE) for block in blocks]
        whole = np.asarray(dense[f"0.{linear}"][blocks.start : blocks.stop], np.float64)
        a = np.asarray(project(jnp.stack(keys), whole.shape[1]), np.float64)
        expected = np.einsum("nri,nio->nor", a, whole)
        np.testing.assert_allclose(value, expected, atol=3e-5 * np.abs(expected).max())
        # The witness: other projections give other sketches.
        other = np.einsum("nri,nio->nor", a[:, ::-1], whole)
        assert np.abs(value - other).max() > 0.1 * np.abs(expected).max()


def test_the_function_is_unchanged_and_arrays_are_shared():
    plain = decoder_of()
    sketched = add_sketches(plain, SKETCHES)
    assert sketched.segments[0].q_proj.kernel[...] is plain.segments[0].q_proj.kernel[...]
    assert sketched.segments[0].q_proj.bias[...] is plain.segments[0].q_proj.bias[...]
    logits = quick(Decoder.logits)
    np.testing.assert_array_equal(logits(sketched, TOKENS), logits(plain, TOKENS))
    slot, key = (getattr(sketched.segments[0].q_proj, name) for name in ("slot", "key"))
    assert (slot.shape, slot.dtype, type(slot)) == ((2, 12, RANK), jnp.float32, SketchSlot)
    assert (key.shape, key.dtype, type(key)) == ((2, 2), jnp.uint32, SketchKey)
    assert not np.any(slot[...]) and not np.array_equal(key[...][0], key[...][1])


def made(compiled, shape):
    """Instructions that make a float array of a kernel's shape, or of its stack's.

    Those that only read the weights are left out: a block's kernel is cut out of its stack.
    """
    sides = "|".join(f"{a},{b}" for a, b in (shape, shape[::-1]))
    lines = re.findall(
        rf"%?([\w.-]+) = f32\[(?:2,|1,)?(?:{sides})\]\S* ([\w-]+)\(", compiled.as_text()
    )
    reads = "parameter|get-tuple-element|bitcast|copy|transpose|dynamic-slice|slice|reshape"
    cut = "(bitcast_|copy_|transpose_)*dynamic-slice_.*fusion.*"
    return [
        name for name, kind in lines if not re.fullmatch(reads, kind) if not re.match(cut, name)
    ]


def test_the_backward_program_makes_no_array_of_a_kernels_shape():
    assert made(gradient_of(True)[0], (10, 14))  # the witness
    assert made(gradient_of(True, (2,), "gc")[0], (10, 14)) == []


def test_narrow_maps_stay_dense_and_are_logged(caplog):
    with caplog.at_level(logging.INFO, "hilore_jax"):
        config = sketched_config(CONFIG, Sketches(rank=6))
    # k and v are 10 x 6: a sketch of rank 6 is no smaller.
    assert config.sketched_linears == ("q_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    assert "k_proj (10, 6), v_proj (10, 6): left dense" in caplog.text
    assert len(caplog.records) == 1


def test_keys_are_those_of_the_layers_names_in_any_segments():
    config = sketched_config(CONFIG, SKETCHES, ("up_proj",))
    whole, cut = (sketched_stacks(config, lengths) for lengths in ((2,), (1, 1)))
    one = stack_keys(whole, SKETCHES, UPDATE)["0.up_proj"]
    two = stack_keys(cut, SKETCHES, UPDATE)
    np.testing.assert_array_equal(one, np.concatenate([two["0.up_proj"], two["1.up_proj"]]))
    np.testing.assert_array_equal(one[1], SKETCHES.key("blocks.1.up_proj", UPDATE))
    assert not np.array_equal(one, stack_keys(whole, SKETCHES, UPDATE + 1)["0.up_proj"])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda d: add_sketches(d, Sketches(rank=12)), r"rank 12 is no smaller .* below 10"),
        (lambda d: add_sketches(d, SKETCHES, ("qkv",)), r"\['qkv'\], expected some of q_proj"),
        (lambda d: add_sketches(d, SKETCHES, ()), "LoGRA targets are empty"),
        (lambda d: add_sketches(add_sketches(d, SKETCHES), SKETCHES), "has sketches already"),
        (
            lambda d: add_sketches(add_lora(d, LoraConfig(rank=2), rngs=nnx.Rngs(0)), SKETCHES),
            "beside LoRA adapters of rank 2",
        ),
    ],
)
def test_bad_sketches_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make(decoder_of())


def test_sketches_are_part_of_the_configs_value():
    one, other = (
        dataclasses.replace(CONFIG, sketches=SketchConfig(Sketches(rank=n))) for n in (3, 4)
    )
    assert one == dataclasses.replace(other, sketches=SketchConfig(Sketches(rank=3))) != other
    assert hash(one) != hash(other)
