"""Metrics of a run: one JSON object a line, a console line, a progress bar on a terminal."""

from __future__ import annotations

import io
import json
import logging
import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

logger = logging.getLogger("hilore_jax")


class MetricsWriter:
    """Appends metrics to a JSONL file, flushed to disk at each line.

    Args:
        path: the file; its folder must exist.
        resume_step: lines with a larger `step` are dropped, and a line that an interruption cut
            short; None starts the file anew.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "metrics.jsonl"
        >>> with MetricsWriter(path) as writer:
        ...     writer.write({"step": 1, "reward": 0.5})
        >>> read_metrics(path)
        [{'step': 1, 'reward': 0.5}]
    """

    def __init__(self, path: Path, resume_step: int | None = None):
        kept = []
        if resume_step is not None and path.exists():
            kept = [line for line in read_metrics(path) if line.get("step", 0) <= resume_step]
        fresh = path.with_suffix(".tmp")
        fresh.write_text("".join(_line(metrics) for metrics in kept))
        os.replace(fresh, path)
        self._file = path.open("a")

    def write(self, metrics: Mapping[str, Any]) -> None:
        """Appends one line; arrays of one element become numbers, non-finite numbers null."""
        self._file.write(_line(metrics))
        self._file.flush()
        os.fsync(self._file.fileno())

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a metrics file; a last line cut short by an interruption is left out.

    Raises:
        ValueError: no text, a line before the last is not JSON, or one is no object.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not a metrics file: it is no text ({error}); expected one JSON object a "
            "line. Name another run folder."
        ) from None
    metrics = []
    for number, line in enumerate(lines, 1):
        try:
            metrics.append(json.loads(line))
        except (ValueError, RecursionError) as error:  # also numbers and nesting without an end
            if number < len(lines):
                raise ValueError(
                    f"{path}, line {number} is not JSON ({error}); remove that line to go on"
                ) from error
            logger.warning("%s: dropped the last line, which was cut short", path)
            continue
        if not isinstance(metrics[-1], dict):
            raise ValueError(
                f"{path}, line {number} is {line[:60]}, expected an object; remove that line to "
                "go on"
            )
    return metrics


def console_line(metrics: Mapping[str, Any], updates: int) -> str:
    """A short line for people: the update, its reward, loss, gradient norm and exposure.

    Example:
        >>> console_line({"step": 2, "reward": 0.25, "loss": 1e-3}, updates=5)
        'update 2/5  reward 0.250  loss 0.001'
    """
    shown = ("reward", "loss", "grad_norm", "exposure", "kl", "predicted_kl")
    shown = (*shown, "completions/mean_length", "eval/reward", "reward_failed", "nonfinite")
    parts = [f"update {metrics['step']}/{updates}"]
    parts += [
        f"{name} {_short(metrics[name])}"
        for name in shown
        if name in metrics and _worth(name, metrics)
    ]
    return "  ".join(parts)


def _worth(name: str, metrics: Mapping[str, Any]) -> bool:
    """Whether a person would want to see it: counts of faults only where there are any."""
    return name not in ("reward_failed", "nonfinite") or bool(metrics[name])


class Progress:
    """A tqdm bar where the stream is a terminal, else one printed line an update.

    Args:
        updates: updates of the whole run.
        done: updates done before.
        stream: where to write; standard error when None.
        quiet: write nothing.
    """

    def __init__(
        self,
        updates: int,
        done: int = 0,
        stream: TextIO | io.TextIOBase | None = None,
        *,
        quiet: bool = False,
    ):
        self._stream = sys.stderr if stream is None else stream
        self._updates = updates
        self._quiet = quiet
        self._bar = None
        if not quiet and self._stream.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=updates, initial=done, file=self._stream, unit="update")

    def update(self, metrics: Mapping[str, Any]) -> None:
        """Shows one update's metrics."""
        if self._quiet:
            return
        if self._bar is None:
            print(console_line(metrics, self._updates), file=self._stream, flush=True)
            return
        self._bar.set_postfix_str(console_line(metrics, self._updates).partition("  ")[2])
        self._bar.update(1)

    def close(self) -> None:
        """Leaves the bar as it stands."""
        if self._bar is not None:
            self._bar.close()


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(each) for each in value]
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _line(metrics: Mapping[str, Any]) -> str:
    return json.dumps({name: _plain(value) for name, value in metrics.items()}) + "\n"


def _short(value: Any) -> str:
    value = float(value)
    return f"{value:.3f}" if abs(value) >= 0.01 or value == 0 else f"{value:.3g}"
