"""The peak that a device counts while a program runs on it."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class DevicePeak:
    """What a program needed, by the device's own count.

    Attributes:
        nbytes: bytes, its arguments included, and without what else was there: the most that it
            can have been.
        reached: whether the program was at it. Otherwise something before it in the process was,
            and the program was below: a device counts one peak for all.
    """

    nbytes: int
    reached: bool


def measured_peak(run: Callable[[], Any], device: Any = None) -> DevicePeak | None:
    """Bytes that a program needs on a device, measured.

    A device counts its peak from the start of the process on, and cannot be told to forget it. So
    what is measured first is measured best.

    Args:
        run: makes the program's arguments and runs it, compiled before.
        device: where it runs; None: the default one.

    Returns:
        The peak; None where the device keeps no statistics (a CPU): nothing is run there.

    Example:
        >>> measured_peak(lambda: 1) is None  # on a CPU
        True
    """
    before = _counts(device)
    if before is None:
        return None
    others, peak = before
    jax.block_until_ready(run())
    after = _counts(device)
    assert after is not None
    return DevicePeak(after[1] - others, after[1] > peak)


def counts_memory(device: Any = None) -> bool:
    """Whether a device, by default the default one, keeps statistics of its memory."""
    return _counts(device) is not None


def _counts(device: Any) -> tuple[int, int] | None:
    """Bytes in use and the most that were so far, or None."""
    device = jax.local_devices()[0] if device is None else device
    stats = device.memory_stats() or {}
    used, peak = (stats.get(name) for name in ("bytes_in_use", "peak_bytes_in_use"))
    return None if used is None or peak is None else (used, peak)
