"""How far a planned gradient is from the exact one, and how far its risks said it would be."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from hilore_jax.actions import Compress
from hilore_jax.compiler import compiler_options
from hilore_jax.grpo.gradient_norm import drift
from hilore_jax.planning.allocate import total_risk
from hilore_jax.planning.plan import Plan


def relative_error(planned: Any, exact: Any) -> float:
    """The relative error of an update's gradient (HiLoRe, arXiv 2609.33570).

        ||g_L - g|| / ||g||

    Args:
        planned: g_L, the gradient of a complete update under a plan, after reduction and before
            clipping; a tree of arrays.
        exact: g, the same with everything recomputed.

    Returns:
        The error; not a number where the exact gradient is 0.

    Example:
        >>> relative_error({"w": jnp.array([3.0, 4.5])}, {"w": jnp.array([3.0, 4.0])})
        0.1
    """
    norm = gradient_norm(exact)
    return gradient_distance(planned, exact) / norm if norm else math.nan


def gradient_norm(tree: Any) -> float:
    """The norm of all leaves together, float32 in each."""
    return math.sqrt(math.fsum(float(_squares(a, 0.0)) for a in jax.tree.leaves(tree)))


def gradient_distance(tree: Any, other: Any) -> float:
    """The norm of the difference of two trees, float32 in each leaf.

    Leaf by leaf: of a tree that is held on the host no more than one is on the device at a time.
    """
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True)
    return math.sqrt(math.fsum(float(_squares(a, b)) for a, b in pairs))


def predicted_error(
    plan: Plan, exposures: Sequence[float] | Any, ghat: float | None = None
) -> float:
    """The plan's risk for an update with these microbatches: risks grow with exposure.

    Args:
        plan: a plan; without calibrated risks its own risk is returned as it is.
        exposures: of the update's microbatches.
        ghat: norm of the update's gradient, where it is not the calibration's.

    Returns:
        The relative error; infinite where a plan for exposure 0, at which nothing has a risk,
        compresses a microbatch of more: what that does is not known.
    """
    if plan.exposure is None:
        return plan.risk
    if plan.exposure == 0:
        lossy = any(policy.names(Compress) for policy in plan.policies)
        return math.inf if lossy and any(float(e) != 0 for e in exposures) else 0.0
    moved = 1.0 if ghat is None or plan.norm is None else drift(ghat, plan.norm)
    parts = [plan.risk * float(e) / plan.exposure / moved for e in exposures]
    return total_risk(parts, paper=plan.paper)


@functools.cache
def _jitted() -> Any:
    def squares(a: Any, b: Any) -> Any:
        return jnp.sum((a.astype(jnp.float32) - b) ** 2)

    return jax.jit(squares, compiler_options=compiler_options())


def _squares(a: Any, b: Any) -> Any:
    return _jitted()(a, b)
