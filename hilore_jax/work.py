"""What a traced program computes: its matmuls and their floating-point operations."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from hilore_jax import tracing


class Work(NamedTuple):
    """What a traced program computes."""

    matmuls: int  # executions of matmul equations, loop bodies times their length
    flops: int  # floating-point operations of those matmuls, a multiply-add counted as two

    def __add__(self, other: tuple) -> "Work":
        return Work(self.matmuls + other[0], self.flops + other[1])

    def __sub__(self, other: "Work") -> "Work":
        return Work(self.matmuls - other.matmuls, self.flops - other.flops)

    def __mul__(self, times: int) -> "Work":
        return Work(self.matmuls * times, self.flops * times)


def _matmul_flops(eqn: Any) -> int:
    out = math.prod(eqn.outvars[0].aval.shape)
    left, right = (v.aval.shape for v in eqn.invars[:2])
    if eqn.primitive.name == "dot_general":
        (contract, _), _ = eqn.params["dimension_numbers"]
        return 2 * out * math.prod(left[d] for d in contract)
    if eqn.primitive.name == "conv_general_dilated":
        out_features = eqn.params["dimension_numbers"].rhs_spec[0]
        return 2 * out * math.prod(right) // max(right[out_features], 1)
    numbers = eqn.params.get("ragged_dot_dimension_numbers")
    if numbers is not None:
        (contract, _), _ = numbers.dot_dimension_numbers
        if set(numbers.lhs_ragged_dimensions) & set(contract):  # groups of rows are summed over
            return (
                2 * math.prod(eqn.outvars[0].aval.shape[1:]) * math.prod(left[d] for d in contract)
            )
    return 2 * out * left[-1]  # every row meets one group


def work(jaxpr: Any) -> Work:
    """Matmuls of a jaxpr and their FLOPs; a scan body counts `length` times, a branch at its most.

    A `while` body counts once: its trip count is not in the jaxpr.

    Example:
        >>> import jax.numpy as jnp
        >>> work(tracing.trace(lambda a, b: a @ b, jnp.ones((2, 3)), jnp.ones((3, 5))).jaxpr)
        Work(matmuls=1, flops=60)
    """
    total = Work(0, 0)
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in tracing.MATMULS:
            total += Work(1, _matmul_flops(eqn))
            continue
        inner = [work(j) for j in tracing.inner_jaxprs(eqn)]
        if not inner:
            continue
        if eqn.primitive.name == "cond":
            total += max(inner, key=lambda w: w.flops)
        elif eqn.primitive.name.startswith(("custom_jvp", "custom_vjp")):
            total += inner[0]  # the primal; rules are other parameters
        else:
            times = eqn.params["length"] if eqn.primitive.name == "scan" else 1
            total += sum(inner, Work(0, 0)) * times
    return total


def live_work(fn: Callable, *args: Any) -> Work:
    """Matmuls that `fn` really needs for its outputs, after dead code is removed."""
    return work(tracing.prune(tracing.trace(fn, *args).closed)[0])
