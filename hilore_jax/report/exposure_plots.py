"""Pictures of a run's exposures: tokens, groups and microbatches, updates, gradient errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from hilore_jax._extras import require
from hilore_jax.report.plots import Curves, Panel, plot_curves
from hilore_jax.report.run_folder import ExploredRun, heat_of
from hilore_jax.report.strips import Strip, plot_strips

_UP, _DOWN = "#0072B2", "#D55E00"
_FEW = 25  # updates, below which each is marked


def plot_exposure(run: ExploredRun, folder: Path, *, by: str = "state", top: int = 8) -> list[Path]:
    """Writes every picture that the run has the data for.

    Args:
        run: from `explore`.
        folder: where to write; it must exist.
        by: what the heat of a token is, see `heat_of`.
        top: most exposed sequences to draw.

    Returns:
        The files: `exposure_tokens.png`, `exposure_groups.png`, `exposure_updates.png`, and
        `exposure_error.png` if the run measured its gradient's error.

    Raises:
        ImportError: the `[plots]` extra is missing.
    """
    written = [folder / "exposure_tokens.png", folder / "exposure_groups.png"]
    plot_strips(
        _strips(run, by, top),
        written[0],
        title=f"update {run.record.step}: {run.title}",
        label="exposure of the state" if by == "state" else "|omega| of the token",
    )
    plot_groups(run, written[1])
    written.append(folder / "exposure_updates.png")
    plot_curves(update_panels(run), written[-1], title=run.title)
    if np.isfinite(run.series("gradient_error")).any():
        written.append(folder / "exposure_error.png")
        plot_errors(run, written[-1])
    return written


def update_panels(run: ExploredRun) -> list[Panel]:
    """Microbatches' exposure over updates, and the risk used against its budget."""
    at, few = run.steps, len(run.metrics) <= _FEW
    micro = run.micro_exposures()
    positive = bool(np.all(micro[np.isfinite(micro)] > 0))
    panels = []
    if micro.size:
        curves = {f"mean, least and greatest of {len(micro)}": Curves(at, micro)}
        title = "exposure of a microbatch"
        panels.append(Panel(title, "sum of |omega|", curves, log=positive, markers=few))
    used = {
        name: Curves(at, run.series(key)[None])
        for name, key in (
            ("risk used", "risk_used"),
            ("risk budget", "risk_budget"),
            ("measured error", "gradient_error"),
        )
        if np.isfinite(run.series(key)).any()
    }
    if used:
        title = "predicted gradient error and its budget"
        panels.append(Panel(title, "relative error of the gradient", used, markers=few))
    if not panels:  # of a run that was made before microbatches' exposures were metrics
        total = Curves(at, run.series("exposure")[None])
        panels.append(Panel("exposure of an update", "sum of |omega|", {"update": total}))
    return panels


def plot_groups(run: ExploredRun, path: Path) -> None:
    """Writes a PNG: exposure of each group and microbatch, a piece for each completion.

    Args:
        run: from `explore`.
        path: the file; its folder must exist.

    Raises:
        ImportError: the `[plots]` extra is missing.
    """
    record = run.record
    axes, save = _figure(2, f"update {record.step}: {run.title}")
    exposures, advantage = np.asarray(record.exposure), np.asarray(record.advantage)
    for ax, name, place in zip(
        axes, ("group", "microbatch"), (record.group, record.micro), strict=True
    ):
        where = np.asarray(place)
        kept = np.unique(where[where >= 0])
        for value in kept:
            rows = np.flatnonzero(where == value)
            rows = rows[np.argsort(advantage[rows] < 0, kind="stable")]
            below = np.concatenate([[0.0], np.cumsum(exposures[rows])[:-1]])
            colours = [_DOWN if a < 0 else _UP for a in advantage[rows]]
            ax.bar(
                [str(value)] * len(rows),
                exposures[rows],
                bottom=below,
                color=colours,
                edgecolor="white",
                linewidth=0.6,
            )
        left = int(np.sum(where < 0))
        ax.set_title(f"by {name}" + (f" ({left} rows left out)" if left else ""))
        ax.set_xlabel(name)
        ax.set_ylabel("exposure, a piece a completion")
        ax.grid(axis="y", alpha=0.3)
        for label, colour in (("advantage >= 0", _UP), ("advantage < 0", _DOWN)):
            ax.bar([], [], color=colour, label=label)
        ax.legend(frameon=False)
    save(path)


def plot_errors(run: ExploredRun, path: Path) -> None:
    """Writes a PNG: measured against predicted gradient error, and both over updates.

    Args:
        run: from `explore`; one that measured.
        path: the file; its folder must exist.

    Raises:
        ImportError: the `[plots]` extra is missing.
    """
    error, predicted = run.series("gradient_error"), run.series("predicted_error")
    seen = np.isfinite(error)
    axes, save = _figure(2, run.title)
    both = seen & np.isfinite(predicted)
    if both.any():
        top = 1.1 * max(error[both].max(), predicted[both].max()) or 1.0
        axes[0].plot([0, top], [0, top], color="0.4", linestyle=":", label="as predicted")
        axes[0].plot(predicted[both], error[both], "o", color=_UP, label="an update")
        axes[0].set_xlim(0, top)
        axes[0].set_ylim(0, top)
        axes[0].legend(frameon=False)
    else:
        axes[0].text(0.5, 0.5, "no risks are known of these policies", ha="center")
    axes[0].set_title("measured against predicted")
    axes[0].set_xlabel("predicted gradient error")
    axes[0].set_ylabel("measured gradient error")
    axes[1].plot(run.steps[seen], error[seen], "o-", color=_UP, label="measured")
    axes[1].plot(run.steps[both], predicted[both], "s--", color=_DOWN, label="predicted")
    axes[1].set_ylim(bottom=0)
    axes[1].set_title("over updates")
    axes[1].set_xlabel("actor update")
    axes[1].set_ylabel("relative error of the gradient")
    axes[1].legend(frameon=False)
    for ax in axes:
        ax.grid(alpha=0.3)
    save(path)


def _figure(panels: int, title: str) -> tuple[Any, Any]:
    figure_type = require("matplotlib.figure", "plots", "a figure").Figure
    canvas_type = require("matplotlib.backends.backend_agg", "plots", "a figure").FigureCanvasAgg
    figure = figure_type(figsize=(6.2 * panels, 4.6), dpi=150, layout="constrained")
    canvas_type(figure)
    figure.suptitle(title, fontsize=14)
    return figure.subplots(1, panels, squeeze=False)[0], figure.savefig


def _strips(run: ExploredRun, by: str, top: int) -> list[Strip]:
    record = run.record
    found = []
    for row, pieces, heat in heat_of(run, by, top):
        text = (
            f"row {row}, group {record.group[row]}: reward {record.reward[row]:g}, "
            f"advantage {record.advantage[row]:+.2f}, exposure {record.exposure[row]:.4g}"
        )
        found.append(Strip(text, pieces, heat))
    return found
