"""The Pareto curve of a plan: peak memory against seconds of recomputation."""

from pathlib import Path
from typing import Any

from hilore_jax._extras import require
from hilore_jax.planning.plan import Plan


def plot_pareto(plan: Plan, path: str | Path | None = None) -> Any:
    """Draws the best choice at each memory budget, with the budget and the plan.

    Args:
        plan: from `hilore_jax.plan`.
        path: where to write it (PNG or SVG by its ending); None: only return it.

    Returns:
        A matplotlib `Figure`.

    Raises:
        ImportError: the `[plots]` extra is missing.
    """
    figure_type = require("matplotlib.figure", "plots", "a figure").Figure
    figure = figure_type(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot()
    rows = plan.pareto()
    gib = 2.0**30
    axes.step(
        [row["peak"] / gib for row in rows],
        [1e3 * row["seconds"] for row in rows],
        where="post",
        color="#0072b2",
        linewidth=2,
        label="best choice (predicted peak)",
    )
    at = plan.memory.peak / gib, 1e3 * plan.recompute_seconds
    axes.plot(*at, "o", color="#d55e00", markersize=9, label="this plan (compiled peak)")
    gc_seconds = len(plan.policies) * max(entry.seconds for entry in plan.menu)
    axes.plot(plan.gc.peak / gib, 1e3 * gc_seconds, "s", color="black", label="all recomputed (GC)")
    axes.axvline(plan.budget / gib, color="black", linestyle=":", label="memory budget")
    axes.set_xlabel("peak memory, GiB")
    axes.set_ylabel(f"recomputation, ms a microbatch ({plan.cost})")
    axes.set_title(f"{len(plan.policies)} blocks on {plan.target}, risk <= {plan.risk_budget:g}")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    if path is not None:
        figure.savefig(path, dpi=150)
    return figure
