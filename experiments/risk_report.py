"""Figures and the picture of `risk_model.py`."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

Rows = Sequence[dict[str, Any]]


def rank_correlation(x: Sequence[float], y: Sequence[float]) -> float:
    """Spearman's: Pearson's of the ranks, ties at their mean.

    >>> round(rank_correlation([1, 2, 3, 4], [10, 30, 20, 40]), 3)
    0.8
    """
    from scipy.stats import rankdata

    return float(np.corrcoef(rankdata(x), rankdata(y))[0, 1])


def summary(
    trials: Rows, updates: Rows, bias: float, norm: float, planners: Sequence[str]
) -> dict[str, Any]:
    """How well errors are predicted, and what each planner recomputes at the same one.

    `norm` is the calibration's mean norm of an update's gradient, `bias` the factor
    of joint policies that predictions have.
    """
    groups = {"all": trials} | {
        name: [row for row in trials if row["real"] is real]
        for name, real in (("real", True), ("scaled", False))
    }
    predictors = {
        "risk": lambda row: row["predicted"],
        "tensor error x exposure": lambda row: row["tensor_error"] * row["exposure"],
        "tensor error": lambda row: row["tensor_error"],
    }
    found: dict[str, Any] = {}
    for name, rows in groups.items():
        if len(rows) < 3:
            continue
        measured = [row["measured"] for row in rows]
        ratios = [row["measured"] / row["predicted"] for row in rows]
        found[name] = {
            "trials": len(rows),
            "predicted_range": [f(row["predicted"] for row in rows) for f in (min, max)],
            "rank_correlation": {
                p: rank_correlation([of(row) for row in rows], measured)
                for p, of in predictors.items()
            },
            "above_prediction": statistics.fmean(r > 1 for r in ratios),
            "above_prediction_without_bias": statistics.fmean(r * bias > 1 for r in ratios),
            "measured_over_predicted": [float(q) for q in np.quantile(ratios, (0.05, 0.5, 0.95))],
        }
    points = {planner: _points(updates, planner) for planner in planners}
    ours, other = (points[planner] for planner in planners)
    same = []
    for error, flops, level in ours:
        shares = dict(zip(planners, (flops, _at(other, error)), strict=True))
        same.append({"level": level, "error": error, "recomputed": shares})
    compressed = [row for row in updates if row["predicted"] > 0]

    def ratio(planner: str, norm: Callable[[dict[str, Any]], float]) -> float:
        rows = [row for row in compressed if row["planner"] == planner]
        found = [norm(row) * row["error"] / row["predicted"] for row in rows]
        return statistics.fmean(found) if found else math.nan

    return found | {
        "updates": {
            "realized_over_predicted": {p: ratio(p, lambda row: 1.0) for p in planners},
            "were_the_norm_known": {p: ratio(p, lambda row: row["norm"] / norm) for p in planners},
            "at_the_same_error": same,
        }
    }


def _points(updates: Rows, planner: str) -> list[tuple[float, float, float]]:
    """Realized error, recomputed FLOPs and level: means over updates, by error."""
    rows = [row for row in updates if row["planner"] == planner]
    levels = sorted({row["level"] for row in rows})
    found = []
    for level in levels:
        same = [row for row in rows if row["level"] == level]
        mean = [statistics.fmean(r[k] for r in same) for k in ("error", "flops")]
        found.append((*mean, level))
    return sorted(found)


def _at(points: Sequence[tuple[float, ...]], error: float) -> float | None:
    """Interpolated over log error; None outside of what was measured."""
    known = [(math.log(p[0]), p[1]) for p in points if p[0] > 0]
    x = math.log(error) if error > 0 else -math.inf
    if not known or not known[0][0] <= x <= known[-1][0]:
        return None
    return float(np.interp(x, [e for e, _ in known], [share for _, share in known]))


def table(found: dict[str, Any]) -> str:
    """The summary for a terminal."""
    lines = []
    for name in ("all", "real", "scaled"):
        if row := found.get(name):
            ranks = ", ".join(f"{k} {v:.3f}" for k, v in row["rank_correlation"].items())
            low, middle, high = row["measured_over_predicted"]
            lines.append(
                f"{name}: {row['trials']} trials; rank correlation with the measured error: "
                f"{ranks}; above the prediction {row['above_prediction']:.0%}; measured / "
                f"predicted {middle:.2f} ({low:.2f} to {high:.2f})"
            )
    for key in ("realized_over_predicted", "were_the_norm_known"):
        ratios = ", ".join(f"{k} {v:.2f}" for k, v in found["updates"][key].items())
        lines.append(f"complete updates, {key.replace('_', ' ')}: {ratios}")
    for row in found["updates"]["at_the_same_error"]:
        shares = ", ".join(
            f"{name} " + ("not reached" if v is None else f"{v:.1%}")
            for name, v in row["recomputed"].items()
        )
        lines.append(f"at error {row['error']:.4f} recomputed: {shares}")
    return "\n".join(lines)


def draw(result: dict[str, Any], path: Path) -> None:
    """Predicted against measured errors; what planners recompute by realized error."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullFormatter, StrMethodFormatter

    figure = Figure(figsize=(11, 5), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    trials, updates = result["trials"], result["updates"]
    for real, marker, label in (
        (True, "o", "rollouts as sampled"),
        (False, "^", "advantages scaled by row"),
    ):
        rows = [row for row in trials if row["real"] is real]
        colour = "#0072b2" if real else "#e69f00"
        xs, ys = ([100 * row[k] for row in rows] for k in ("predicted", "measured"))
        left.plot(xs, ys, marker, color=colour, alpha=0.7, label=label, linestyle="none")
    values = [100 * row[k] for row in trials for k in ("predicted", "measured")]
    ends = 0.8 * min(values), 1.25 * max(values)
    left.plot(ends, ends, color="black", linewidth=1, label="measured = predicted")
    left.set(xscale="log", yscale="log", xlabel="predicted gradient error, %")
    left.set(ylabel="measured gradient error, %", title="random policies on single microbatches")
    for planner, colour, marker in zip(
        dict.fromkeys(row["planner"] for row in updates), ("#d55e00", "#333333"), "os", strict=True
    ):
        points = _points(updates, planner)
        style = {"color": colour, "marker": marker, "linewidth": 2}
        right.plot(
            [100 * p[0] for p in points], [100 * p[1] for p in points], label=planner, **style
        )
    right.set(xlabel="realized gradient error of complete updates, %")
    right.set(ylabel="matmul FLOPs recomputed, % of checkpointing's", title="plans of equal bytes")
    for side in (left.xaxis, left.yaxis):
        side.set_major_formatter(StrMethodFormatter("{x:g}"))
        side.set_minor_formatter(NullFormatter())
    for axis in (left, right):
        axis.grid(alpha=0.3, which="both")
        axis.legend(frameon=False)
    figure.suptitle(f"{result['model']}, {result['versions']['device']}")
    figure.savefig(path, dpi=110)
