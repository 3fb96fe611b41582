"""A program for which a device has no room, told from other faults."""

import contextlib
from collections.abc import Iterator

import jax

from hilore_jax.planning.memory import TargetMemoryError


class OutOfMemoryError(RuntimeError):
    """A program did not fit the device, when it was compiled or while it ran."""


@contextlib.contextmanager
def naming_out_of_memory() -> Iterator[None]:
    """Raises `OutOfMemoryError` in place of what XLA raises; other errors pass.

    Example:
        >>> with naming_out_of_memory():
        ...     raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 9 bytes more")
        Traceback (most recent call last):
        ...
        hilore_jax.planning.out_of_memory.OutOfMemoryError: RESOURCE_EXHAUSTED: 9 bytes more
    """
    try:
        yield
    except (jax.errors.JaxRuntimeError, TargetMemoryError) as error:
        text = str(error)
        if not isinstance(error, TargetMemoryError) and "RESOURCE_EXHAUSTED" not in text:
            raise
        raise OutOfMemoryError(text.splitlines()[0] if text else "no reason was given") from None
