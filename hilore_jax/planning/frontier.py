"""Which policies of a menu a calibration should measure: one for each distinct distortion."""

from collections.abc import Callable, Sequence
from typing import Any

from hilore_jax import tracing
from hilore_jax.actions import Compress, Policy
from hilore_jax.planning.menu import Entry
from hilore_jax.replay import tainted_names

Distortion = tuple[tuple[str, ...], tuple[str, ...], bool]


def distortion(policy: Policy, traced: tracing.Traced) -> Distortion:
    """What a policy changes in the gradient: two policies of equal distortion give the same one.

    Stored values and those recomputed from exact ones are equal, so that only the compressed
    names, what is recomputed from their decoded values, and whether matmuls may be, matter.

    Args:
        policy: a block's policy.
        traced: the block.

    Example:
        >>> import jax.numpy as jnp
        >>> from jax.ad_checkpoint import checkpoint_name
        >>> from hilore_jax import Store
        >>> block = tracing.trace(
        ...     lambda x: checkpoint_name(jnp.sin(checkpoint_name(x, "h")), "act") * 2, 1.0
        ... )
        >>> distortion(Policy({"h": Compress("int8")}), block)
        (('h=int8:axis=-1:tile=128',), ('act',), False)
        >>> distortion(Policy({"h": Compress("int8"), "act": Store()}), block)[1]
        ()
    """
    compressed = policy.names(Compress)
    if not compressed:
        return (), (), False
    taint = tuple(sorted(tainted_names(policy, traced)))
    actions = tuple(f"{name}={policy[name]}" for name in compressed)
    return actions, taint, policy.tainted_matmuls


def frontier(
    menu: Sequence[Entry],
    block_fn: Callable[..., Any],
    *args: Any,
    most: int = 10,
    risk: float,
) -> tuple[Policy, ...]:
    """Policies of a menu to measure, each of another distortion, from the fewest bytes up.

    Args:
        menu: a block's menu under assumed risks.
        block_fn: the block.
        *args: its arguments, arrays or shapes.
        most: how many.
        risk: entries of more assumed risk in one block are left out.

    Returns:
        At most `most` policies that compress; of more, those that are spread over the bytes.
    """
    traced = tracing.trace(block_fn, *args)
    found: dict[Distortion, Policy] = {}
    for entry in sorted(menu, key=lambda e: e.nbytes):
        if 0 < entry.risk <= risk:
            found.setdefault(distortion(entry.policy, traced), entry.policy)
    chosen = list(found.values())
    if len(chosen) > most:
        chosen = [chosen[round(i * (len(chosen) - 1) / max(most - 1, 1))] for i in range(most)]
    return tuple(chosen)
