"""`swap(primal, original)`: the value of one array with the derivative of another.

A primitive of its own, because dead-code elimination must see that the value does not depend on
`original`: as a `custom_jvp` it would keep the producer of every kept name alive.
"""

from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.interpreters import partial_eval as pe

_swap_p = Primitive("hilore_swap")


def swap(primal: jax.Array, original: jax.Array) -> jax.Array:
    """`primal` in value, `original` in derivative.

    Args:
        primal: the value; its own derivative is dropped.
        original: an array of the same shape and dtype.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> three, five = jnp.array(3.0), jnp.array(5.0)
        >>> float(swap(three, five)), float(jax.grad(lambda x: swap(three, x * x))(five))
        (3.0, 10.0)
    """
    return _swap_p.bind(primal, original)


def _jvp(primals: Any, tangents: Any) -> Any:
    return primals[0], tangents[-1]


def _batch(args: Any, dims: Any) -> Any:
    size = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)
    front = [batching.bdim_at_front(x, d, size) for x, d in zip(args, dims, strict=True)]
    return _swap_p.bind(*front), 0


def _dce(used: list[bool], *context: Any) -> tuple[list[bool], Any]:
    eqn = context[-1]  # jax 0.12 passes the live inputs before it
    if not any(used):
        return [False] * len(eqn.invars), None
    return [True] + [False] * (len(eqn.invars) - 1), eqn.replace(invars=eqn.invars[:1])


# `original` is absent from an equation that dead-code elimination has been over.
_swap_p.def_impl(lambda primal, *original: primal)
_swap_p.def_abstract_eval(lambda primal, *original: primal)
ad.primitive_jvps[_swap_p] = _jvp
batching.primitive_batchers[_swap_p] = _batch
pe.dce_rules[_swap_p] = _dce
mlir.register_lowering(_swap_p, lambda ctx, primal, *original: [primal])
