"""Chunked vocabulary maths of `token_logprobs`: the forward by positions, the backward by words."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from hilore_jax.grpo.checks import at_least_float32


@dataclass(frozen=True)
class Settings:
    """What is static about a call."""

    chunk: int  # positions of a sequence at a time
    entropy: bool


class LogitInputs(NamedTuple):
    """What it takes to recompute logits and differentiate through them."""

    hidden: Array  # [batch, seq, d_model]
    unembedding: Array  # [vocab, d_model]
    targets: Array  # [batch, seq] integers
    temperature: Array  # scalar
    lse: Array  # [batch, seq] log-sum-exp of the logits
    entropy: Array | None  # [batch, seq]


def _logits(hidden, unembedding, temperature) -> Array:
    """`[batch, chunk, vocab]` in float32 or wider."""
    dtype = at_least_float32(hidden)
    logits = jnp.einsum("bsd,vd->bsv", hidden, unembedding, preferred_element_type=dtype)
    return logits / temperature


def _chunk_values(entropy: bool, hidden, unembedding, targets, temperature):
    """logp, log-sum-exp, entropy (or None) and logits of one chunk."""
    logits = _logits(hidden, unembedding, temperature)
    lse = jax.nn.logsumexp(logits, axis=-1)
    vocab = logits.shape[-1]
    index = jnp.clip(targets, 0, vocab - 1)
    chosen = jnp.take_along_axis(logits, index[..., None], axis=-1)[..., 0]
    logp = jnp.where(targets == index, chosen - lse, jnp.full_like(lse, jnp.nan))
    if not entropy:
        return logp, lse, None, logits
    shifted = logits - lse[..., None]
    return logp, lse, -jnp.sum(jnp.exp(shifted) * shifted, axis=-1), logits


def _over_chunks(function, settings: Settings, hidden, targets):
    """`function(hidden_chunk, targets_chunk)` along seq, its outputs put together again."""
    seq = hidden.shape[1]
    count = -(-seq // settings.chunk)
    size = -(-seq // count)
    padding = count * size - seq
    hidden = jnp.pad(hidden, ((0, 0), (0, padding), (0, 0)))
    targets = jnp.pad(targets, ((0, 0), (0, padding)))

    def body(carry, start):
        # Cut by position rather than stacked as scan inputs: no transposed copy of `hidden`.
        return carry, function(
            jax.lax.dynamic_slice_in_dim(hidden, start, size, axis=1),
            jax.lax.dynamic_slice_in_dim(targets, start, size, axis=1),
        )

    def join(stacked):
        rows = jnp.moveaxis(stacked, 0, 1)
        return rows.reshape(rows.shape[0], count * size, *rows.shape[3:])[:, :seq]

    starts = jnp.arange(count, dtype=jnp.int32) * size
    return jax.tree.map(join, jax.lax.scan(body, None, starts)[1])


# Jitted so that eager calls compile once; inside another jit it is inlined.
@partial(jax.jit, static_argnums=(0, 1))
def forward(settings: Settings, keep: bool, hidden, unembedding, targets, temperature):
    """logp, log-sum-exp, entropy or None, and with `keep` d logp / d hidden, else None."""
    unembedding = unembedding.astype(hidden.dtype)

    def chunk(hidden, targets):
        logp, lse, entropy, logits = _chunk_values(
            settings.entropy, hidden, unembedding, targets, temperature
        )
        if not keep:
            return logp, lse, entropy, None
        minus_p = -jnp.exp(logits - lse[..., None])
        # one-hot - p, with 1 - p of the target from expm1: a sure token's derivative is the small
        # difference of two large terms, and is taken before anything is rounded to bfloat16.
        hit = jax.lax.broadcasted_iota(targets.dtype, logits.shape, 2) == targets[..., None]
        score = jnp.where(hit, -jnp.expm1(logp)[..., None], minus_p)
        derivative = jnp.einsum(
            "bsv,vd->bsd",
            score.astype(hidden.dtype),
            unembedding,
            preferred_element_type=logits.dtype,
        )
        return logp, lse, entropy, derivative / temperature

    return _over_chunks(chunk, settings, hidden, targets)


def plain(settings: Settings, hidden, unembedding, targets, temperature):
    """The same values by differentiable operations only, for forward mode."""
    unembedding = unembedding.astype(hidden.dtype)

    @jax.checkpoint
    def chunk(hidden, unembedding, targets):
        return _chunk_values(settings.entropy, hidden, unembedding, targets, temperature)[0:3:2]

    return _over_chunks(
        lambda hidden, targets: chunk(hidden, unembedding, targets), settings, hidden, targets
    )


@partial(jax.jit, static_argnums=(0, 1))
def recomputing_backward(
    settings: Settings,
    wanted: tuple[bool, bool],  # dhidden, dW
    inputs: LogitInputs,
    dlogp: Array,
    dentropy: Array | None,
) -> tuple[Array | None, Array | None]:
    """Gradients from logits recomputed in blocks of the vocabulary: (dhidden, dW), None if unused.

    With the log-sum-exp known a block of columns needs no other block, its rows of dW need no
    accumulator, and only `[batch, seq, d_model]` is carried.
    """
    want_hidden, want_head = wanted
    head, lse = inputs.unembedding, inputs.lse
    live = dlogp != 0 if dentropy is None else (dlogp != 0) | (dentropy != 0)
    # Positions without cotangent (masked) may hold anything: make them harmless at the source.
    hidden = jnp.where(live[..., None], inputs.hidden, jnp.zeros_like(inputs.hidden))
    lse = jnp.where(live, lse, jnp.zeros_like(lse))
    vocab, (_, seq, _) = head.shape[0], hidden.shape
    size = _block(vocab, math.ceil(vocab * settings.chunk / seq))
    count = -(-vocab // size)
    scale = 1.0 / inputs.temperature

    def body(dhidden, index):
        # The last block is moved back to fit; the columns it shares are zeroed in dhidden.
        start = jnp.minimum(index * size, vocab - size)
        rows = jax.lax.dynamic_slice_in_dim(head, start, size).astype(hidden.dtype)
        shifted = _logits(hidden, rows, inputs.temperature) - lse[..., None]
        columns = start + jax.lax.broadcasted_iota(jnp.int32, shifted.shape, 2)
        p = jnp.exp(shifted)
        hit = columns == inputs.targets[..., None].astype(jnp.int32)
        dlogits = dlogp[..., None] * jnp.where(hit, -jnp.expm1(shifted), -p)
        if dentropy is not None and inputs.entropy is not None:
            excess = shifted + inputs.entropy[..., None]
            dlogits = dlogits - dentropy[..., None] * p * excess
        dlogits = jnp.where(live[..., None], dlogits, jnp.zeros_like(dlogits)) * scale
        wide, narrow = dlogits.dtype, dlogits.astype(hidden.dtype)
        dhead = None
        if want_head:
            dhead = jnp.einsum("bsv,bsd->vd", narrow, hidden, preferred_element_type=wide)
            dhead = dhead.astype(head.dtype)
        if want_hidden:
            fresh = narrow
            if vocab % size:
                fresh = jnp.where(columns >= index * size, narrow, jnp.zeros_like(narrow))
            dhidden = dhidden + jnp.einsum("bsv,vd->bsd", fresh, rows, preferred_element_type=wide)
        return dhidden, dhead

    # Zeros that vary over the mesh axes that `hidden` varies over, as shard_map asks of a carry.
    start = jnp.where(False, hidden.astype(lse.dtype), jnp.zeros((), lse.dtype))
    dhidden, blocks = jax.lax.scan(body, start, jnp.arange(count, dtype=jnp.int32))
    dhead = None
    if blocks is not None:
        dhead = blocks.reshape(-1, blocks.shape[-1])
        overlap = count * size - vocab
        if overlap:
            last = vocab - size + overlap  # the last block's first row that no other block has
            dhead = jnp.concatenate([dhead[:last], dhead[last + overlap :]])
    return dhidden.astype(hidden.dtype) if want_hidden else None, dhead


def _block(size: int, target: int) -> int:
    """A block length of at most `target`, one that divides `size` if there is one near."""
    target = max(1, min(target, size))
    for length in range(target, max(1, target // 2) - 1, -1):
        if size % length == 0:
            return length
    return -(-size // -(-size // target))
