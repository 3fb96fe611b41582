"""A tiny random decoder and a batch with padding, for the tests of training."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from hilore_jax.models.config import DecoderConfig, LoraConfig
from hilore_jax.models.decoder import Decoder
from hilore_jax.training.step import Batch
from hilore_jax.training.toy import CharTokenizer, count_task
from hilore_jax.training.trainer import Parts

TINY = DecoderConfig(
    vocab_size=64, d_model=32, d_ff=48, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, max_seq=64
)
ROWS, PROMPT, COMPLETION = 4, 5, 4


@functools.cache
def tiny_decoder(lora=False, seed=0, **changes):
    config = dataclasses.replace(TINY, lora=LoraConfig(rank=2) if lora else None, **changes)
    model = Decoder(config, rngs=nnx.Rngs(seed))
    if lora:  # adapters away from zero, so that every factor has a gradient
        _, adapters, _ = nnx.split(model, nnx.LoRAParam, ...)
        keys = iter(jax.random.split(jax.random.key(5), len(jax.tree.leaves(adapters))))
        noise = lambda x: x + 0.3 * jax.random.normal(next(keys), x.shape)  # noqa: E731
        nnx.update(model, jax.tree.map(noise, adapters))
    return model


def make_batch(micro=1, seed=0, reference=True):
    """Rows with uneven prompts and completions, two-signed advantages, clipped tokens."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(2, 64, (ROWS, PROMPT + COMPLETION)).astype(np.int32)
    prompt = np.arange(PROMPT) >= np.array([[0], [2], [4], [1]])
    completion = np.arange(COMPLETION) < np.array([[4], [1], [3], [2]])
    near = -np.log(64) + rng.normal(size=(ROWS, COMPLETION)) * 0.3
    cut = lambda x: jnp.asarray(x.reshape(micro, ROWS // micro, *x.shape[1:]))  # noqa: E731
    return Batch(
        tokens=cut(tokens),
        attention_mask=cut(np.concatenate([prompt, completion], axis=1)),
        completion_mask=cut(completion),
        logp_old=cut(near.astype(np.float32)),
        logp_ref=cut((near + 0.1).astype(np.float32)) if reference else None,
        advantages=cut(np.array([1.0, -1.5, 0.5, -0.25], np.float32)),
    )


@pytest.fixture
def tiny():
    """Cached: a test that donates a state made of it must copy first."""
    return tiny_decoder


@pytest.fixture
def batch():
    return make_batch


@pytest.fixture
def parts():
    def build(**options):
        return Parts(tiny_decoder(**options), CharTokenizer(), count_task(limit=3))

    return build
