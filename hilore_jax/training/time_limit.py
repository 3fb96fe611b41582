"""A time limit for code that is not ours: scorers that read whatever a model wrote."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")


class TimeLimitError(Exception):
    """The code did not end within its time."""


def limited(function: Callable[..., T], seconds: float, *args: Any) -> T:
    """`function(*args)`, given up after some seconds.

    In the main thread an alarm interrupts Python code, and the regular expression engine, where
    they are. Elsewhere, and where the system has no alarms, the function runs in a thread of its
    own, which is left behind when its time is over.

    Args:
        function: what to call.
        seconds: the limit, wall-clock; 0 sets none.
        *args: its arguments.

    Raises:
        TimeLimitError: the time is over. Whatever the function itself raises passes through.

    Example:
        >>> limited(int, 1.0, "12")
        12
    """
    if not seconds:
        return function(*args)
    main = threading.current_thread() is threading.main_thread()
    alarm = main and hasattr(signal, "setitimer")
    return (_by_alarm if alarm else _by_thread)(function, seconds, args)


def _by_alarm(function: Callable[..., T], seconds: float, args: tuple[Any, ...]) -> T:
    def over(number: int, frame: FrameType | None) -> None:
        raise TimeLimitError(f"took more than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, over)
    outer = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        return function(*args)
    finally:
        # An alarm that someone else had set goes on with what it had left.
        signal.setitimer(signal.ITIMER_REAL, *outer)
        signal.signal(signal.SIGALRM, before)


def _by_thread(function: Callable[..., T], seconds: float, args: tuple[Any, ...]) -> T:
    found: list[T] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            found.append(function(*args))
        except BaseException as error:  # handed to the caller
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True, name="limited")
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise TimeLimitError(f"took more than {seconds:g} s")
    if raised:
        raise raised[0]
    return found[0]
