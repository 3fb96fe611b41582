"""How far compilations, timed updates or gradients are: a bar on a terminal, lines elsewhere."""

import io
import sys
import time
from typing import Any, TextIO

LINES = 20.0  # seconds between lines about units that take less


class Bar:
    """Progress over units that take seconds or more.

    Args:
        wanted: True: a bar on a terminal, lines elsewhere; None: a bar on a terminal only; False:
            nothing.
        total: units, or the most that there can be; None: unknown.
        unit: what one is.
        every: least seconds between two lines; 0 writes one for each unit, with its own time.
        done: units that were done before.
        stream: where to write; None is standard error.

    Example:
        >>> with Bar(True, 2, stream=sys.stdout) as bar:
        ...     bar.step("3 x gc")
        ...     bar.end("peak 7.45 GiB")
        compilation 1: 3 x gc: 0.0 s, peak 7.45 GiB
    """

    def __init__(
        self,
        wanted: bool | None,
        total: int | None,
        unit: str = "compilation",
        *,
        every: float = 0.0,
        done: int = 0,
        stream: TextIO | io.TextIOBase | None = None,
    ):
        self._stream = sys.stderr if stream is None else stream
        self._terminal = self._stream.isatty()
        self._shown = self._terminal if wanted is None else wanted
        self._total, self._unit, self._every, self._done = total, unit, every, done
        self._what: str | None = None
        self._bar: Any = None
        self._began = self._said = self._started = time.monotonic()

    def __enter__(self) -> "Bar":
        if self._shown and self._terminal:
            from tqdm import tqdm

            options: dict[str, Any] = {
                "unit": self._unit,
                "file": self._stream,
                "leave": False,
                "mininterval": 0.0,
            }
            self._bar = tqdm(total=self._total, initial=self._done, **options)
        return self

    def step(self, what: str) -> None:
        """Begins the next unit; one that was not ended is."""
        if self._what is not None:
            self.end()
        self._what, self._started = what, time.monotonic()
        if self._bar is not None:
            self._bar.set_postfix_str(what[:60])

    def end(self, found: str = "", count: int = 1) -> None:
        """Ends the unit at work, or `count` of them; `found` is what came out."""
        what, self._what = self._what, None
        self._done += count
        if self._bar is not None:
            self._bar.update(count)
        elif self._shown:
            self._say(what or "", found)

    def _say(self, what: str, found: str) -> None:
        now = time.monotonic()
        if self._every:
            if now - self._said < self._every:
                return
            line = f"{self._unit} {self._done} of {self._total}, {now - self._began:.0f} s so far"
        else:
            took = f"{now - self._started:.1f} s" + (f", {found}" if found else "")
            line = ": ".join(filter(None, (f"{self._unit} {self._done}", what, took)))
        self._said = now
        self._stream.write(line + "\n")
        self._stream.flush()

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        if self._what is not None and kind is None:
            self.end()
        if self._bar is not None:
            self._bar.close()
