"""Counting matmuls and FLOPs of traced programs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hilore_jax import tracing
from hilore_jax.work import Work, live_work, work

pytestmark = pytest.mark.newest


@pytest.mark.parametrize(
    ("equation", "left", "right"),
    [
        ("ij,jk->ik", (2, 3), (3, 5)),
        ("bij,bkj->bik", (4, 2, 3), (4, 5, 3)),
        ("i,i->", (7,), (7,)),
        ("i,j->ij", (3,), (4,)),
        ("abij,jc->abic", (2, 2, 3, 4), (4, 6)),
    ],
)
def test_matmul_flops_are_two_a_multiply_add(equation, left, right):
    sizes = dict(zip("".join(equation.split("->")[0].split(",")), (*left, *right), strict=True))
    traced = tracing.trace(lambda a, b: jnp.einsum(equation, a, b), jnp.ones(left), jnp.ones(right))
    got = work(traced.jaxpr)
    assert got.flops == 2 * int(np.prod(list(sizes.values())))
    assert got.matmuls == 1


def test_convolution_flops():
    x, w = jnp.ones((2, 3, 8)), jnp.ones((5, 3, 3))
    traced = tracing.trace(lambda x, w: jax.lax.conv(x, w, (1,), "VALID"), x, w)
    assert work(traced.jaxpr) == Work(1, 2 * (2 * 5 * 6) * 3 * 3)


def test_loops_and_branches():
    w = jnp.ones((4, 4))
    scan = lambda x: jax.lax.scan(lambda c, _: (c @ w, None), x, None, length=7)[0]  # noqa: E731
    assert work(tracing.trace(scan, w).jaxpr).matmuls == 7
    branch = lambda x: jax.lax.cond(x.sum() > 0, lambda y: y @ w @ w, lambda y: y @ w, x)  # noqa: E731
    assert work(tracing.trace(branch, w).jaxpr).matmuls == 2


def test_dead_matmuls_are_not_counted():
    w = jnp.ones((4, 4))

    def f(x):
        dead = jax.checkpoint(lambda y: y @ w @ w)(x)
        return jax.jit(lambda y: (y @ w, dead @ w))(x)[0]

    assert work(tracing.trace(f, w).jaxpr).matmuls == 4
    assert live_work(f, w) == Work(1, 128)


def test_ragged_products_forward_and_backward():
    x, w = jnp.ones((64, 8)), jnp.ones((4, 8, 16))
    sizes = jnp.array([16, 16, 16, 16])

    def loss(x, w):
        return jax.lax.ragged_dot(x, w, sizes).sum()

    one = 2 * 64 * 8 * 16
    assert live_work(loss, x, w).flops == one
    assert live_work(jax.grad(loss, (0, 1)), x, w).flops == 2 * one  # dx and dw; out is not needed
