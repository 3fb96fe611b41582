"""Memory of a model's complete update under some policies: compiled, and measured on a device."""

from __future__ import annotations

import functools
from typing import Any

import jax

from hilore_jax.actions import Policy
from hilore_jax.compiler import compiler_options
from hilore_jax.planning.device_memory import DevicePeak, counts_memory, measured_peak
from hilore_jax.planning.memory import Memory, compiled_memory
from hilore_jax.planning.target import parse_target
from hilore_jax.training.abstract import AbstractUpdate


def compiled_update(update: AbstractUpdate, target: str, policies: tuple[Policy, ...]) -> Memory:
    """Bytes of the complete update under these policies, by the target's compiler.

    Args:
        update: the model's actor update.
        target: the device's name.
        policies: one a block.
    """
    bound = functools.partial(update, policies)
    arguments = update.arguments(policies)
    return compiled_memory(bound, *arguments, target=parse_target(target), donate=(0,))


def device_peak(
    update: AbstractUpdate, policies: tuple[Policy, ...], device: Any = None
) -> DevicePeak | None:
    """Bytes of the complete update under these policies, as the device counts them while it runs.

    It runs once, with random weights and tokens: what they hold does not change the memory.

    Args:
        update: the model's actor update.
        policies: one a block.
        device: the default device, where it is not another one's statistics that are read.

    Returns:
        The peak; None where the device keeps no statistics: nothing is compiled or run then.
    """
    if not counts_memory(device):
        return None
    jitted = jax.jit(
        functools.partial(update, policies), donate_argnums=0, compiler_options=compiler_options()
    )
    # Before the peak is read: a compiler may try kernels out on the device.
    program = jitted.lower(*update.arguments(policies)).compile()
    return measured_peak(lambda: program(*update.random_arguments()(policies)), device)
