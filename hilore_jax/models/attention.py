"""Attention as one function with its own derivative rule and two named residuals.

The forward runs outside differentiation and names its output and log-sum-exp; `_attach` then ties
them to q, k and v. A policy that keeps `attn_out` and `attn_lse` therefore keeps everything that
backward needs beside q, k and v, and the forward attention is never run again.
"""

import functools
import logging
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from hilore_jax.models import _cudnn
from hilore_jax.models.attention_math import attend, attend_backward, causal_allowed
from hilore_jax.models.names import named
from hilore_jax.remat import is_disabled

_LOG = logging.getLogger("hilore_jax")
_CHUNKED_FROM = 1024  # tokens; shorter sequences keep their scores whole
_CHUNK = 512


class _Layout(NamedTuple):
    """Static facts of one attention call."""

    n_kv_heads: int
    group: int  # query heads that share one key and value head
    head_dim: int
    query_chunk: int
    backend: str  # "xla" or "cudnn"

    def chunks(self, seq: int) -> list[tuple[int, int]]:
        starts = range(0, seq, self.query_chunk)
        return [(start, min(start + self.query_chunk, seq)) for start in starts]

    def split_q(self, x: Array) -> Array:
        return x.reshape(*x.shape[:2], self.n_kv_heads, self.group, self.head_dim)

    def split_kv(self, x: Array) -> Array:
        return x.reshape(*x.shape[:2], self.n_kv_heads, self.head_dim)


def attention(
    q: Float[Array, "batch seq q_width"],
    k: Float[Array, "batch seq kv_width"],
    v: Float[Array, "batch seq kv_width"],
    mask: Bool[Array, "batch seq"] | None = None,
    *,
    n_heads: int,
    n_kv_heads: int,
    implementation: str = "auto",
    query_chunk: int | None = None,
) -> Float[Array, "batch seq q_width"]:
    """Causal grouped-query attention, `softmax(q k^T / sqrt(head_dim)) v`, with named residuals.

    Its output is named `attn_out` and its log-sum-exp `attn_lse`. Inside `hilore_jax.disabled()` it
    is a plain expression, so that forward mode works.

    Args:
        q: queries, `[batch, seq, n_heads * head_dim]`, after RoPE.
        k: keys, `[batch, seq, n_kv_heads * head_dim]`, after RoPE.
        v: values, the shape of k.
        mask: True at real tokens; padding is never read. None: all are real.
        n_heads: query heads.
        n_kv_heads: key and value heads; query heads `i * group ..` share head `i`.
        implementation: "xla", "cudnn", or "auto": cuDNN where it can run, XLA elsewhere.
        query_chunk: queries whose scores exist at a time (XLA); None: whole below 1,024 tokens,
            512 from there on.

    Returns:
        `[batch, seq, n_heads * head_dim]` in the dtype of q. A position that may read no key (left
        padding) gets 0.

    Raises:
        ValueError: widths and heads do not agree, or the implementation is unknown or cannot run.

    Example:
        >>> x = jnp.arange(8.0).reshape(1, 2, 4)
        >>> attention(x, x, x, n_heads=2, n_kv_heads=2)[0, 0].tolist()
        [0.0, 1.0, 2.0, 3.0]
    """
    head_dim = _head_dim(q, k, v, n_heads, n_kv_heads)
    seq = q.shape[1]
    if query_chunk is None:
        query_chunk = seq if seq < _CHUNKED_FROM else _CHUNK
    if query_chunk < 1:
        raise ValueError(f"query_chunk is {query_chunk}, expected at least 1 query or None")
    layout = _Layout(n_kv_heads, n_heads // n_kv_heads, head_dim, query_chunk, "xla")
    if is_disabled():
        return named(_forward(layout, q, k, v, mask)[0], "attn_out")
    layout = layout._replace(backend=choose(implementation, q.dtype, head_dim))
    out, lse = _forward(layout, *jax.lax.stop_gradient((q, k, v)), mask)
    return _attach(layout, q, k, v, named(out, "attn_out"), named(lse, "attn_lse"), mask)


def choose(implementation: str, dtype: jnp.dtype, head_dim: int) -> str:
    """The implementation that runs: "xla" or "cudnn".

    Args:
        implementation: "xla", "cudnn" or "auto".
        dtype: dtype of the queries.
        head_dim: width of one head.

    Returns:
        "xla" or "cudnn". When "auto" settles for XLA on a GPU, the reason is logged once.

    Raises:
        ValueError: the name is unknown, or cuDNN was asked for and cannot take these arrays.

    Example:
        >>> choose("auto", jnp.dtype("float32"), 64)
        'xla'
    """
    if implementation not in ("auto", "xla", "cudnn"):
        raise ValueError(
            f"attention implementation is {implementation!r}, expected 'auto', 'xla' or 'cudnn'"
        )
    obstacle = None
    if dtype not in (jnp.bfloat16, jnp.float16):
        obstacle = f"cuDNN attention takes bfloat16 or float16, found {jnp.dtype(dtype).name}"
    elif head_dim > 128 or head_dim % 8:
        obstacle = f"cuDNN attention takes a head_dim up to 128, a multiple of 8, found {head_dim}"
    if implementation == "cudnn" and obstacle:
        raise ValueError(f"{obstacle}; use implementation='xla' or another dtype")
    if implementation != "auto":
        return implementation
    if jax.default_backend() != "gpu":
        return "xla"
    if obstacle:
        _log_once(f"attention runs on XLA: {obstacle}")
        return "xla"
    return "cudnn"


@functools.cache
def _log_once(message: str) -> None:
    _LOG.warning(message)


def _head_dim(q: Array, k: Array, v: Array, n_heads: int, n_kv_heads: int) -> int:
    if n_heads % n_kv_heads:
        raise ValueError(f"n_heads {n_heads} is not a multiple of n_kv_heads {n_kv_heads}")
    head_dim, rest = divmod(q.shape[-1], n_heads)
    wide = (*q.shape[:-1], n_kv_heads * head_dim)
    if rest or k.shape != wide or v.shape != wide:
        raise ValueError(
            f"attention with {n_heads} query and {n_kv_heads} key heads found q {q.shape}, "
            f"k {k.shape}, v {v.shape}; expected widths n_heads * head_dim, n_kv_heads * head_dim"
        )
    return head_dim


def _forward(layout: _Layout, q: Array, k: Array, v: Array, mask: Array | None):
    """Output `[batch, seq, width]` and log-sum-exp `[batch, kv_heads, seq, group]`."""
    if layout.backend == "cudnn":
        return _cudnn.forward(layout.n_kv_heads, layout.head_dim, q, k, v, mask)
    queries, keys, values = layout.split_q(q), layout.split_kv(k), layout.split_kv(v)
    parts = [
        attend(
            queries[:, start:stop],
            keys[:, :stop],
            values[:, :stop],
            causal_allowed(mask, start, stop),
        )
        for start, stop in layout.chunks(q.shape[1])
    ]
    out = jnp.concatenate([out for out, _ in parts], axis=1)
    return out.reshape(q.shape), jnp.concatenate([lse for _, lse in parts], axis=2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attach(layout, q, k, v, out, lse, mask):
    """Returns `out`; its derivative is that of attention at q, k, v with that output and lse."""
    return out


def _attach_forward(layout, q, k, v, out, lse, mask):
    return out, (q, k, v, out, lse, mask)


def _attach_backward(layout: _Layout, residuals, d_out):
    q, k, v, out, lse, mask = residuals
    if layout.backend == "cudnn":
        grads = _cudnn.backward(layout.n_kv_heads, layout.head_dim, q, k, v, out, lse, mask, d_out)
        return (*grads, None, None, None)
    queries, keys, values = layout.split_q(q), layout.split_kv(k), layout.split_kv(v)
    d_out = layout.split_q(d_out)
    product = d_out.astype(jnp.float32) * layout.split_q(out).astype(jnp.float32)
    delta = jnp.swapaxes(jnp.sum(product, axis=-1), 1, 2)
    dq: list[Array] = []
    dk = dv = None
    # Last chunk first: it reaches every key, so its gradients are the accumulators.
    for start, stop in reversed(layout.chunks(q.shape[1])):
        here = slice(start, stop)
        dq_here, dk_here, dv_here = attend_backward(
            queries[:, here],
            keys[:, :stop],
            values[:, :stop],
            causal_allowed(mask, start, stop),
            lse[:, :, here],
            delta[:, :, here],
            d_out[:, here],
        )
        dq.append(dq_here.astype(q.dtype))
        dk, dv = _add_head(dk, dk_here), _add_head(dv, dv_here)
    assert dk is not None and dv is not None  # there is a chunk
    found = (jnp.concatenate(dq[::-1], axis=1), dk, dv)
    grads = (
        jnp.reshape(grad, x.shape).astype(x.dtype) for grad, x in zip(found, (q, k, v), strict=True)
    )
    return (*grads, None, None, None)


def _add_head(total: Array | None, part: Array) -> Array:
    """Adds `part` to the first positions of `total`, in place under XLA; None is nothing yet."""
    if total is None:
        return part
    summed = total[:, : part.shape[1]] + part
    return jax.lax.dynamic_update_slice_in_dim(total, summed, 0, axis=1)


_attach.defvjp(_attach_forward, _attach_backward)
