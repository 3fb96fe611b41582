"""Causal grouped-query attention as plain expressions: forward, and backward from its log-sum-exp.

Queries are `[batch, seq, kv_heads, group, head_dim]`, keys and values `[batch, keys, kv_heads,
head_dim]`: keys and values are never repeated in memory. Softmax is float32; matrix products take
their inputs in the arrays' dtype and accumulate in float32.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

_MASKED = -1e30  # finite: a row without any allowed key must not turn into NaN

Queries = Float[Array, "batch seq kv_heads group head_dim"]
Keys = Float[Array, "batch keys kv_heads head_dim"]
Allowed = Bool[Array, "#batch seq keys"]
RowValue = Float[Array, "batch kv_heads seq group"]


def causal_allowed(
    mask: Bool[Array, "batch total"] | None, start: int, stop: int
) -> Bool[Array, "#batch seq keys"]:
    """Which of the keys `0..stop-1` the queries `start..stop-1` may read.

    Args:
        mask: True at real tokens, or None when all are.
        start: first query, position in the sequence.
        stop: one after the last query.

    Returns:
        `[batch or 1, stop - start, stop]`.

    Example:
        >>> causal_allowed(None, 1, 3).astype(int).tolist()
        [[[1, 1, 0], [1, 1, 1]]]
    """
    causal = jnp.arange(start, stop)[:, None] >= jnp.arange(stop)[None, :]
    return causal[None] if mask is None else causal[None] & mask[:, None, :stop]


def scores(q: Queries, k: Keys) -> Float[Array, "batch kv_heads seq group keys"]:
    """Scaled products `q k^T / sqrt(head_dim)`, float32.

    Args:
        q: queries by group.
        k: keys.

    Returns:
        `[batch, kv_heads, seq, group, keys]` float32.

    Example:
        >>> scores(jnp.ones((1, 1, 1, 1, 4)), jnp.ones((1, 2, 1, 4))).ravel().tolist()
        [2.0, 2.0]
    """
    product = jnp.einsum("bqkgd,btkd->bkqgt", q, k, preferred_element_type=jnp.float32)
    return product * q.shape[-1] ** -0.5


def attend(q: Queries, k: Keys, v: Keys, allowed: Allowed) -> tuple[Queries, RowValue]:
    """Softmax attention and its log-sum-exp.

    Args:
        q: queries by group.
        k: keys.
        v: values.
        allowed: True where a query may read a key; a query without any gets output 0.

    Returns:
        The output in the shape and dtype of q, and the float32 log-sum-exp of the scaled scores.

    Example:
        >>> q, k = jnp.ones((1, 1, 1, 1, 2)), jnp.ones((1, 2, 1, 2))
        >>> v = jnp.arange(4.0).reshape(1, 2, 1, 2)
        >>> attend(q, k, v, jnp.ones((1, 1, 2), bool))[0].ravel().tolist()
        [1.0, 2.0]
    """
    allowed = allowed[:, None, :, None, :]
    s = jnp.where(allowed, scores(q, k), _MASKED)
    top = jnp.max(s, axis=-1, keepdims=True)
    p = jnp.where(allowed, jnp.exp(s - top), 0.0)
    total = jnp.sum(p, axis=-1, keepdims=True)
    total = jnp.where(total == 0, 1.0, total)
    out = jnp.einsum("bkqgt,btkd->bkqgd", p.astype(v.dtype), v, preferred_element_type=jnp.float32)
    lse = (top + jnp.log(total))[..., 0]
    return jnp.swapaxes(out / total, 1, 2).astype(q.dtype), lse


def attend_backward(
    q: Queries,
    k: Keys,
    v: Keys,
    allowed: Allowed,
    lse: RowValue,
    delta: RowValue,
    d_out: Queries,
) -> tuple[Queries, Keys, Keys]:
    """Gradients of `attend` from its log-sum-exp, in five products and without its output.

        p = exp(s - lse);  dv = p^T do;  ds = p * (do v^T - delta);  dq = ds k;  dk = ds^T q

    with delta = sum(do * out) over the head's features (Dao 2023, arXiv 2307.08691).

    Args:
        q: queries by group.
        k: keys.
        v: values.
        allowed: True where a query may read a key.
        lse: log-sum-exp of the forward.
        delta: `sum(d_out * out)` over features, float32.
        d_out: cotangent of the output.

    Returns:
        Float32 gradients with the shapes of q, k and v.

    Example:
        >>> q, k = jnp.ones((1, 1, 1, 1, 2)), jnp.ones((1, 1, 1, 2))
        >>> one = jnp.ones((1, 1, 1), bool)
        >>> lse = attend(q, k, k, one)[1]
        >>> d = attend_backward(q, k, k, one, lse, jnp.full((1, 1, 1, 1), 2.0), q)
        >>> [g.ravel().tolist() for g in d]
        [[0.0, 0.0], [0.0, 0.0], [1.0, 1.0]]
    """
    allowed = allowed[:, None, :, None, :]
    s = jnp.where(allowed, scores(q, k), _MASKED)
    p = jnp.where(allowed, jnp.exp(s - lse[..., None]), 0.0)
    f32 = jnp.float32
    dv = jnp.einsum("bkqgt,bqkgd->btkd", p.astype(v.dtype), d_out, preferred_element_type=f32)
    dp = jnp.einsum("bqkgd,btkd->bkqgt", d_out, v, preferred_element_type=f32)
    ds = (p * (dp - delta[..., None]) * q.shape[-1] ** -0.5).astype(q.dtype)
    dq = jnp.einsum("bkqgt,btkd->bqkgd", ds, k, preferred_element_type=f32)
    dk = jnp.einsum("bkqgt,bqkgd->btkd", ds, q, preferred_element_type=f32)
    return dq, dk, dv
