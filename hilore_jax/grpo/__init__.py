"""GRPO as small functions over arrays: advantages, loss and coefficients, exposure, log-probs."""

from hilore_jax.grpo.advantages import group_advantages as group_advantages
from hilore_jax.grpo.advantages import group_rewards as group_rewards
from hilore_jax.grpo.divisors import loss_divisors as loss_divisors
from hilore_jax.grpo.entropy import entropy_loss as entropy_loss
from hilore_jax.grpo.estimate import ExposureEstimate as ExposureEstimate
from hilore_jax.grpo.estimate import dead_rows as dead_rows
from hilore_jax.grpo.estimate import estimate_exposure as estimate_exposure
from hilore_jax.grpo.exposure import exposure as exposure
from hilore_jax.grpo.logprobs import token_logprobs as token_logprobs
from hilore_jax.grpo.mismatch import mismatch_weights as mismatch_weights
from hilore_jax.grpo.objective import loss_and_coefficients as loss_and_coefficients
from hilore_jax.grpo.ratio_metrics import RatioMetrics as RatioMetrics
from hilore_jax.grpo.ratio_metrics import ratio_metrics as ratio_metrics

__all__ = [
    "ExposureEstimate",
    "RatioMetrics",
    "dead_rows",
    "entropy_loss",
    "estimate_exposure",
    "exposure",
    "group_advantages",
    "group_rewards",
    "loss_and_coefficients",
    "loss_divisors",
    "mismatch_weights",
    "ratio_metrics",
    "token_logprobs",
]
