"""Predicted and realized KL against whole logits in long double, in chunks that hold no whole."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hilore_jax.logra import predicted_kl, realized_kl

BATCH, SEQ, D, VOCAB = 2, 7, 5, 53
CHUNKS = [(128, 16_384), (6, 16), (1, 10), (4, 53), (14, 1)]
predicted = jax.jit(predicted_kl, static_argnames=("positions", "words"))
realized = jax.jit(realized_kl, static_argnames=("positions", "words"))


def case(size, scale=1.0, vocab=VOCAB):
    rng = np.random.default_rng(3)
    hidden, tangent = rng.normal(size=(2, BATCH, SEQ, D))
    head = rng.normal(size=(vocab, D))
    return [np.asarray(x, np.float32) for x in (scale * hidden, size * tangent, head)]


def logits(hidden, head, temperature=1.0):
    wide = np.longdouble(hidden), np.longdouble(head)  # float64 has no digit left of 1e-16 nats
    return np.einsum("bsd,vd->bsv", *wide) / temperature


def log_softmax(z):
    z = z - z.max(-1, keepdims=True)
    return z - np.log(np.exp(z).sum(-1, keepdims=True))


def half_variance(hidden, tangent, head, temperature: float = 1.0):
    p = np.exp(log_softmax(logits(hidden, head, temperature)))
    dz = logits(tangent, head, temperature)
    mean = (p * dz).sum(-1, keepdims=True)
    return 0.5 * (p * (dz - mean) ** 2).sum(-1)


def divergence(hidden, moved, head, temperature=1.0):
    log_p, log_q = (log_softmax(logits(h, head, temperature)) for h in (hidden, moved))
    return (np.exp(log_p) * (log_p - log_q)).sum(-1)


@pytest.mark.parametrize(("positions", "words"), CHUNKS)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_predicted_kl(positions, words, temperature):
    args = case(0.1)
    got = predicted(*args, temperature, positions=positions, words=words)
    assert got.shape == (BATCH, SEQ) and got.dtype == jnp.float32
    np.testing.assert_allclose(got, half_variance(*args, temperature=temperature), rtol=2e-5)
    assert not np.allclose(got, half_variance(*args, temperature=1.6 - temperature), rtol=0.1)


@pytest.mark.parametrize(("positions", "words"), CHUNKS)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_realized_kl(positions, words, temperature):
    hidden, tangent, head = case(0.1)
    args = hidden, hidden + tangent, head
    got = realized(*args, temperature, positions=positions, words=words)
    assert got.shape == (BATCH, SEQ) and got.dtype == jnp.float32
    np.testing.assert_allclose(got, divergence(*args, temperature=temperature), rtol=5e-5)
    assert not np.allclose(got, divergence(args[1], args[0], head, temperature), rtol=0.01)


@pytest.mark.parametrize("words", [10, 16_384])
def test_displacements_as_small_as_float32_sees(words):
    """KL of 1e-12 nats: a difference of log-probabilities in float32 has no digit of it."""
    hidden, _, head = case(1.0)
    moved = hidden + case(1e-6)[1]
    step = moved - hidden  # what float32 made of it
    exact = divergence(hidden, moved, head)
    assert 1e-14 < exact.max() < 1e-10
    np.testing.assert_allclose(realized(hidden, moved, head, words=words), exact, rtol=1e-3)
    expected = half_variance(hidden, step, head)
    np.testing.assert_allclose(predicted(hidden, step, head, words=words), expected, rtol=2e-5)
    plain = [np.asarray(jax.nn.log_softmax(h @ head.T)) for h in (hidden, moved)]
    lost = np.sum(np.exp(plain[0]) * (plain[0] - plain[1]), -1)
    assert np.median(np.abs(lost / exact - 1)) > 10


@pytest.mark.parametrize("words", [10, 16_384])
def test_logits_of_ten_thousand(words):
    """Whole numbers, which float32 holds: no exponential may overflow."""
    rng = np.random.default_rng(0)
    head = np.asarray(rng.integers(-4, 5, size=(VOCAB, D)), np.float32)
    hidden = np.asarray(rng.integers(-1000, 1001, size=(BATCH, SEQ, D)), np.float32)
    hidden[0, 0] = 0
    hidden[:, 1:3] = np.asarray(rng.integers(-1, 2, size=(BATCH, 2, D)), np.float32)
    tangent = np.asarray(rng.normal(size=hidden.shape) * 0.05, np.float32)
    assert np.abs(logits(hidden, head)).max() > 1e4
    got = predicted(hidden, tangent, head, words=words)
    np.testing.assert_allclose(got, half_variance(hidden, tangent, head), rtol=2e-5, atol=1e-12)
    moved = hidden + tangent
    got = realized(hidden, moved, head, words=words)
    exact = divergence(hidden, moved, head)
    np.testing.assert_allclose(got, exact, rtol=1e-3, atol=1e-9)
    assert np.median(exact) < 1e-9 < exact.max()


def test_a_common_shift_of_the_logits_moves_nothing():
    hidden, tangent, head = case(0.1)
    head[:, 0] = 1.0
    shift = np.zeros_like(tangent)
    shift[..., 0] = 8.0
    assert float(predicted(hidden, shift, head, words=10).max()) < 1e-9
    assert float(realized(hidden, hidden + shift, head, words=10).max()) < 1e-9
    both = predicted(hidden, tangent + shift, head, words=10)
    np.testing.assert_allclose(both, half_variance(hidden, tangent, head), rtol=1e-3)


def test_predicted_is_realized_for_small_steps_alone():
    hidden, tangent, head = case(1.0)
    ratios = {}
    for size in (1e-3, 1e-2, 3.0):
        step = np.asarray(size * tangent, np.float32)
        guess = predicted(hidden, step, head)
        ratios[size] = np.asarray(realized(hidden, hidden + step, head) / guess)
    assert np.abs(ratios[1e-3] - 1).max() < 5e-3
    assert np.abs(ratios[1e-3] - 1).mean() < np.abs(ratios[1e-2] - 1).mean() < 0.02
    assert np.abs(ratios[3.0] - 1).mean() > 0.3


@pytest.mark.parametrize("words", [10, 16_384])
@pytest.mark.parametrize("size", [3.0, 30.0])
def test_large_steps(size, words):
    """Displaced logits whose exponential alone would overflow, of words that hardly occur."""
    hidden, tangent, head = case(size, scale=5.0)
    head[3] = [0, 0, 0, 0, 8]
    hidden[..., 4], tangent[..., 4] = -12.0, 12.5
    exact = divergence(hidden, hidden + tangent, head)
    assert logits(tangent, head)[..., 3].min() > 89
    got = np.asarray(realized(hidden, hidden + tangent, head, words=words))
    fits = exact < 80
    assert fits.any() and np.all(np.isfinite(got[fits]))
    np.testing.assert_allclose(got[fits], exact[fits], rtol=1e-3)
    assert np.all(got[~fits] > 79)


def test_no_displacement_and_no_vocabulary_to_choose_from():
    hidden, tangent, head = case(0.1)
    assert not np.any(predicted(hidden, 0 * tangent, head))
    assert not np.any(realized(hidden, hidden, head))
    one = head[:1]
    assert not np.any(predicted(hidden, tangent, one)) and not np.any(realized(hidden, hidden, one))


def test_bfloat16_states():
    hidden, tangent, head = (jnp.asarray(x, jnp.bfloat16) for x in case(0.1))
    got = predicted(hidden, tangent, head, words=10)
    assert got.dtype == jnp.float32
    wide = [np.asarray(x, np.float32) for x in (hidden, tangent, head)]
    np.testing.assert_allclose(got, half_variance(wide[0], wide[1], wide[2]), rtol=1e-4)


def test_what_is_not_finite_is_seen():
    hidden, tangent, head = case(0.1)
    tangent[0, 3] = np.nan
    got = np.asarray(predicted(hidden, tangent, head, words=10))
    assert np.isnan(got[0, 3]) and np.isnan(got).sum() == 1


@pytest.mark.parametrize("function", [predicted_kl, realized_kl])
def test_the_logits_are_never_whole(function):
    batch, seq, d, vocab = 2, 64, 8, 2000
    states = jax.ShapeDtypeStruct((batch, seq, d), jnp.float32)
    head = jax.ShapeDtypeStruct((vocab, d), jnp.float32)

    def temporaries(**chunks):
        made = jax.jit(lambda h, t, u: function(h, t, u, 1.0, **chunks))
        memory = made.lower(states, states, head).compile().memory_analysis()
        assert memory is not None
        return memory.temp_size_in_bytes

    whole, row = batch * seq * vocab * 4, seq * vocab * 4
    assert temporaries(positions=batch * seq, words=vocab) >= whole
    # Ten arrays of a chunk: 16 tokens' logits for 200 words. One row of them would be more.
    assert temporaries(positions=16, words=200) < 10 * 16 * 200 * 4 + 16 * batch * seq * d < row
    assert temporaries(positions=16, words=vocab) < whole
    assert temporaries(positions=batch * seq, words=100) < whole


def test_under_shard_map():
    """Each device has its rows; the head is everybody's."""
    args = case(0.1)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("data")
    sharded = jax.jit(
        jax.shard_map(
            lambda h, t, u: predicted_kl(h, t, u, words=10),
            mesh=mesh,
            in_specs=(spec, spec, jax.sharding.PartitionSpec()),
            out_specs=spec,
        )
    )
    expected = half_variance(args[0], args[1], args[2])
    np.testing.assert_allclose(sharded(*args), expected, rtol=2e-5)
