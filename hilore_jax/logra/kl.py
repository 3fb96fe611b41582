"""How far a displacement of the logits moves the policy: predicted and realized KL, in chunks.

Positions and vocabulary are cut, so that neither the logits nor their derivative are ever whole.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from hilore_jax import tracing

POSITIONS = 128
"""Tokens whose logits exist at one time."""
WORDS = 16_384
"""Words of the vocabulary whose logits exist at one time."""


def predicted_kl(
    hidden: Float[Array, "batch seq d_model"],
    tangent: Float[Array, "batch seq d_model"],
    unembedding: Float[Array, "vocab d_model"],
    temperature: ArrayLike = 1.0,
    *,
    positions: int = POSITIONS,
    words: int = WORDS,
) -> Float[Array, "batch seq"]:
    """`KL_t ~= Var_{p_t}(dz_t / T) / 2` along a displacement of the hidden states (methods 2.3).

    Args:
        hidden: hidden states after the final norm.
        tangent: their derivative along the displacement, `jax.jvp`'s.
        unembedding: the head, which the displacement does not move.
        temperature: T of the rollouts.
        positions: tokens at a time.
        words: words of the vocabulary at a time.

    Returns:
        `[batch, seq]` nats, float32.

    Example:
        >>> hidden, tangent = jnp.zeros((1, 1, 2)), jnp.array([[[0.1, -0.1]]])
        >>> round(float(predicted_kl(hidden, tangent, jnp.eye(2))[0, 0]), 6)
        0.005
    """

    def chunk(h: Array, dh: Array) -> Array:
        moments = _moments(h, dh, unembedding, temperature, words)
        return 0.5 * moments.square / moments.weight

    return _over_positions(chunk, hidden, tangent, positions)


def realized_kl(
    hidden: Float[Array, "batch seq d_model"],
    moved: Float[Array, "batch seq d_model"],
    unembedding: Float[Array, "vocab d_model"],
    temperature: ArrayLike = 1.0,
    *,
    positions: int = POSITIONS,
    words: int = WORDS,
) -> Float[Array, "batch seq"]:
    """`KL(p_t || p'_t)` of the policies before and after a step, on the same tokens.

    As `log E_p[exp(dz)] - E_p[dz]` of the logits' difference dz, about its mean: steps are so small
    that the two log-probabilities agree in most of their digits. Above 88 nats it is infinite.

    Args:
        hidden: hidden states before the step, after the final norm.
        moved: after the step.
        unembedding: the head, the same before and after.
        temperature: T of the rollouts.
        positions: tokens at a time.
        words: words of the vocabulary at a time.

    Returns:
        `[batch, seq]` nats, float32.

    Example:
        >>> before, after = jnp.zeros((1, 1, 2)), jnp.array([[[0.1, -0.1]]])
        >>> round(float(realized_kl(before, after, jnp.eye(2))[0, 0]), 6)
        0.004992
    """

    def chunk(h: Array, dh: Array) -> Array:
        moments = _moments(h, dh, unembedding, temperature, words)

        def add(total: Array, z: Array, dz: Array) -> Array:
            d = dz - moments.mean[..., None]
            log_p = z - moments.largest[..., None] - jnp.log(moments.weight)[..., None]
            p = jnp.exp(log_p)
            # Below 1e-2 the difference of expm1(d) and d loses digits that its series keeps; above
            # 20, exp(d) alone may be more than float32 holds where p exp(d) is not.
            series = d * d * (0.5 + d * (1 / 6 + d / 24))
            plain = jnp.expm1(jnp.minimum(d, 20.0)) - d
            term = p * jnp.where(jnp.abs(d) < 0.01, series, plain)
            return total + jnp.sum(jnp.where(d > 20, jnp.exp(log_p + d) - p * (1 + d), term), -1)

        excess = _over_words(
            add, jnp.zeros_like(moments.mean), h, dh, unembedding, temperature, words
        )
        return jnp.log1p(excess)

    wide = moved.astype(jnp.float32) - hidden.astype(jnp.float32)
    return _over_positions(chunk, hidden, wide, positions)


class _Moments(NamedTuple):
    """Of dz under weights exp(z - largest): `[batch, chunk]` each."""

    largest: Array
    weight: Array
    mean: Array
    square: Array  # sum of weighted squares about the mean


def _moments(hidden, tangent, unembedding, temperature, words: int) -> _Moments:
    zero = jnp.zeros(hidden.shape[:2], jnp.float32)

    def add(known: _Moments, z: Array, dz: Array) -> _Moments:
        """Chan, Golub and LeVeque's update: no difference of large sums."""
        largest = jnp.maximum(known.largest, jnp.max(z, axis=-1))
        e = jnp.exp(z - largest[..., None])
        weight = jnp.sum(e, axis=-1)
        some = jnp.where(weight > 0, weight, 1.0)
        mean = jnp.sum(e * jnp.where(e > 0, dz, 0.0), axis=-1) / some
        square = jnp.sum(e * jnp.square(jnp.where(e > 0, dz - mean[..., None], 0.0)), axis=-1)
        before = known.weight * jnp.exp(known.largest - largest)
        total = before + weight
        apart = mean - known.mean
        return _Moments(
            largest,
            total,
            known.mean + apart * weight / total,
            known.square * jnp.exp(known.largest - largest)
            + square
            + jnp.square(apart) * before * weight / total,
        )

    start = _Moments(zero - jnp.inf, zero, zero, zero)
    return _over_words(add, start, hidden, tangent, unembedding, temperature, words)


def _over_words(add, start, hidden, tangent, unembedding, temperature, words: int):
    """Folds `add(carry, z, dz)` over blocks of the vocabulary."""
    vocab = unembedding.shape[0]
    size = min(words, vocab)
    count = -(-vocab // size)

    def body(index, carry):
        # The last block is moved back to fit; words that it shares have no weight there.
        begin = jnp.minimum(index * size, vocab - size)
        rows = jax.lax.dynamic_slice_in_dim(unembedding, begin, size)
        fresh = begin + jnp.arange(size) >= index * size

        def logits(x: Array) -> Array:
            wide = jnp.einsum(
                "bsd,vd->bsv", x, rows.astype(x.dtype), preferred_element_type=jnp.float32
            )
            return wide / temperature

        return add(carry, jnp.where(fresh, logits(hidden), -jnp.inf), logits(tangent))

    start = jax.tree.map(lambda x: tracing.varying_like(x, (hidden, tangent, unembedding)), start)
    return jax.lax.fori_loop(0, count, body, start)


def _over_positions(function, hidden, tangent, positions: int) -> Array:
    """`function(hidden, tangent)` of chunks of the sequence, put together again."""
    batch, seq, _ = hidden.shape
    size = max(1, min(seq, positions // max(batch, 1)))
    count = -(-seq // size)
    padding = ((0, 0), (0, count * size - seq), (0, 0))
    hidden, tangent = jnp.pad(hidden, padding), jnp.pad(tangent, padding)

    def body(start):
        cut = (jax.lax.dynamic_slice_in_dim(x, start, size, axis=1) for x in (hidden, tangent))
        return function(*cut)

    chunks = jax.lax.map(body, jnp.arange(count) * size)
    return jnp.moveaxis(chunks, 0, 1).reshape(batch, count * size)[:, :seq]
