"""In how many of its blocks an update may follow a policy, on the device that is here."""

from collections.abc import Callable
from typing import Any

import jax

from hilore_jax.actions import Policy
from hilore_jax.planning.memory import TargetMemoryError, memory_of
from hilore_jax.planning.target import Target

_USED = 0.95  # of what is free: allocators have gaps


def room(args: tuple[Any, ...], target: Target) -> int:
    """Bytes that a program's peak may have on one device while its caller keeps its own arrays.

    Args:
        args: what the caller keeps; used where the device does not say what is in use.
        target: this process's device or devices.
    """
    stats = target.devices()[0].memory_stats() or {}
    mine = sum(getattr(leaf, "nbytes", 0) for leaf in jax.tree.leaves(args))
    return int(_USED * (target.memory - stats.get("bytes_in_use", mine)))


def fitting(
    compiled: Callable[[tuple[Policy, ...]], Any],
    policy: Policy,
    blocks: int,
    free: int,
    least: int = 0,
) -> tuple[int, Any] | None:
    """The most blocks that may follow a policy, the others recomputed, and that program.

    Args:
        compiled: compiles the update under policies, one a block.
        policy: what the first blocks follow.
        blocks: how many there are.
        free: bytes that the peak may have.
        least: peak with every block recomputed, bytes.

    Returns:
        Blocks and compiled program; None where not even one block fits.
    """
    count = blocks
    while count:
        try:
            program = compiled((policy,) * count + (Policy({}),) * (blocks - count))
            peak = memory_of(program).peak
        except TargetMemoryError:
            program, peak = None, 2 * free
        if peak <= free:
            return count, program
        share = max(0, free - least) / (peak - least) if peak > least else 0.0
        # One block is always tried, as its peak may lie below the line from GC's.
        count = min(count - 1, max(1, int(count * share))) if policy != Policy({}) else 0
    return None
