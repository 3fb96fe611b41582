"""The policies of a run: one spelled for all blocks, or a plan's."""

from __future__ import annotations

from hilore_jax.actions import Policy
from hilore_jax.models.config import DecoderConfig
from hilore_jax.planning.plan import Plan
from hilore_jax.training.config import TrainConfig


def run_policies(config: TrainConfig, shape: DecoderConfig) -> tuple[Policy, ...]:
    """One policy a block.

    Args:
        config: the run's settings; `plan` goes before `policy`.
        shape: the model's.

    Raises:
        ValueError: a plan for another number of blocks, or one that acceptance rejected, unless
            the settings allow that.
    """
    if not config.plan:
        return (config.parsed_policy,) * shape.n_layers
    made = Plan.load(config.plan, {"blocks": str(shape.n_layers)})
    if made.accepted is False and not config.allow_rejected:
        reason = (made.acceptance or {}).get("reason", "its budgets were not kept")
        raise ValueError(
            f"the plan {config.plan} was rejected: {reason}. Plan again with a smaller risk budget "
            "or more memory, or pass --allow-rejected."
        )
    return made.policies
