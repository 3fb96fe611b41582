"""Pictures of a run's exposures: tokens, groups and microbatches, updates, gradient errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from hilore_jax._extras import require
from hilore_jax.report.plots import Curves, Panel, drawing, plot_curves, whole_numbers
from hilore_jax.report.run_folder import ExploredRun, heat_of
from hilore_jax.report.strips import Strip, plot_strips

_UP, _DOWN = "#0072B2", "#D55E00"
_FEW = 25  # updates, below which each is marked
_WIDE = 30  # greatest over least exposure, above which the axis is logarithmic


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
    finite = micro[np.isfinite(micro)]
    wide = finite.size > 0 and 0 < _WIDE * finite.min() < finite.max()
    panels = []
    if micro.size:
        curves = {f"mean, least and greatest of {len(micro)}": Curves(at, micro)}
        title = "exposure of a microbatch"
        panels.append(Panel(title, "sum of |omega|", curves, log=bool(wide), markers=few))
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
    patch = require("matplotlib.patches", "plots", "a figure").Patch
    signs = (("advantage >= 0", _UP), ("advantage < 0", _DOWN))
    keys = [patch(color=colour, label=label) for label, colour in signs]
    places = {"group": record.group, "microbatch": record.micro}
    with drawing(2, path, title=f"update {record.step}: {run.title}") as axes:
        for ax, (name, place) in zip(axes, places.items(), strict=True):
            _bars(ax, run, np.asarray(place))
            left = int(np.sum(np.asarray(place) < 0))
            ax.set_title(f"by {name}" + (f" (rows left out: {left})" if left else ""))
            ax.set_xlabel(name)
            ax.set_ylabel("exposure, a piece a completion")
            ax.grid(axis="y", alpha=0.3)
            ax.legend(handles=keys, frameon=False)


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
    both = seen & np.isfinite(predicted)
    with drawing(2, path, title=run.title) as (left, right):
        if both.any():
            top = 1.1 * max(error[both].max(), predicted[both].max()) or 1.0
            left.plot([0, top], [0, top], color="0.4", linestyle=":", label="as predicted")
            left.plot(predicted[both], error[both], "o", color=_UP, label="an update")
            left.set_xlim(0, top)
            left.set_ylim(0, top)
            left.legend(frameon=False)
        else:
            left.text(0.5, 0.5, "no risks are known of these policies", ha="center")
        left.set_title("measured against predicted")
        left.set_xlabel("predicted gradient error")
        left.set_ylabel("measured gradient error")
        right.plot(run.steps[seen], error[seen], "o-", color=_UP, label="measured")
        if both.any():
            right.plot(run.steps[both], predicted[both], "s--", color=_DOWN, label="predicted")
        right.set_ylim(bottom=0)
        right.set_title("over updates")
        right.set_xlabel("actor update")
        right.set_ylabel("relative error of the gradient")
        right.legend(frameon=False)
        whole_numbers(right)
        for ax in (left, right):
            ax.grid(alpha=0.3)


def _bars(ax: Any, run: ExploredRun, where: np.ndarray) -> None:
    """Stacked exposures of the rows at each place, those of negative advantage on top."""
    exposures, advantage = np.asarray(run.record.exposure), np.asarray(run.record.advantage)
    for value in np.unique(where[where >= 0]):
        rows = np.flatnonzero(where == value)
        rows = rows[np.argsort(advantage[rows] < 0, kind="stable")]
        ax.bar(
            [str(value)] * len(rows),
            exposures[rows],
            bottom=np.concatenate([[0.0], np.cumsum(exposures[rows])[:-1]]),
            color=[_DOWN if a < 0 else _UP for a in advantage[rows]],
            edgecolor="white",
            linewidth=0.6,
        )


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
