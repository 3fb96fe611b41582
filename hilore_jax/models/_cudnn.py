"""cuDNN's fused attention, forward and backward apart, so that what lies between has a name.

JAX's own rule keeps the log-sum-exp as an unnamed residual: a policy that saves the output alone
would then run the forward kernel again. Here backward takes both from the caller.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from hilore_jax import tracing

Wide = Float[Array, "batch seq q_width"]
Narrow = Float[Array, "batch seq kv_width"]
Lse = Float[Array, "batch n_kv_heads seq group"]
Mask = Bool[Array, "batch seq"] | None


def forward(
    n_kv_heads: int, head_dim: int, q: Wide, k: Narrow, v: Narrow, mask: Mask
) -> tuple[Wide, Lse]:
    """Causal attention and its log-sum-exp, as `attention_math.attend` defines them.

    Args:
        n_kv_heads: key and value heads.
        head_dim: width of one head.
        q: queries, bfloat16 or float16.
        k: keys.
        v: values.
        mask: True at real tokens, or None.

    Returns:
        The output, 0 where a query may read no key, and the float32 log-sum-exp.
    """
    by_head = [x.reshape(*x.shape[:2], -1, head_dim) for x in (q, k, v)]
    out, lse = jax.nn.dot_product_attention(
        *by_head,
        bias=_bias(mask, q.dtype),
        is_causal=True,
        implementation="cudnn",
        return_residual=True,
    )
    batch, seq = q.shape[:2]
    lse = lse.reshape(batch, seq, n_kv_heads, -1).swapaxes(1, 2)
    return _where_read(mask, out.reshape(q.shape)), lse


def backward(
    n_kv_heads: int,
    head_dim: int,
    q: Wide,
    k: Narrow,
    v: Narrow,
    out: Wide,
    lse: Lse,
    mask: Mask,
    d_out: Wide,
) -> tuple[Wide, Narrow, Narrow]:
    """Gradients of `forward` from its own results, without running it again.

    Args:
        n_kv_heads: key and value heads.
        head_dim: width of one head.
        q: queries.
        k: keys.
        v: values.
        out: the forward's output.
        lse: the forward's log-sum-exp.
        mask: True at real tokens, or None.
        d_out: cotangent of the output.

    Returns:
        Gradients of q, k and v.
    """
    batch, seq = q.shape[:2]
    d_out = _where_read(mask, d_out)
    q4, k4, v4, out4, d_out4 = (x.reshape(batch, seq, -1, head_dim) for x in (q, k, v, out, d_out))
    by_head = lse.swapaxes(2, 3).reshape(batch, -1, seq)  # [batch, heads, seq]
    dq, dk, dv = tracing.cudnn_attention_backward(
        q4, k4, v4, out4, d_out4, by_head, _bias(mask, q.dtype), scale=head_dim**-0.5
    )
    return dq.reshape(q.shape), dk.reshape(k.shape), dv.reshape(v.shape)


def _bias(mask: Mask, dtype: jnp.dtype) -> Array | None:
    """Padding as an additive bias `[batch, 1, seq, seq]`; cuDNN's own covers right padding only."""
    if mask is None:
        return None
    batch, seq = mask.shape
    low = jnp.asarray(0.5 * float(jnp.finfo(dtype).min), dtype)
    column = jnp.where(mask, jnp.zeros((), dtype), low)
    return jnp.broadcast_to(column[:, None, None, :], (batch, 1, seq, seq))


def _where_read(mask: Mask, x: Wide) -> Wide:
    """Zeros where a query may read no key, for which the kernel averages padding."""
    if mask is None:
        return x
    return jnp.where(jnp.cumsum(mask, axis=1)[:, :, None] > 0, x, 0)
