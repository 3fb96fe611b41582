"""What a run folder of `hilore train` holds about exposure."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from hilore_jax.training.exposures import Record, read_record, record_paths
from hilore_jax.training.metrics import read_metrics


@dataclasses.dataclass(frozen=True)
class ExploredRun:
    """A run's settings, its metrics, and the record of one update.

    Attributes:
        folder: where it lies.
        config: its settings.
        metrics: one mapping an update.
        recorded: updates whose sequences are recorded.
        record: of the update that is looked at.
    """

    folder: Path
    config: dict[str, Any]
    metrics: tuple[dict[str, Any], ...]
    recorded: tuple[int, ...]
    record: Record

    @property
    def steps(self) -> np.ndarray:
        """The updates, as numbers."""
        return np.array([line["step"] for line in self.metrics])

    @property
    def title(self) -> str:
        """Model, task and what chose the policies."""
        way = self.config.get("ladder") or self.config.get("plan") or self.config.get("policy", "")
        gate = ", gate" if self.config.get("gate") else ""
        return f"{self.config.get('model')}, {self.config.get('task')}, {Path(way).name}{gate}"

    def series(self, name: str) -> Float[np.ndarray, "updates"]:
        """A metric of each update; NaN where an update has none."""
        return np.array([_number(line.get(name)) for line in self.metrics])

    def micro_exposures(self) -> Float[np.ndarray, "micro updates"]:
        """Exposure of each update's microbatches; NaN where an update has fewer."""
        lists: list[Sequence[Any]] = [line.get("micro_exposure") or () for line in self.metrics]
        found = np.full((max(map(len, lists), default=0), len(lists)), math.nan)
        for update, values in enumerate(lists):
            found[: len(values), update] = [_number(value) for value in values]
        return found


def explore(folder: Path | str, update: int = 0) -> ExploredRun:
    """Reads a run folder.

    Args:
        folder: that of `hilore train --run-dir`.
        update: the update to look at; 0 for the last one recorded.

    Raises:
        ValueError: no run folder, no record of exposures, or none of that update.
    """
    folder = Path(folder)
    if not (folder / "metrics.jsonl").is_file():
        raise ValueError(
            f"'{folder}' is no run folder: it has no metrics.jsonl. Name the --run-dir of a "
            "hilore train."
        )
    paths = {int(path.stem): path for path in record_paths(folder)}
    if not paths:
        raise ValueError(
            f"'{folder}' holds no record of exposures: the run was made without them. Go on with "
            "the same hilore train command and --resume --log-exposure-every 1 and more --updates, "
            "or train into another folder."
        )
    update = update or max(paths)
    if update not in paths:
        raise ValueError(f"update {update} was not recorded; recorded are {sorted(paths)}.")
    settings = folder / "config.json"
    return ExploredRun(
        folder,
        json.loads(settings.read_text()) if settings.is_file() else {},
        tuple(read_metrics(folder / "metrics.jsonl")),
        tuple(sorted(paths)),
        read_record(paths[update]),
    )


def heat_of(run: ExploredRun, by: str, most: int) -> list[tuple[int, list[str], np.ndarray]]:
    """The most exposed sequences: row, text of each token, exposure of each.

    Args:
        run: the run.
        by: `state`, exposure of the state at a token (that of all tokens from there on), or
            `token`, the token's own |omega|.
        most: how many sequences.
    """
    found = []
    for sequence in run.record.sequences[:most]:
        own = np.abs(np.asarray(sequence.omega, np.float64))
        total = run.record.exposure[sequence.row]
        heat = sequence.profile(total) if by == "state" else own
        pairs = zip(sequence.pieces, sequence.tokens, strict=True)
        pieces = [visible(piece) or f"<{token}>" for piece, token in pairs]
        found.append((sequence.row, pieces, np.asarray(heat, np.float64)))
    return found


def visible(text: str) -> str:
    r"""A text in one line, without anything that a terminal would act on.

    Example:
        >>> visible("a\nb\x1b")
        'a⏎b\\x1b'
    """
    marks = {"\n": "⏎", "\t": "⇥"}
    return "".join(
        c if c.isprintable() else marks.get(c, c.encode("unicode_escape").decode()) for c in text
    )


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)
