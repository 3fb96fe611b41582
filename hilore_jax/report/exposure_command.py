"""`hilore exposure`: which tokens, groups and microbatches of a run can take low precision."""

from __future__ import annotations

import dataclasses
import os
import shutil
import sys
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import tyro

from hilore_jax.planning.bounds import Real, Whole, number_faults, refuse_faults
from hilore_jax.planning.files import check_folder
from hilore_jax.report.exposure_plots import plot_exposure
from hilore_jax.report.exposure_text import exposure_text
from hilore_jax.report.run_folder import explore


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExposureConfig:
    """Exposure by token, group, microbatch and update of a run, as text and pictures."""

    run_dir: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Folder of `hilore train --run-dir`; or --run-dir RUN."""
    update: int = 0
    """The update whose sequences are shown; 0 for the last one recorded that was exposed."""
    by: Literal["state", "token"] = "state"
    """Heat of a token: exposure of the state there (all tokens from there on), or its own."""
    top: int = 5
    """Most exposed sequences to show."""
    colour: Literal["auto", "always", "never"] = "auto"
    """Tokens coloured, or bars below them; by itself colours on a terminal without NO_COLOR."""
    plots: bool = True
    """Also write pictures."""
    out: str = ""
    """Folder of the pictures; the run folder by itself."""

    BOUNDS: ClassVar[dict[str, Whole | Real]] = {
        "top": Whole(),
        "update": Whole(0, why="0 is the last one exposed"),
    }


def run_exposure(config: ExposureConfig) -> list[Path]:
    """Prints the tables and sequences, and writes the pictures.

    Args:
        config: the settings.

    Returns:
        The pictures' files.

    Raises:
        ValueError: no run folder, or one without a record of exposures.
        ImportError: pictures without the `[plots]` extra; the text is printed before.
    """
    refuse_faults(list(number_faults(config).values()))
    if config.out:
        check_folder(config.out, f"--out {config.out}")
    run = explore(config.run_dir, config.update)
    colour = config.colour == "always" or (
        config.colour == "auto" and sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    )
    columns = min(shutil.get_terminal_size((100, 24)).columns, 140)
    print(exposure_text(run, by=config.by, top=config.top, colour=colour, width=columns))
    if not config.plots:
        return []
    folder = Path(config.out or config.run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    written = plot_exposure(run, folder, by=config.by, top=config.top)
    print("\npictures: " + ", ".join(str(path) for path in written))
    return written
