"""A tiny random decoder and a batch with padding, for the tests of training."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import hilore_jax as hl
from hilore_jax.models.config import DecoderConfig, LoraConfig
from hilore_jax.models.decoder import Decoder
from hilore_jax.planning import solve
from hilore_jax.planning.menu import block_menu
from hilore_jax.training.batch import Batch
from hilore_jax.training.toy import CharTokenizer, count_task
from hilore_jax.training.trainer import Parts

TINY = DecoderConfig(
    vocab_size=64, d_model=16, d_ff=24, n_layers=2, n_heads=2, n_kv_heads=1, head_dim=8, max_seq=64
)
ROWS, PROMPT, COMPLETION = 4, 5, 4


def random_leaf(rng, shape):
    if len(shape) > 1 and shape[0] == TINY.vocab_size:
        return 0.1 * rng.normal(size=shape)
    if len(shape) == 1 or (len(shape) == 2 and shape[0] == TINY.n_layers):
        return 1 + 0.1 * rng.normal(size=shape)  # scales of norms
    return rng.normal(size=shape) / max(shape[-2], 10) ** 0.5  # LoRA's inner axis is short


@functools.cache
def tiny_decoder(lora=False, **changes):
    """A model with random weights, LoRA factors included, so that every leaf has a gradient.

    Filled by NumPy: compiling an initializer would take longer than a test.
    """
    config = dataclasses.replace(TINY, lora=LoraConfig(rank=2) if lora else None, **changes)
    rng = np.random.default_rng(0)
    abstract = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    return jax.tree.map(lambda x: jnp.asarray(random_leaf(rng, x.shape), x.dtype), abstract)


def make_batch(micro=2, seed=0, reference=True):
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


def quick_jit(function, **options):
    """`jax.jit` with remat's options and LLVM's optimizer off: the same program, compiled sooner.

    The pass list is that of the library, so that what is rematerialized stays so.
    """
    quick = hl.compiler_options() | {"xla_backend_optimization_level": 0}
    return jax.jit(function, compiler_options=quick, **options)


@pytest.fixture(scope="session")
def tiny():
    """Cached: a test that donates a state made of it must copy first."""
    return tiny_decoder


@pytest.fixture(scope="session")
def batch():
    return make_batch


@pytest.fixture(scope="session")
def quick():
    return quick_jit


@pytest.fixture(scope="session")
def parts():
    """Parts whose arrays a run may consume: the cached models are shared by the tests."""

    def build(**options):
        model = jax.tree.map(jnp.copy, tiny_decoder(**options))
        return Parts(model, CharTokenizer(), count_task(limit=3))

    return build


@pytest.fixture(autouse=True)
def short_menus(monkeypatch):
    """Plans choose from eight entries: the backward of each is traced, most of a small plan's time.

    What is in a menu is `tests/planning/test_menu.py`'s.
    """
    monkeypatch.setattr(solve, "block_menu", functools.partial(block_menu, limit=8))
