"""A bar over a plan's compilations, or its timed updates."""

import sys
from typing import Any


class Bar:
    """A bar over compilations, or other units, on a terminal; nothing elsewhere."""

    def __init__(self, wanted: bool | None, total: int, unit: str = "compilation"):
        self._wanted = sys.stderr.isatty() if wanted is None else wanted
        self._total, self._unit = total, unit
        self._bar: Any = None

    def __enter__(self) -> "Bar":
        if self._wanted:
            from tqdm import tqdm

            self._bar = tqdm(total=self._total, unit=self._unit, leave=False)
        return self

    def step(self, what: str) -> None:
        """Announces the next one."""
        if self._bar is not None:
            self._bar.set_postfix_str(what[:60])
            self._bar.update()

    def __exit__(self, *_: Any) -> None:
        if self._bar is not None:
            self._bar.close()
