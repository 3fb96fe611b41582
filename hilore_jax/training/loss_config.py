"""Which loss an update descends: settings by the names of papers, their checks and formulas."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from hilore_jax.grpo import group_advantages, loss_divisors, mismatch_weights
from hilore_jax.grpo.divisors import Mean
from hilore_jax.grpo.terms import LossOptions, Ratio, Surrogate
from hilore_jax.training.batch import micro

if TYPE_CHECKING:
    from hilore_jax.training.config import TrainConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossSettings:
    """The loss among the settings of `hilore train`."""

    loss: Literal["dapo", "grpo", "dr_grpo", "bnpo", "gspo", "cispo"] = "dapo"
    """dapo: mean over tokens; grpo: over completions; dr_grpo: sums over a fixed length; bnpo: a
    token mean for each prompt; gspo: one ratio a completion; cispo: held ratios, no token left
    out."""
    clip_high: float | None = None
    """Upper epsilon of the clipping, where it is not `clip`; DAPO has 0.28."""
    clip_dual: float | None = None
    """Largest ratio of a token with a negative advantage, above 1 (dual clip, for example 3)."""
    reference: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the distance to the reference model, which `beta` weighs."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """Whose deviation advantages are divided by."""
    mask_truncated: bool = False
    """Leave out completions that did not end within `completion_length`."""
    correction: Literal["none", "token", "sequence"] = "none"
    """Weigh tokens or completions by how much likelier the learner finds them than the sampler."""
    correction_beyond: Literal["truncate", "mask"] = "truncate"
    """What becomes of a weight above `correction_cap`: the cap, or 0."""
    correction_cap: float = 2.0
    """Largest weight of the correction."""
    entropy_coef: float = 0.0
    """Weight of a bonus for the policy's entropy; no risk budget counts it."""


class Formula(NamedTuple):
    """What a loss's name stands for."""

    mean: Mean
    ratio: Ratio = "token"
    surrogate: Surrogate = "clip"


FORMULAS: Mapping[str, Formula] = {
    "dapo": Formula("token"),
    "grpo": Formula("sequence"),
    "dr_grpo": Formula("constant"),
    "bnpo": Formula("local"),
    "gspo": Formula("sequence", ratio="sequence"),
    "cispo": Formula("token", surrogate="cispo"),
}


def loss_options(config: TrainConfig) -> LossOptions:
    """The keyword arguments of `grpo.loss_and_coefficients`."""
    formula = FORMULAS[config.loss]
    return LossOptions(
        clip=config.clip,
        beta=config.beta,
        clip_high=config.clip_high,
        clip_dual=config.clip_dual,
        ratio=formula.ratio,
        surrogate=formula.surrogate,
        reference=config.reference,
    )


def loss_faults(config: TrainConfig) -> list[str]:
    """What is wrong with the settings of the loss, one sentence each; their numbers are good."""
    found = []
    formula = FORMULAS[config.loss]
    if config.clip_dual is not None and config.clip_dual <= 1:
        found.append(f"clip_dual must be > 1, found {config.clip_dual}")
    if config.clip_dual is not None and formula.surrogate == "cispo":
        found.append("clip_dual with loss cispo, which holds all ratios already; leave it out")
    if config.correction == "token" and formula.ratio == "sequence":
        found.append(
            f"correction token with loss {config.loss}, whose tokens have one ratio a completion; "
            "take --correction sequence"
        )
    if config.correction != "none" and config.old_logps == "rollout":
        found.append(
            f"correction {config.correction} with old_logps rollout: the old log-probs are the "
            "sampler's own, there is nothing to correct; take --old-logps score"
        )
    idle = {
        "correction_beyond": (config.correction == "none", "without correction"),
        "correction_cap": (config.correction == "none", "without correction"),
        "reference": (config.beta == 0, "with beta 0"),
    }
    for name, (unread, why) in idle.items():
        if unread and getattr(config, name) != getattr(LossSettings(), name):
            found.append(f"{name} {getattr(config, name)} would do nothing {why}; leave it out")
    risky = [n for n in ("ladder", "gate", "skip_rows", "pack_by_exposure") if getattr(config, n)]
    if config.entropy_coef and risky:
        found.append(
            f"entropy_coef with {' and '.join(risky)}: the bonus moves tokens that exposure does "
            "not count; leave one of them out"
        )
    return found


def row_advantages(
    config: TrainConfig,
    rewards: Float[np.ndarray, "prompts group"],
    logp_old: Float[Array | np.ndarray, "micro rows completion"],
    logp_rollout: Float[np.ndarray, "all_rows completion"],
    mask: Bool[np.ndarray, "all_rows completion"],
) -> tuple[Float[Array, "..."], dict[str, float]]:
    """Advantages of an update's rows, with the weights that correct the sampler's policy.

    Args:
        config: `scale_rewards` and the correction.
        rewards: of the completions.
        logp_old: the learner's, nats.
        logp_rollout: the sampler's, nats.
        mask: the optimized tokens.

    Returns:
        `[micro, rows]`, or `[micro, rows, completion]` of a correction a token; and metrics.
    """
    advantages = group_advantages(jnp.asarray(rewards), config.scale_rewards).reshape(-1)
    metrics = {}
    if config.correction != "none":
        old = jnp.asarray(logp_old).reshape(mask.shape)
        how: Any = {"level": config.correction, "beyond": config.correction_beyond}
        weights = mismatch_weights(old, logp_rollout, mask, cap=config.correction_cap, **how)
        tokens = weights.ndim == 2
        seen = np.asarray(weights)[mask] if tokens else np.asarray(weights)[mask.any(axis=1)]
        if seen.size:
            metrics = {
                "sampling/importance_sampling_ratio/mean": float(seen.mean()),
                "sampling/importance_sampling_ratio/min": float(seen.min()),
                "sampling/importance_sampling_ratio/max": float(seen.max()),
            }
        advantages = (advantages[:, None] if tokens else advantages) * weights
    return micro(advantages, config.micro_rows), metrics


def row_divisors(
    config: TrainConfig, mask: Bool[np.ndarray, "all_rows completion"]
) -> Float[Array, "micro rows"] | None:
    """What each row's sum is divided by; None: the update's tokens."""
    mean = FORMULAS[config.loss].mean
    if mean == "token":
        return None
    of_mean: dict[str, Any] = {
        "constant": {"longest": config.completion_length},
        "local": {"local_rows": config.group},
    }
    found = loss_divisors(mask.sum(axis=1), mean, **of_mean.get(mean, {}))
    return micro(found, config.micro_rows)
