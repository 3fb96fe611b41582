"""Facts of the devices of this process: the datasheet's where known, measured otherwise."""

import functools
import os
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

from hilore_jax.compiler import compiler_options
from hilore_jax.planning.target_data import GPUS, TPUS, Facts
from hilore_jax.planning.topology import Device

_DTYPES = ("float32", "bfloat16", "float16", "int8")


def known_facts(device: Device) -> Facts | None:
    """The datasheet's facts of an attached device, with the memory that it reports itself.

    Args:
        device: a device of this process.

    Returns:
        Facts, or None for a kind that is not in `target_data`.
    """
    for entry in (*GPUS.values(), *TPUS.values()):
        if entry.kind == device.device_kind:
            facts = entry.facts
            memory = device_memory(device) or facts.memory
            return Facts(memory, facts.flops, facts.bandwidth, facts.link, facts.host_link)
    return None


def device_memory(device: Device) -> int:
    """Bytes that programs may use on a device; 0 where it does not say.

    A CPU device has its share of the machine's physical memory.
    """
    if device.platform == "cpu":
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return total // len(jax.devices("cpu"))
    return int((device.memory_stats() or {}).get("bytes_limit", 0))


@functools.lru_cache
def measured_facts(device: Device) -> Facts:
    """Facts of a device by two short measurements, once in a process.

    The best of a few runs each of a square matrix product by dtype, and of `x + 1` in place over an
    array larger than most caches (read and written). Both are what XLA reaches, not what a vendor
    claims. Takes about half a second on a CPU.

    Args:
        device: a device of this process.

    Returns:
        Facts. The link between CPU devices is their common memory; `host_link` is 0: unknown.
    """
    small = device.platform == "cpu"
    side = 384 if small else 4096
    length = 2**24 if small else 2**28  # float32 elements: 64 MiB, 1 GiB
    options = compiler_options(device.platform)
    flops = []
    for dtype in _DTYPES:
        accumulate = jnp.int32 if dtype == "int8" else jnp.float32
        x = jax.device_put(jnp.ones((side, side), dtype), device)
        product = functools.partial(jnp.matmul, preferred_element_type=accumulate)
        multiply = functools.partial(jax.jit(product, compiler_options=options), x)
        flops.append((dtype, _rounded(2.0 * side**3 / _seconds(multiply, [x]))))
    # In place: a fresh result would be a measurement of the system's page faults.
    add = jax.jit(lambda x: x + 1, donate_argnums=0, compiler_options=options)
    x = jax.device_put(jnp.zeros((length,), jnp.float32), device)
    bandwidth = _rounded(2.0 * x.nbytes / _seconds(add, [x], chain=True))
    return Facts(device_memory(device), tuple(flops), bandwidth, bandwidth if small else 0.0, 0.0)


def _rounded(rate: float) -> float:
    """To the two digits that such a measurement has."""
    return float(f"{rate:.2g}")


def _seconds(
    call: Callable[[jax.Array], jax.Array],
    argument: list[jax.Array],
    *,
    chain: bool = False,
    repeats: int = 4,
) -> float:
    """Best wall time of a compiled call, warmed; `chain` feeds each result to the next call."""
    times = []
    for _ in range(repeats):
        x = argument.pop()
        start = time.perf_counter()
        result = jax.block_until_ready(call(x))
        times.append(time.perf_counter() - start)
        argument.append(result if chain else x)
    return min(times[1:])
