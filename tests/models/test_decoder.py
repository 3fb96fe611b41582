"""The decoder against a float64 numpy transcription, its names, masks, dtypes and segments."""

import functools
import re

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from flax import nnx

import hilore_jax as hl
from hilore_jax import Policy, Store
from hilore_jax.models import NAMES, Decoder, DecoderConfig, LoraConfig, RopeScaling, segment

SHAPE = {"vocab_size": 29, "d_model": 12, "d_ff": 20, "n_layers": 3, "head_dim": 6}
FAMILIES = {
    "llama": {"n_heads": 4, "n_kv_heads": 2, "rope_theta": 1e5},
    "llama3": {
        "n_heads": 4,
        "n_kv_heads": 2,
        "tie_embeddings": False,
        "rope_scaling": RopeScaling(4.0, 1.0, 3.0, 9),
    },
    "qwen2": {"n_heads": 6, "n_kv_heads": 2, "qkv_bias": True, "rms_eps": 1e-6},
    "qwen3": {"n_heads": 4, "n_kv_heads": 4, "qk_norm": True, "tie_embeddings": False},
}
MASK = jnp.array([[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0, 0]], bool)
TOKENS = jax.random.randint(jax.random.key(5), (2, 7), 0, 29)


@functools.cache
def make(family, segments=None, **extra):
    config = DecoderConfig(**{**SHAPE, **FAMILIES[family], **extra})
    decoder = Decoder(config, segments=segments, rngs=nnx.Rngs(0))
    graphdef, state = nnx.split(decoder)

    @jax.jit  # moved, so that biases and scales are not at 0 and 1
    def move(state):
        wave = lambda x: jnp.sin(jnp.arange(x.size) * 1.7).reshape(x.shape)  # noqa: E731
        return jax.tree.map(lambda x: x + (0.3 * wave(x)).astype(x.dtype), state)

    return nnx.merge(graphdef, move(state))


def transcription(decoder, tokens, mask):
    """Logits of one decoder in numpy float64, token by token and head by head."""
    config = decoder.config
    tree = jax.tree.map(lambda x: np.asarray(x, np.float64), nnx.to_pure_dict(nnx.state(decoder)))
    stacks = [tree["segments"][i] for i in sorted(tree["segments"])]
    layers = [
        jax.tree.map(lambda x: x[i], stack)  # noqa: B023
        for stack in stacks
        for i in range(len(stack["attn_norm"]["scale"]))
    ]

    def norm(x, scale):
        return x / np.sqrt(np.mean(x**2) + config.rms_eps) * scale

    half = config.head_dim // 2
    freq = np.array([config.rope_theta ** (-2 * i / config.head_dim) for i in range(half)])
    if (scaling := config.rope_scaling) is not None:
        for i, f in enumerate(freq):
            wavelength = 2 * np.pi / f
            if wavelength > scaling.original_max_seq / scaling.low_freq_factor:
                freq[i] = f / scaling.factor
            elif wavelength >= scaling.original_max_seq / scaling.high_freq_factor:
                smooth = scaling.original_max_seq / wavelength - scaling.low_freq_factor
                smooth /= scaling.high_freq_factor - scaling.low_freq_factor
                freq[i] = (1 - smooth) * f / scaling.factor + smooth * f

    def rope(x, position):
        turned = np.exp(1j * position * freq) * (x[:half] + 1j * x[half:])
        return np.concatenate([turned.real, turned.imag])

    def linear(x, p):
        return x @ p["kernel"] + p.get("bias", 0.0)

    def row_logits(row):  # one row without padding
        xs = [tree["embedding"][t] for t in row]
        for p in layers:
            hs = [norm(x, p["attn_norm"]["scale"]) for x in xs]
            heads = {}
            for name in "qkv":
                split = [linear(h, p[f"{name}_proj"]).reshape(-1, config.head_dim) for h in hs]
                if name != "v":
                    if config.qk_norm:
                        scale = p[f"{name}_norm"]["scale"]
                        split = [[norm(head, scale) for head in heads_] for heads_ in split]
                    split = [[rope(head, t) for head in s] for t, s in enumerate(split)]
                heads[name] = np.array(split)
            for t in range(len(xs)):
                outs = []
                for i in range(config.n_heads):
                    j = i // (config.n_heads // config.n_kv_heads)
                    s = heads["k"][: t + 1, j] @ heads["q"][t, i] / np.sqrt(config.head_dim)
                    w = np.exp(s - s.max())
                    outs.append(w / w.sum() @ heads["v"][: t + 1, j])
                x = xs[t] + linear(np.concatenate(outs), p["o_proj"])
                h = norm(x, p["mlp_norm"]["scale"])
                gate = linear(h, p["gate_proj"])
                act = gate / (1 + np.exp(-gate)) * linear(h, p["up_proj"])
                xs[t] = x + linear(act, p["down_proj"])
        head = tree["embedding"] if config.tie_embeddings else tree["head"]
        return [head @ norm(x, tree["norm"]["scale"]) for x in xs]

    return [row_logits(np.asarray(row)[np.asarray(m)]) for row, m in zip(tokens, mask, strict=True)]


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_a_float64_transcription_on_padded_rows(family):
    decoder = make(family)
    logits = jax.jit(Decoder.logits)(decoder, TOKENS, MASK)
    assert logits.dtype == jnp.float32
    for got, mask, want in zip(logits, MASK, transcription(decoder, TOKENS, MASK), strict=True):
        np.testing.assert_allclose(got[mask], want, atol=2e-4, rtol=2e-5)
        assert np.all(np.isfinite(got))


def test_padding_moves_no_logit_and_no_mask_is_a_full_mask():
    decoder = make("qwen2")
    logits = jax.jit(Decoder.logits)
    bare = logits(decoder, TOKENS[:, 2:])
    padded = logits(decoder, TOKENS, jnp.array([[0, 0] + [1] * 5] * 2, bool))
    np.testing.assert_allclose(padded[:, 2:], bare, atol=1e-4)
    full = logits(decoder, TOKENS, jnp.ones((2, 7), bool))
    np.testing.assert_allclose(logits(decoder, TOKENS), full, atol=1e-4)
    assert not np.allclose(full[:, 2:], bare, atol=1e-2)  # without the mask padding is read


def test_causal_by_exactly_zero_gradients():
    decoder = make("llama")
    graphdef, state = nnx.split(decoder)

    @jax.jit
    @jax.grad
    def at(state, t):
        # Every token id occurs once, so a row of the embedding's gradient is one position.
        return jnp.sum(nnx.merge(graphdef, state).hidden(jnp.arange(7)[None])[0, t] ** 2)

    for t in (0, 4):
        touched = np.any(np.asarray(at(state, t)["embedding"][...]) != 0, axis=-1)
        assert touched[: t + 1].all() and not touched[t + 1 :].any()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_block_names_exactly_the_registry_once_each(family):
    config = DecoderConfig(**SHAPE, **FAMILIES[family])
    block_fn, (params,) = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))).blocks()
    one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), params)
    half = jnp.ones((2, 7, 3))
    program = str(jax.make_jaxpr(block_fn)(one, jnp.ones((2, 7, 12)), half, half, MASK))
    # Which only adapters and sketched maps have.
    dense = sorted(set(NAMES) - {"lora_hidden", "sketch_hidden"})
    assert sorted(re.findall(r"name\[name=(\w+)\]", program)) == dense
    shapes = dict(re.findall(r":f32\[([\d,]+)\] = name\[name=(\w+)\]", program))
    by_name = {name: shape for shape, name in shapes.items()}
    assert f"2,7,{config.q_width}" in shapes and by_name["mlp_act"] == "2,7,20"


def test_bfloat16_compute_keeps_norms_softmax_and_logits_in_float32():
    decoder = make("qwen3", dtype="bfloat16", param_dtype="bfloat16")
    assert {x.dtype for x in jax.tree.leaves(nnx.state(decoder))} == {jnp.dtype(jnp.bfloat16)}
    program = str(jax.make_jaxpr(Decoder.logits)(decoder, TOKENS, MASK))
    for op in ("rsqrt", "exp", "cos", "integer_pow", "reduce_sum"):
        lines = [line for line in program.splitlines() if f"= {op}" in line]
        assert all(":f32[" in line for line in lines), op
    assert sum("= rsqrt" in line for line in program.splitlines()) == 5
    named = re.findall(r":(\w+)\[[\d,]+\] = name\[name=(\w+)\]", program)
    assert {dtype for dtype, name in named if name != "attn_lse"} == {"bf16"}
    assert ("f32", "attn_lse") in named
    assert jax.eval_shape(Decoder.hidden, decoder, TOKENS, MASK).dtype == jnp.bfloat16
    logits = jax.jit(Decoder.logits)(decoder, TOKENS, MASK)
    exact_graphdef, _ = nnx.split(make("qwen3"))  # float32 compute over the same bfloat16 weights
    exact = jax.jit(Decoder.logits)(nnx.merge(exact_graphdef, nnx.state(decoder)), TOKENS, MASK)
    error = jnp.linalg.norm((logits - exact)[MASK]) / jnp.linalg.norm(exact[MASK])
    assert 0 < error < 0.05


def test_storage_dtype_and_compute_dtype_are_apart():
    decoder = make("llama", dtype="bfloat16", param_dtype="float32")
    assert {x.dtype for x in jax.tree.leaves(nnx.state(decoder))} == {jnp.dtype(jnp.float32)}
    assert jax.eval_shape(Decoder.hidden, decoder, TOKENS).dtype == jnp.bfloat16


def test_initial_weights_do_not_depend_on_the_segments():
    config = DecoderConfig(**SHAPE, **FAMILIES["llama"])
    one, two = (Decoder(config, segments=s, rngs=nnx.Rngs(3)) for s in (None, (1, 2)))
    assert two.segment_lengths == (1, 2)
    kernels = [stack.up_proj.kernel[...] for stack in two.segments]
    whole = one.segments[0].up_proj.kernel[...]
    np.testing.assert_array_equal(whole, jnp.concatenate(kernels))
    assert not np.allclose(whole[0], whole[1])


A, B = Policy({}), Policy(default=Store())
RUNS = {
    (5,): (A,) * 5,
    (2, 3): (A, A, B, B, B),
    (1, 3, 1): (B, A, A, A, B),
    (1,) * 5: (A, B) * 2 + (A,),
}


@pytest.mark.parametrize("host", [False, True])
@pytest.mark.parametrize("lengths", RUNS)
def test_restacking_changes_nothing(lengths, host):
    decoder = make("qwen2", segments=(2, 1, 2), n_layers=5)
    if host:
        graphdef, state = nnx.split(decoder)
        decoder = nnx.merge(graphdef, jax.tree.map(np.asarray, state))
    result = segment(decoder, RUNS[lengths])
    assert result.segment_lengths == lengths and decoder.segment_lengths == (2, 1, 2)
    kind = np.ndarray if host else jax.Array
    assert all(isinstance(x, kind) for x in jax.tree.leaves(nnx.state(result)))
    for old, new in ((decoder, result), (result, segment(result, RUNS[(2, 3)]))):
        flat = [[jax.tree.leaves(p) for p in model.blocks()[1]] for model in (old, new)]
        for leaves in zip(*(map(np.concatenate, zip(*f, strict=True)) for f in flat), strict=True):
            np.testing.assert_array_equal(*leaves)
    if not host:
        logits = jax.jit(Decoder.logits)
        np.testing.assert_array_equal(logits(result, TOKENS, MASK), logits(decoder, TOKENS, MASK))


def test_stacks_that_fit_are_shared():
    decoder = make("llama", segments=(1, 2))
    result = segment(decoder, (A, B, B))
    for old, new in zip(decoder.segments, result.segments, strict=True):
        assert old.up_proj.kernel[...] is new.up_proj.kernel[...]
    assert result.embedding[...] is decoder.embedding[...]


@pytest.mark.parametrize("trained", [nnx.LoRAParam, nnx.Param])
def test_gradients_under_gradient_checkpointing_equal_those_without(trained):
    decoder = make("qwen3", lora=LoraConfig(rank=2, targets=("q_proj", "down_proj")))
    graphdef, trainable, frozen = nnx.split(decoder, trained, ...)

    def loss(trainable, policies):
        model = nnx.merge(graphdef, trainable, frozen)
        return jnp.mean(jnp.sin(model.logits(TOKENS, MASK, policies=policies)))

    def run(policies):
        traced = jax.jit(jax.grad(loss), static_argnums=1).trace(trainable, policies)
        grads = traced.lower().compile({**hl.compiler_options()})(trainable)
        return jax.tree.leaves(grads), str(traced.jaxpr).count("dot_general")

    (stored, few), (recomputed, many) = run(None), run((A,) * 3)
    for got, want in zip(recomputed, stored, strict=True):
        assert np.any(np.asarray(want) != 0)
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)
    assert many > few + 5  # the projections and the attention run again


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda d: d.hidden(TOKENS, policies=(A,) * 2), "found 2 policies for 3 blocks"),
        (lambda d: segment(d, (A,) * 4), "found 4 policies for 3 blocks"),
        (lambda d: d.hidden(TOKENS, MASK[:, 1:]), r"mask has shape \(2, 6\), expected .*\(2, 7\)"),
        (lambda d: d.hidden(TOKENS), "7 tokens, but the model reads at most 6"),
        (
            lambda d: Decoder(d.config, segments=(1, 1), rngs=nnx.Rngs(0)),
            r"segments \(1, 1\) hold 2 blocks, but the config has 3 layers",
        ),
    ],
)
def test_bad_arguments_are_named(call, match):
    short = "at most 6" in match
    decoder = make("llama", max_seq=6 if short else 99)
    jaxtyping.config.update("jaxtyping_disable", True)  # users run without checked annotations
    try:
        with pytest.raises(ValueError, match=match):
            call(decoder)
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"n_heads": 3}, "n_heads 3 is not a multiple of n_kv_heads 2"),
        ({"head_dim": 5}, "head_dim 5 is odd"),
        ({"dtype": "fp8"}, "dtype is 'fp8', expected one of float32"),
        ({"d_ff": 0}, "d_ff is 0, expected at least 1"),
    ],
)
def test_bad_configs_are_named(change, match):
    with pytest.raises(ValueError, match=match):
        DecoderConfig(**{**SHAPE, **FAMILIES["llama"], **change})
