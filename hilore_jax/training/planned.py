"""The policies of a run: one spelled for all blocks, or a plan's."""

from __future__ import annotations

from typing import Any

import numpy as np

from hilore_jax.actions import Policy
from hilore_jax.models.config import DecoderConfig
from hilore_jax.planning.plan import Plan
from hilore_jax.training.config import TrainConfig
from hilore_jax.training.load import load_file
from hilore_jax.training.situation import check_blocks


def run_policies(config: TrainConfig, shape: DecoderConfig) -> tuple[Policy, ...]:
    """One policy a block.

    Args:
        config: the run's settings; `plan` goes before `policy`.
        shape: the model's.

    Raises:
        ValueError: a plan for another model, or one that acceptance rejected, unless
            the settings allow that.
    """
    if not config.plan:
        return (config.parsed_policy,) * shape.n_layers
    return load_plan(config, shape).policies


def load_plan(config: TrainConfig, shape: DecoderConfig) -> Plan:
    """The plan that the settings name.

    Raises:
        ValueError: see `run_policies`.
    """
    made: Plan = load_file(config.plan, "plan", "--plan")
    check_blocks(made.fingerprint, len(made.policies), shape, "plan")  # `check_plan` does the rest
    refuse_rejected(config, made, f"the plan {config.plan}")
    return made


def refuse_rejected(config: TrainConfig, made: Plan, what: str) -> None:
    """Refuses a plan that acceptance rejected.

    Args:
        config: the run's settings, which may allow it.
        made: the plan.
        what: what errors call it.

    Raises:
        ValueError: says why it was rejected, and what to do.
    """
    if made.accepted is False and not config.allow_rejected:
        reason = (made.acceptance or {}).get("reason", "its budgets were not kept")
        raise ValueError(
            f"{what} was rejected: {reason}. Plan again with a smaller risk budget or more memory, "
            "or pass --allow-rejected."
        )


def static_plan(config: TrainConfig, shape: DecoderConfig) -> Plan | None:
    """The plan under which a run keeps every microbatch: not the gate's, which chooses itself.

    Raises:
        ValueError: see `run_policies`.
    """
    return load_plan(config, shape) if config.plan and not config.gate else None


def gate_options(made: Plan) -> dict[str, Any]:
    """What `make_gated_update` needs to know of a calibrated plan's blocks.

    Seconds are those that decoding saves against recomputing everything (`Plan.cost`); what the
    policy stores exactly is there in both cases, but only the order of blocks is read from them.

    Returns:
        `coefficients`, the risk of each block per exposure, `seconds`, whether risks add linearly,
        as in the `paper`, and the `norm` in the coefficients.

    Raises:
        ValueError: the plan has no calibrated risks, or only those at exposure 0.
    """
    if made.block_risks is None or made.exposure is None:
        raise ValueError(
            "the gate needs risks measured by exposure, which this plan has not: plan with a "
            "calibration, hilore plan --calibration calibration.json."
        )
    if made.exposure == 0:
        raise ValueError(
            "the gate needs to know how risks grow with exposure, and this plan is for exposure 0, "
            "at which all of them are 0: plan for more, hilore plan --calibration "
            "calibration.json without --exposure 0."
        )
    gc = max(entry.seconds for entry in made.menu)
    return {
        "coefficients": np.array([entry.risk / made.exposure for entry in made.entries]),
        "seconds": np.array([max(0.0, gc - entry.seconds) for entry in made.entries]),
        "paper": made.paper,
        "norm": made.norm,
    }
