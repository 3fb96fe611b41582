"""Code that does not end is given up, in the main thread and in others."""

import re
import signal
import threading
import time

import pytest

from hilore_jax.training.time_limit import TimeLimitError, limited


def forever() -> None:
    while True:
        time.sleep(0.001)


def elsewhere(call):
    """What a call returns or raises in another thread."""
    found: list = []

    def run() -> None:
        try:
            found.append(call())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


def test_what_ends_in_time_is_returned_and_what_it_raises_passes():
    assert limited(divmod, 5.0, 7, 2) == (3, 1) == limited(divmod, 0.0, 7, 2)
    assert elsewhere(lambda: limited(divmod, 5.0, 7, 2)) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        limited(divmod, 5.0, 1, 0)
    assert isinstance(elsewhere(lambda: limited(divmod, 5.0, 1, 0)), ZeroDivisionError)


def test_what_does_not_end_is_given_up():
    with pytest.raises(TimeLimitError, match=r"took more than 0\.05 s"):
        limited(forever, 0.05)
    assert isinstance(elsewhere(lambda: limited(time.sleep, 0.05, 2.0)), TimeLimitError)
    # The regular expression engine looks for signals: backtracking without end is interrupted.
    with pytest.raises(TimeLimitError):
        limited(re.match, 0.05, r"(a+)+$", "a" * 40 + "b")


def test_alarms_and_handlers_of_others_are_put_back():
    seen = []
    before = signal.signal(signal.SIGALRM, lambda *_: seen.append(1))
    try:
        signal.setitimer(signal.ITIMER_REAL, 100.0)
        limited(time.sleep, 5.0, 0.0)
        assert 90 < signal.getitimer(signal.ITIMER_REAL)[0] <= 100
        signal.setitimer(signal.ITIMER_REAL, 0)
        with pytest.raises(TimeLimitError):
            limited(forever, 0.01)
        signal.raise_signal(signal.SIGALRM)
        assert seen == [1]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
