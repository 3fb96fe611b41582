"""Decoding with the cache against the forward over the growing sequence."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import hilore_jax as hl
from hilore_jax.models import Cache, Decoder, DecoderConfig

SHAPE = {"vocab_size": 31, "d_model": 12, "d_ff": 20, "n_layers": 3, "head_dim": 6}
FAMILIES = {
    "llama, tied": {"n_heads": 4, "n_kv_heads": 2},
    "qwen2, untied": {"n_heads": 4, "n_kv_heads": 1, "qkv_bias": True, "tie_embeddings": False},
    "qwen3": {"n_heads": 2, "n_kv_heads": 2, "qk_norm": True},
}
MASK = jnp.array([[0, 0, 1, 1], [1, 1, 1, 1], [0, 0, 0, 1]], bool)


def make(seed=0, segments=None, **extra):
    config = DecoderConfig(**SHAPE, **extra)
    decoder = Decoder(config, segments=segments, rngs=nnx.Rngs(seed))
    noise = lambda x: x + 0.3 * jax.random.normal(jax.random.key(1), x.shape)  # noqa: E731
    graphdef, state = nnx.split(decoder)  # so that biases and scales are not at 0 and 1
    return nnx.merge(graphdef, jax.tree.map(noise, state))


@pytest.mark.parametrize(
    ("family", "segments"), list(zip(FAMILIES, [(1, 2), None, (2, 1)], strict=True))
)
def test_decode_equals_the_forward_over_the_growing_sequence(family, segments):
    decoder = make(segments=segments, **FAMILIES[family])
    tokens = jax.random.randint(jax.random.key(2), (3, 9), 0, 31)
    mask = jnp.concatenate([MASK, jnp.ones((3, 5), bool)], axis=1)
    # Causal: the last hidden state of every shorter sequence, from one forward over the longest.
    forward = jax.jit(Decoder.hidden)(decoder, tokens, mask)
    hidden, cache = jax.jit(Decoder.prefill, static_argnums=3)(decoder, tokens[:, :4], MASK, 10)
    np.testing.assert_allclose(hidden, forward[:, 3], atol=1e-5)
    decode = jax.jit(Decoder.decode, compiler_options=hl.compiler_options())
    for t in range(4, 9):
        hidden, cache = decode(decoder, tokens[:, t], cache)
        np.testing.assert_allclose(hidden, forward[:, t], atol=1e-5)
    assert int(cache.index) == 9
    np.testing.assert_array_equal(cache.position, [7, 9, 6])
    np.testing.assert_array_equal(cache.valid, jnp.pad(mask, ((0, 0), (0, 1))))


def test_decode_reads_the_cache_and_no_padding():
    decoder = make(**FAMILIES["llama, tied"])
    tokens = jnp.arange(12).reshape(3, 4)
    _, cache = decoder.prefill(tokens, MASK, 6)
    token = jnp.array([1, 2, 3])
    decode = jax.jit(Decoder.decode)
    hidden, _ = decode(decoder, token, cache)
    keys = jnp.where(cache.valid[None, :, :, None], cache.keys, 1e6)
    values = jnp.where(cache.valid[None, :, :, None], cache.values, 1e6)
    dirty = cache._replace(keys=keys, values=values)
    np.testing.assert_array_equal(decode(decoder, token, dirty)[0], hidden)
    for other in ({"keys": -cache.keys}, {"values": -cache.values}):  # what is valid is read
        changed = decode(decoder, token, cache._replace(**other))[0]
        assert not np.allclose(changed, hidden)


def test_cache_is_updated_in_place():
    decoder = make(**FAMILIES["llama, tied"])
    slots = 512
    _, cache = decoder.prefill(jnp.zeros((3, 4), jnp.int32), MASK, slots)
    compiled = (
        jax.jit(Decoder.decode, donate_argnums=(2,), compiler_options=hl.compiler_options())
        .lower(decoder, jnp.zeros(3, jnp.int32), cache)
        .compile()
    )
    memory = compiled.memory_analysis()
    assert memory is not None
    whole = cache.keys.nbytes + cache.values.nbytes
    assert memory.alias_size_in_bytes >= whole
    # Reading one layer takes copies of that layer's slots, never of the whole cache.
    assert memory.temp_size_in_bytes < whole
    scan = str(jax.make_jaxpr(Decoder.decode)(decoder, jnp.zeros(3, jnp.int32), cache))
    assert "dynamic_update_slice" in scan


def test_cache_is_an_ordinary_pytree():
    _, cache = make(**FAMILIES["qwen3"]).prefill(jnp.zeros((3, 4), jnp.int32), MASK, 5)
    assert cache.keys.shape == (3, 3, 5, 12)
    shapes = jax.eval_shape(lambda c: c, cache)
    assert isinstance(shapes, Cache) and shapes.keys.shape == cache.keys.shape
    assert len(jax.tree.leaves(jax.tree.map(lambda x: None, cache))) == 0


def test_short_and_full_caches_are_refused():
    decoder = make(**FAMILIES["llama, tied"])
    tokens = jnp.zeros((3, 4), jnp.int32)
    with pytest.raises(ValueError, match="cache_len is 3 slots, but the prompt has 4 tokens"):
        decoder.prefill(tokens, MASK, 3)
    _, cache = decoder.prefill(tokens, MASK, 4)
    with pytest.raises(ValueError, match="the cache is full: all 4 slots are written"):
        decoder.decode(jnp.zeros(3, jnp.int32), cache)
