"""Times that can be compared: interleaved runs in one process, medians of paired ratios."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax


class Ratio(NamedTuple):
    """Paired time ratios of one program to another; below 1 the first is faster."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f} to {self.high:.3f})"


def interleaved(
    runs: Mapping[str, Callable[..., Any]],
    repeats: int,
    prepare: Mapping[str, Callable[[], Any]] | None = None,
) -> dict[str, list[float]]:
    """Seconds of each run, taken in turns after one warm-up each.

    Turns alternate in direction, so that a machine that slows down treats all alike.

    Args:
        runs: programs by name; each returns arrays, which are waited for.
        repeats: timed turns.
        prepare: makes the one argument of a run anew, before its clock starts; without, runs take
            none.

    Example:
        >>> times = interleaved({"a": lambda: 1, "b": lambda: 2}, repeats=3)
        >>> [len(seconds) for seconds in times.values()]
        [3, 3]
    """

    def once(name: str) -> float:
        given = () if prepare is None else (jax.block_until_ready(prepare[name]()),)
        start = time.perf_counter()
        jax.block_until_ready(runs[name](*given))
        return time.perf_counter() - start

    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for name in runs:
        once(name)
    for turn in range(repeats):
        for name in list(runs) if turn % 2 == 0 else reversed(list(runs)):
            seconds[name].append(once(name))
    return seconds


def ratio(ours: list[float], theirs: list[float]) -> Ratio:
    """Median, least and greatest of the turns' ratios.

    Example:
        >>> ratio([2.0, 1.0, 3.0], [1.0, 1.0, 1.0])
        Ratio(median=2.0, low=1.0, high=3.0)
    """
    pairs = [a / b for a, b in zip(ours, theirs, strict=True)]
    return Ratio(statistics.median(pairs), min(pairs), max(pairs))


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """Lower and upper quartile; of a single value, itself.

    Example:
        >>> quartiles([1.0, 4.0, 2.0]), quartiles([3.0])
        ((1.5, 3.0), (3.0, 3.0))
    """
    if len(values) == 1:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high
