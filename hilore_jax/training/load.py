"""Plans, ladders and calibrations as commands read them: errors name the option and other kinds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hilore_jax.planning.calibration import Calibration
from hilore_jax.planning.files import read
from hilore_jax.planning.ladder import Ladder
from hilore_jax.planning.plan import Plan
from hilore_jax.training.facts import check_facts

READERS = {"plan": Plan, "ladder": Ladder, "calibration": Calibration}


def load_file(path: str | Path, kind: str, option: str = "") -> Any:
    """A file of ours.

    Args:
        path: the file.
        kind: one of `READERS`.
        option: that named the file, such as `--plan`.

    Returns:
        A `Plan`, `Ladder` or `Calibration`.

    Raises:
        FileNotFoundError, OSError: it is not there, or cannot be read.
        ValueError: of another kind, for which it says what takes that; or damaged.

    Example:
        >>> load_file("none.json", "calibration", "--calibration")
        Traceback (most recent call last):
        ...
        FileNotFoundError: --calibration none.json: no such file; hilore calibrate --out FILE ...
    """
    read(path, kind, option)
    made = READERS[kind].load(path)
    for each in made.plans if isinstance(made, Ladder) else (made,):
        again = "Calibrate again." if kind == "calibration" else "Plan again."
        check_facts(each.fingerprint, f"{path} is a damaged {kind} file", again)
    return made
