"""What a plan does to an update's gradient: predicted by its risks, and measured on the spot."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from hilore_jax.planning.allocate import total_risk
from hilore_jax.planning.plan import Plan
from hilore_jax.planning.realized import predicted_error, relative_error
from hilore_jax.training.batch import Batch
from hilore_jax.training.step import TrainState
from hilore_jax.training.strategy import Strategy


def measure_error(
    strategy: Strategy, state: TrainState, batch: Batch, plan: Plan | None = None
) -> dict[str, float]:
    """The realized gradient error of one update, on the parameters that it starts from.

    Both gradients are computed apart from the update, which costs two more of them, and one more
    gradient in memory. Nothing is applied.

    Args:
        strategy: how the run computes gradients.
        state: left as it is; not yet donated to the update.
        batch: the complete update.
        plan: the static plan, where the strategy has one.

    Returns:
        `gradient_error`, `||g_L - g|| / ||g||` of the complete update before clipping (not a
        number without a gradient), and `predicted_error` where risks are known.
    """
    exact, _ = strategy.gradient(state, batch, exact=True)
    planned, metrics = strategy.gradient(state, batch)
    found = {"gradient_error": relative_error(planned, exact)}
    used = risk_metrics(metrics, plan).get("risk_used")
    return found if used is None else {**found, "predicted_error": used}


def risk_metrics(metrics: Mapping[str, Any], plan: Plan | None = None) -> dict[str, float]:
    """An update's predicted gradient error `risk_used`, and what it may be, `risk_budget`.

    Args:
        metrics: those of a ladder or of a gate hold both; else `micro_exposure` is read, and
            `grad_norm_ema` where it is there.
        plan: the static plan; its risks grow with exposure if they were calibrated.

    Returns:
        Both, or nothing where no risk is known.
    """
    for prefix in ("", "gate/"):
        if f"{prefix}risk_used" in metrics:
            return {name: float(metrics[prefix + name]) for name in ("risk_used", "risk_budget")}
    if plan is None:
        return {}
    exposures, ghat = np.asarray(metrics["micro_exposure"]), metrics.get("grad_norm_ema")
    used = predicted_error(plan, exposures, None if ghat is None else float(ghat))
    # A calibrated plan's budget is one microbatch's, as its risks are.
    parts = 1 if plan.exposure is None else np.size(metrics["micro_exposure"])
    return {
        "risk_used": used,
        "risk_budget": total_risk([plan.risk_budget] * parts, paper=plan.paper),
    }
