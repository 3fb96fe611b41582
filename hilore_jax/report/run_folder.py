"""What a run folder of `hilore train` holds about exposure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from hilore_jax.planning.fields import Field, parsed
from hilore_jax.training.exposures import Record, read_record, record_paths
from hilore_jax.training.metrics import read_metrics

SERIES = ("exposure", "risk_used", "risk_budget", "gradient_error", "predicted_error")
"""Metrics of updates that are drawn."""


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
        update: the update to look at; 0 for the last one recorded that was exposed at all.

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
    if update == 0:
        newest = sorted(paths, reverse=True)
        update = next((n for n in newest if any(read_record(paths[n]).exposure)), newest[0])
    if update not in paths:
        raise ValueError(f"update {update} was not recorded; recorded are {sorted(paths)}.")
    return ExploredRun(
        folder,
        _settings(folder / "config.json"),
        tuple(_metrics(folder / "metrics.jsonl")),
        tuple(sorted(paths)),
        read_record(paths[update]),
    )


def _settings(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    found = parsed(path, "settings", "Remove it: it is only for the title.")
    if not isinstance(found.value, dict):
        found.refuse("an object")
    for name in ("model", "task", "ladder", "plan", "policy"):
        found.at(found.value.get(name) or "", name).any_text()
    return found.value


def _metrics(path: Path) -> list[dict[str, Any]]:
    lines = read_metrics(path)
    for number, line in enumerate(lines, 1):
        remedy = "Remove that line to go on."
        found = Field(line, path, "metrics", remedy, f"line {number}")
        found.at(line.get("step"), "step").whole(1)
        for name in SERIES:
            found.at(line.get(name), name).maybe(Field.any_number)
        for value in found.at(line.get("micro_exposure") or [], "micro_exposure").items():
            value.maybe(Field.any_number)
    return lines


def heat_of(run: ExploredRun, by: str, most: int) -> list[tuple[int, list[str], np.ndarray]]:
    """The most exposed sequences, if any is: row, text of each token, exposure of each.

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
        if total == 0:  # and of all that follow
            break
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
