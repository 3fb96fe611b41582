"""HiGHS's integer programs through scipy, without what HiGHS prints past every option.

Where a solution has to be mended after presolve, the HiGHS of scipy 1.17 writes a line of its own
debugging to standard output, whatever `disp` says. It would end up in the output of `hilore plan`.
"""

import contextlib
import ctypes
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from typing import Any

from scipy import optimize

_DEBUG = b"HighsMipSolverData::"
_STDOUT = 1  # the file that C code writes to, whatever sys.stdout is
_ONE_AT_A_TIME = threading.Lock()  # a process has one standard output


def milp(objective: Any, **options: Any) -> Any:
    """`scipy.optimize.milp`, whose debug lines are dropped from standard output."""
    with without_debug_lines():
        return optimize.milp(objective, **options)


@contextlib.contextmanager
def without_debug_lines() -> Iterator[None]:
    """Holds standard output back, and at the end lets all of it go but HiGHS's debug lines.

    What other threads print meanwhile comes later, but it comes.
    """
    with _ONE_AT_A_TIME, contextlib.ExitStack() as stack:
        try:
            there = os.dup(_STDOUT)  # fails where it is closed, so that nothing can be printed
            stack.callback(os.close, there)
            held = stack.enter_context(tempfile.TemporaryFile())  # nowhere to hold it: let it go
        except OSError:
            yield
            return
        _flush()
        os.dup2(held.fileno(), _STDOUT)
        try:
            yield
        finally:
            _flush()
            os.dup2(there, _STDOUT)
            held.seek(0)
            for line in held:
                if not line.startswith(_DEBUG):
                    _write(line)


def _flush() -> None:
    """Empties the buffers of Python's and of C's standard output."""
    with contextlib.suppress(OSError, ValueError):  # closed, or not a file
        sys.stdout.flush()
    with contextlib.suppress(OSError, TypeError):  # no C library of the process's own (Windows)
        ctypes.CDLL(None).fflush(None)


def _write(line: bytes) -> None:
    while line:
        line = line[os.write(_STDOUT, line) :]
