"""The pinned generator: Random123's published answers, and jax's own threefry."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hilore_jax.logra.counter import GENERATOR, threefry2x32

# Random123's kat_vectors for threefry2x32, 20 rounds: counter, key, answer.
KNOWN = [
    ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
    ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
    ((0x243F6A88, 0x85A308D3), (0x13198A2E, 0x03707344), (0xC4923A9C, 0x483DF7A0)),
]


@pytest.mark.newest
@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
@pytest.mark.parametrize("jit", [False, True])
def test_known_answers(counter, key, answer, jit):
    function = jax.jit(threefry2x32) if jit else threefry2x32
    words = function(*(jnp.uint32(word) for word in (*key, *counter)))
    assert tuple(int(word) for word in words) == answer
    assert all(word.dtype == jnp.uint32 for word in words)


def test_agrees_with_the_threefry_of_jax():
    """`jax.random.split` under the counters that it documents: one 64-bit number for each key."""
    with jax.threefry_partitionable(True):
        key = jax.random.wrap_key_data(jnp.array([17, 99], jnp.uint32), impl="threefry2x32")
        expected = np.asarray(jax.random.key_data(jax.random.split(key, 300)))
    key, count = [np.full(300, word, np.uint32) for word in (17, 99, 0)], np.arange(300, dtype="u4")
    words = jax.jit(threefry2x32)(*key, count)
    np.testing.assert_array_equal(np.stack(words, -1), expected)


def test_arguments_broadcast():
    function, key = jax.jit(threefry2x32), np.uint32(5)
    words = function(key, key, np.arange(3, dtype="u4")[:, None], np.arange(4, dtype="u4")[None])
    alone = function(key, key, np.uint32(2), np.uint32(1))
    assert words[0].shape == words[1].shape == (3, 4)
    assert [int(word[2, 1]) for word in words] == [int(word) for word in alone]
    assert len(np.unique(np.stack(words))) == 24


def test_packets_name_the_generator():
    assert GENERATOR == "threefry2x32-20"
