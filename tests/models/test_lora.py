"""LoRA adapters: where they start, what they compute, what is trained, and merging."""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from flax import nnx

from hilore_jax.models import Decoder, DecoderConfig, LoraConfig, add_lora, merge_lora
from hilore_jax.models.lora import LoraDense

CONFIG = DecoderConfig(
    vocab_size=23, d_model=12, d_ff=20, n_layers=3, n_heads=4, n_kv_heads=2, head_dim=6,
    qkv_bias=True,
)  # fmt: skip
LORA = LoraConfig(rank=2, alpha=6.0, targets=("q_proj", "v_proj", "down_proj"))
TOKENS = jax.random.randint(jax.random.key(5), (2, 6), 0, 23)
logits = jax.jit(Decoder.logits)


@contextlib.contextmanager
def jaxtyping_off():
    """The errors that users meet, who run without checked annotations."""
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


def moved(decoder):
    """The decoder with adapters away from their start."""
    graphdef, lora, rest = nnx.split(decoder, nnx.LoRAParam, ...)
    noise = lambda x: x + 0.2 * jnp.cos(jnp.arange(x.size) * 2.3).reshape(x.shape)  # noqa: E731
    return nnx.merge(graphdef, jax.tree.map(noise, lora), rest)


def test_adapters_start_as_the_base_and_share_its_arrays():
    base = Decoder(CONFIG, segments=(1, 2), rngs=nnx.Rngs(0))
    adapted = add_lora(base, LORA, rngs=nnx.Rngs(1))
    np.testing.assert_array_equal(logits(adapted, TOKENS), logits(base, TOKENS))
    assert adapted.segments[0].q_proj.kernel[...] is base.segments[0].q_proj.kernel[...]
    assert not np.allclose(logits(moved(adapted), TOKENS), logits(base, TOKENS), atol=1e-2)
    a = adapted.segments[1].q_proj.lora_a[...]
    assert a.dtype == jnp.float32 and not np.allclose(a[0], a[1])


def test_the_map_is_x_w_plus_b_plus_scaled_x_a_b():
    config = dataclasses.replace(CONFIG, lora=LORA)
    linear = LoraDense("q_proj", config, rngs=nnx.Rngs(0))
    linear.lora_b.set_value(jnp.cos(jnp.arange(48.0)).reshape(2, 24))
    assert linear.bias is not None
    linear.bias.set_value(jnp.arange(24.0))
    x = jax.random.normal(jax.random.key(1), (3, 5, 12))
    w, b, a, bb = (
        np.asarray(p[...], np.float64)
        for p in (linear.kernel, linear.bias, linear.lora_a, linear.lora_b)
    )
    want = np.asarray(x, np.float64) @ (w + 3.0 * a @ bb) + b  # alpha / rank = 3
    np.testing.assert_allclose(linear(x), want, atol=1e-5)
    assert linear(x.astype(jnp.bfloat16)).dtype == jnp.bfloat16


def test_only_targets_are_adapted_and_only_adapters_are_trained():
    decoder = moved(Decoder(dataclasses.replace(CONFIG, lora=LORA), rngs=nnx.Rngs(0)))
    graphdef, trainable, frozen = nnx.split(decoder, nnx.LoRAParam, ...)
    paths = {path[2] for path, _ in nnx.to_flat_state(trainable)}
    assert paths == set(LORA.targets)
    assert not any("lora" in str(path[-1]) for path, _ in nnx.to_flat_state(frozen))

    @jax.jit
    @jax.grad
    def grad(trainable):
        return jnp.mean(nnx.merge(graphdef, trainable, frozen).logits(TOKENS) ** 2)

    for leaf in jax.tree.leaves(grad(trainable)):
        assert np.any(np.asarray(leaf) != 0)


@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
def test_merge_keeps_the_function_and_drops_the_adapters(param_dtype):
    config = dataclasses.replace(CONFIG, lora=LORA, param_dtype=param_dtype)
    decoder = moved(Decoder(config, segments=(2, 1), rngs=nnx.Rngs(0)))
    merged = merge_lora(decoder)
    assert merged.config == dataclasses.replace(config, lora=None)
    assert merged.segment_lengths == (2, 1)
    assert not jax.tree.leaves(nnx.state(merged, nnx.LoRAParam))
    assert merged.segments[0].q_proj.kernel[...].dtype == jnp.dtype(param_dtype)
    atol = 1e-5 if param_dtype == "float32" else 0.03
    np.testing.assert_allclose(logits(merged, TOKENS), logits(decoder, TOKENS), atol=atol)
    kernels = [d.segments[0].q_proj.kernel[...] for d in (merged, decoder)]
    assert not np.array_equal(*kernels)


def test_bad_adapters_are_named():
    with pytest.raises(ValueError, match=r"\['qkv'\], expected some of q_proj"):
        LoraConfig(targets=("q_proj", "qkv"))
    with pytest.raises(ValueError, match="rank is 0"):
        LoraConfig(rank=0)
    with jaxtyping_off(), pytest.raises(ValueError, match="'q_proj', expected a tuple"):
        LoraConfig(targets="q_proj")  # pyright: ignore[reportArgumentType]
    adapted = Decoder(dataclasses.replace(CONFIG, lora=LORA), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="already has adapters"):
        add_lora(adapted, LORA, rngs=nnx.Rngs(1))
