"""A small trainer's run: kernels of a few layers and the factors of its updates."""

import jax.numpy as jnp
import numpy as np

from hilore_jax.logra import Sketches, make_full_sync, make_packet, move_kernels

SKETCHES = Sketches(rank=4, seed=5)
SHAPES = {"blocks.0.q_proj": (14, 6), "blocks.0.down_proj": (12, 10), "blocks.1.q_proj": (12, 10)}


def kernels_of(dtype=jnp.float32):
    rng = np.random.default_rng(0)
    return {layer: jnp.asarray(rng.normal(size=shape), dtype) for layer, shape in SHAPES.items()}


def factors_of(update, size=1e-3):
    rng = np.random.default_rng(update + 1)
    drawn = {layer: rng.normal(size=(shape[1], SKETCHES.rank)) for layer, shape in SHAPES.items()}
    return {layer: jnp.asarray(size * drawn[layer], jnp.bfloat16) for layer in SHAPES}


def packet_of(update):
    return make_packet(update, SKETCHES, factors_of(update))


def trained(kernels, updates):
    """The trainer's own weights: no packets, no bytes, nothing donated."""
    for update in updates:
        kernels = move_kernels(kernels, factors_of(update), SKETCHES, update)
    return kernels


def start_of(dtype=jnp.float32, update=0):
    return make_full_sync(update, SKETCHES, trained(kernels_of(dtype), range(update)))


def same_bits(found, expected):
    assert found.keys() == expected.keys()
    return all(
        found[layer].dtype == expected[layer].dtype
        and np.asarray(found[layer]).tobytes() == np.asarray(expected[layer]).tobytes()
        for layer in found
    )
