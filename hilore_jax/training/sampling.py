"""Temperature, top-k and top-p as pure functions on logits, and a draw with one key a row."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key


def check_sampling(temperature: float, top_k: int, top_p: float) -> list[str]:
    """The faults of sampling settings, one sentence each; empty when there is none."""
    faults = []
    if not 0.0 <= temperature < float("inf"):
        faults.append(f"temperature must be finite and >= 0 (0 is greedy), found {temperature}")
    if top_k < 0:
        faults.append(f"top_k must be >= 0 (0 keeps every token), found {top_k}")
    if not 0.0 < top_p <= 1.0:
        faults.append(f"top_p must be in (0, 1] (1 keeps every token), found {top_p}")
    return faults


def top_k_filter(logits: Float[Array, "batch vocab"], top_k: int) -> Float[Array, "batch vocab"]:
    """Sets to -inf every logit below the `top_k`-th largest of its row.

    Args:
        logits: scores.
        top_k: tokens to keep; 0, or the vocabulary size or more, keeps all.

    Returns:
        The filtered logits. Ties with the last kept token are kept.

    Example:
        >>> top_k_filter(jnp.array([[1.0, 3.0, 2.0]]), 2).tolist()
        [[-inf, 3.0, 2.0]]
    """
    if top_k == 0 or top_k >= logits.shape[-1]:
        return logits
    threshold = jax.lax.top_k(logits, top_k)[0][:, -1:]
    return jnp.where(logits >= threshold, logits, -jnp.inf)


def top_p_filter(logits: Float[Array, "batch vocab"], top_p: float) -> Float[Array, "batch vocab"]:
    """Keeps the smallest set of most likely tokens whose probabilities sum to at least `top_p`.

    Args:
        logits: scores (nucleus sampling, arXiv 1904.09751).
        top_p: probability mass in (0, 1]; 1 keeps all.

    Returns:
        The filtered logits. Ties with the last kept token are kept; one token is always kept.

    Example:
        >>> top_p_filter(jnp.log(jnp.array([[0.2, 0.5, 0.3]])), 0.6).tolist()[0][0]
        -inf
    """
    if top_p >= 1.0:
        return logits
    ordered = jnp.sort(logits, axis=-1, descending=True)
    probabilities = jax.nn.softmax(ordered.astype(jnp.float32), axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    last_kept = jnp.sum(before < top_p, axis=-1, keepdims=True) - 1
    threshold = jnp.take_along_axis(ordered, jnp.maximum(last_kept, 0), axis=-1)
    return jnp.where(logits >= threshold, logits, -jnp.inf)


def sample(
    keys: Key[Array, " batch"],
    logits: Float[Array, "batch vocab"],
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
) -> Int[Array, " batch"]:
    """Draws one token a row; temperature, then top-k, then top-p.

    Args:
        keys: one key a row, so that a row's draw does not depend on the other rows.
        logits: scores.
        temperature: softmax temperature; 0 takes the most likely token.
        top_k: see `top_k_filter`.
        top_p: see `top_p_filter`; the mass is of what top-k left.

    Returns:
        Token ids, int32.
    """
    if temperature == 0.0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    scaled = logits.astype(jnp.float32) / temperature
    kept = top_p_filter(top_k_filter(scaled, top_k), top_p)
    return jax.vmap(jax.random.categorical)(keys, kept).astype(jnp.int32)


def token_logp(
    logits: Float[Array, "batch vocab"], tokens: Int[Array, " batch"], temperature: float
) -> Float[Array, " batch"]:
    """Log-probabilities of `tokens` at `temperature`, without truncation, float32.

    Greedy draws (temperature 0) have no distribution to be scored under: they are scored at 1.
    """
    scaled = logits.astype(jnp.float32) / (temperature or 1.0)
    chosen = jnp.take_along_axis(scaled, tokens[:, None], axis=-1)[:, 0]
    return chosen - jax.nn.logsumexp(scaled, axis=-1)
