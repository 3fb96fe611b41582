"""A linear map whose weight gradient exists only as a random sketch."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from hilore_jax import tracing
from hilore_jax.remat import is_disabled

SKETCH_HIDDEN = "sketch_hidden"
"""The name of A x, the only thing that backward reads for a sketched weight's gradient."""


def sketched_dense(
    x: Float[Array, "*rows d_in"],
    kernel: Float[Array, "d_in d_out"],
    slot: Float[Array, "d_out rank"],
    a: Float[Array, "rank d_in"],
) -> Float[Array, "*rows d_out"]:
    """`y = x W`, with the sketch of W's gradient as the gradient of `slot`.

        S = G A^T = sum_t g_t (A x_t)^T,   G = sum_t g_t x_t^T        (LoGRA; methods 2.1)

    G never exists: backward reads A x, `rank` numbers a token, named `sketch_hidden`, in the place
    of x. The kernel's own gradient is 0. Sketches of microbatches add up while A stays the same.
    Inside `hilore_jax.disabled()` the map can be differentiated forward instead: a tangent D of the
    slot is the displacement `D A` of the weight, which is never formed either.

    Args:
        x: inputs; its dtype is the one computed in.
        kernel: W, `[in, out]`, in the dtype of x.
        slot: zeros, float32; its gradient is S.
        a: the projection, in the dtype of x.

    Returns:
        `x W`, whatever is in the slot.

    Raises:
        ValueError: the shapes do not belong together, or the slot is not float32.

    Example:
        >>> x, w, a = jnp.ones((2, 3)), jnp.ones((3, 4)), jnp.ones((1, 3))
        >>> jax.grad(lambda s: sketched_dense(x, w, s, a).sum())(jnp.zeros((4, 1))).tolist()
        [[6.0], [6.0], [6.0], [6.0]]
    """
    _check(x, kernel, slot, a)
    # Under shard_map a slot that all devices share receives the sum of their sketches.
    slot = tracing.varying_like(slot, x)
    if is_disabled():
        return _forward_mode(x, kernel, slot, a)
    hidden = jax.lax.stop_gradient(x) @ jax.lax.stop_gradient(a).T
    return _sketched(x, kernel, slot, checkpoint_name(hidden, SKETCH_HIDDEN))


@jax.custom_vjp
def _sketched(x: Array, kernel: Array, slot: Array, hidden: Array) -> Array:
    del slot, hidden
    return x @ kernel


def _forward(x: Array, kernel: Array, slot: Array, hidden: Array) -> tuple[Array, tuple]:
    del slot
    return x @ kernel, (kernel, hidden)


def _backward(kept: tuple, g: Array) -> tuple:
    kernel, hidden = kept
    sketch = jnp.einsum("...d,...r->dr", g, hidden, preferred_element_type=jnp.float32)
    return g @ kernel.T, None, sketch, None


_sketched.defvjp(_forward, _backward)


@jax.custom_jvp
def _forward_mode(x: Array, kernel: Array, slot: Array, a: Array) -> Array:
    del slot, a
    return x @ kernel


@_forward_mode.defjvp
def _tangent(primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    x, kernel, _, a = primals
    dx, _, d, _ = tangents
    return x @ kernel, dx @ kernel + (x @ a.T) @ d.T.astype(x.dtype)


def _check(x: Array, kernel: Array, slot: Array, a: Array) -> None:
    d_in, d_out = kernel.shape
    rank = slot.shape[-1]
    if x.shape[-1] != d_in or slot.shape != (d_out, rank) or a.shape != (rank, d_in):
        raise ValueError(
            f"sketched_dense found x {x.shape}, kernel {kernel.shape}, slot {slot.shape} and a "
            f"{a.shape}; expected [..., in], [in, out], [out, rank] and [rank, in]"
        )
    if slot.dtype != jnp.float32:
        raise ValueError(
            f"the slot is {slot.dtype}, expected float32: microbatches' sketches are added up in it"
        )
