"""Curves of several runs with their spread, drawn into a PNG without touching pyplot's state."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from hilore_jax._extras import require

# Okabe and Ito's palette, distinct also for colour-blind readers; dashes tell curves apart in grey.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_DASHES = ("-", (0, (5, 2)), (0, (1.5, 1.5)), "-.")
_STYLE = {
    "font.size": 12,
    "axes.titlesize": 13,
    "axes.labelsize": 12,
    "legend.fontsize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


@dataclasses.dataclass(frozen=True)
class Curves:
    """One quantity of some runs, at the same updates in each run.

    Attributes:
        at: updates.
        values: the quantity; one row a run. Not-a-number is left out.
    """

    at: Int[np.ndarray, " points"]
    values: Float[np.ndarray, "runs points"]

    def averaged(self, width: int) -> Curves:
        """The trailing average over `width` points, over those there are at the start.

        Example:
            >>> curves = Curves(np.array([1, 2, 3]), np.array([[0.0, 1.0, 3.0]]))
            >>> curves.averaged(2).values.tolist()
            [[0.0, 0.5, 2.0]]
        """
        starts = np.maximum(np.arange(self.at.size) - width + 1, 0)
        columns = [self.values[:, a : b + 1].mean(axis=1) for b, a in enumerate(starts)]
        return Curves(self.at, np.stack(columns, axis=1))

    def band(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Updates, mean, least and greatest value over the runs, where any run has one.

        Example:
            >>> curves = Curves(np.array([1, 2]), np.array([[0.0, 1.0], [0.5, np.nan]]))
            >>> [line.tolist() for line in curves.band()]
            [[1, 2], [0.25, 1.0], [0.0, 1.0], [0.5, 1.0]]
        """
        seen = ~np.all(np.isnan(self.values), axis=0)
        values = self.values[:, seen]
        reduced = (np.nanmean(values, axis=0), np.nanmin(values, axis=0), np.nanmax(values, axis=0))
        return self.at[seen], *reduced


@dataclasses.dataclass(frozen=True)
class Panel:
    """One set of axes: a quantity by update, one colour a label.

    Attributes:
        title: what is shown.
        y_label: the quantity and its unit.
        curves: label -> its runs; the same label has the same colour in every panel.
        lines: label -> height of a horizontal reference line, written above its right end.
        log: logarithmic y axis.
        y_limits: range of the y axis; chosen from the data when None.
        markers: mark every point (for few points).
        average: points of the trailing average that each curve is drawn as.
    """

    title: str
    y_label: str
    curves: Mapping[str, Curves]
    lines: Mapping[str, float] = dataclasses.field(default_factory=dict)
    log: bool = False
    y_limits: tuple[float, float] | None = None
    markers: bool = False
    average: int = 1


def plot_curves(
    panels: Sequence[Panel], path: Path | str, *, title: str, x_label: str = "actor update"
) -> None:
    """Writes a PNG: a panel each, the mean over runs as a line, least to greatest as a band.

    Args:
        panels: what to draw, from left to right.
        path: the file; its folder must exist.
        title: above all panels; say model, task and device.
        x_label: of every panel.

    Raises:
        ImportError: the `[plots]` extra is missing.
        ValueError: there is no panel.
    """
    if not panels:
        raise ValueError("plot_curves needs at least one Panel, found none")
    labels = list(dict.fromkeys(label for panel in panels for label in panel.curves))
    with drawing(len(panels), path, title=title) as axes:
        for ax, panel in zip(axes, panels, strict=True):
            _draw(ax, panel, labels)
            ax.set_xlabel(x_label)
            whole_numbers(ax)


@contextlib.contextmanager
def drawing(panels: int, path: Path | str, *, title: str) -> Iterator[Sequence[Any]]:
    """Axes side by side, in the style of all figures, written to a PNG at the end.

    Args:
        panels: how many.
        path: the file; its folder must exist.
        title: above all panels.

    Raises:
        ImportError: the `[plots]` extra is missing.
    """
    matplotlib = require("matplotlib", "plots", "a figure")
    figure_type = require("matplotlib.figure", "plots", "a figure").Figure
    canvas_type = require("matplotlib.backends.backend_agg", "plots", "a figure").FigureCanvasAgg
    with matplotlib.rc_context(_STYLE):
        figure = figure_type(figsize=(6.2 * panels, 5.0), dpi=150, layout="constrained")
        canvas_type(figure)
        yield figure.subplots(1, panels, squeeze=False)[0]
        figure.suptitle(title, fontsize=14)
        figure.savefig(path)


def whole_numbers(ax: Any) -> None:
    """Ticks of the x axis at whole updates only."""
    ax.locator_params(axis="x", integer=True)


def _draw(ax: Any, panel: Panel, labels: Sequence[str]) -> None:
    for label, curves in panel.curves.items():
        place = labels.index(label)
        colour, dash = _COLOURS[place % len(_COLOURS)], _DASHES[place % len(_DASHES)]
        at, mean, low, high = curves.averaged(panel.average).band()
        marker = "o" if panel.markers else None
        ax.fill_between(at, low, high, color=colour, alpha=0.18, linewidth=0)
        ax.plot(at, mean, color=colour, linestyle=dash, marker=marker, linewidth=2, label=label)
    for label, height in panel.lines.items():
        ax.axhline(height, color="0.4", linestyle=":", linewidth=1.5)
        place = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
        ax.annotate(label, (1, height), xytext=(-4, 4), ha="right", color="0.3", **place)
    if panel.log:
        ax.set_yscale("log")
    if panel.y_limits is not None:
        ax.set_ylim(*panel.y_limits)
    ax.set_title(panel.title)
    ax.set_ylabel(panel.y_label)
    ax.grid(alpha=0.3)
    ax.legend(frameon=False, loc="center right" if panel.lines else "best")
