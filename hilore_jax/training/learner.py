"""The learning half of a run: its state, scoring and the compiled update."""

from __future__ import annotations

import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from hilore_jax.models.decoder import Decoder
from hilore_jax.models.restack import restack
from hilore_jax.training.batch import Batch, micro
from hilore_jax.training.config import TrainConfig
from hilore_jax.training.experience import Experience, logp_difference, to_batch
from hilore_jax.training.exposures import Coefficients
from hilore_jax.training.logra_config import dense_optimizer, run_shape
from hilore_jax.training.logra_state import init_logra_state
from hilore_jax.training.loss_config import row_advantages, row_divisors
from hilore_jax.training.measured import measure_error, risk_metrics
from hilore_jax.training.planned import static_plan
from hilore_jax.training.publish import Publisher
from hilore_jax.training.step import init_state, make_score, raise_if_nonfinite
from hilore_jax.training.strategy import (
    Update,
    calibrated_norm,
    make_strategy,
    most_kept_bytes,
    plans,
    segment_lengths,
)

_LOG = logging.getLogger("hilore_jax")


def make_optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """AdamW with the paper's settings, methods 1.1."""
    return optax.adamw(
        config.learning_rate, b1=0.9, b2=0.999, eps=1e-8, weight_decay=config.weight_decay
    )


class Learner:
    """The compiled pieces of a run: scoring, the update, and how often that was traced.

    Args:
        config: the run's settings.
        model: the policy to train; its arrays move into `state`.
    """

    def __init__(self, config: TrainConfig, model: Decoder):
        self.config = config
        shape = run_shape(config, model.config)
        self.policies = plans(config, shape)[0]  # of a ladder, its most compressed
        self.about: dict[str, int | None] = {}  # of the compiled update, the same in every line
        self.plan = static_plan(config, shape)
        self._shape = shape
        optimizer = make_optimizer(config)
        key = jax.random.key(config.seed)
        segments = segment_lengths(config, shape)
        held = restack(model, segments)
        norm = calibrated_norm(config, shape)
        if config.optimizer == "logra":
            dense = dense_optimizer(config, optimizer)
            self.graphdef, self.state = init_logra_state(held, shape, key, dense=dense, norm=norm)
        else:
            self.graphdef, self.state = init_state(held, optimizer, key, norm)
        self.reference = self._reference_params(model)
        self._score = make_score(self.graphdef, temperature=config.temperature or 1.0)
        self.strategy = make_strategy(config, shape, self.graphdef, optimizer)
        self.publisher: Publisher | None = None
        if config.sync:
            self.publisher = Publisher(config.sync, shape, segments, config.sync_full_every)
        self._factors: dict[str, jax.Array] | None = None

    @property
    def n_traces(self) -> int:
        """How often an update, or a microbatch of one, was traced."""
        return self.strategy.n_traces

    def model(self) -> Decoder:
        """The current policy, for rollouts."""
        return nnx.merge(self.graphdef, self.state.params, self.state.frozen)

    def batch(self, experience: Experience) -> tuple[Batch, dict[str, float]]:
        """The update's batch: advantages, old and reference log-probs."""
        config = self.config
        tokens = micro(experience.tokens, config.micro_rows)
        mask = micro(experience.attention_mask, config.micro_rows)
        old = micro(experience.rollout_logps, config.micro_rows)
        metrics = {}
        if config.old_logps == "score":
            old = self.score(self.state.params, tokens, mask)
            metrics["rollout_logp_diff"] = logp_difference(experience, np.asarray(old))
        ref = None
        if self.reference is not None:
            ref = self.score(self.reference, tokens, mask)
        mismatch = config.optimizer == "logra" and config.step_control
        logps = old, experience.rollout_logps
        mask = experience.completion_mask
        advantages, seen = row_advantages(config, experience.rewards, *logps, mask)
        batch = to_batch(
            experience,
            advantages,
            old,
            ref,
            config.micro_rows,
            divisors=row_divisors(config, mask),
            mismatch=mismatch,
        )
        return batch, metrics | seen

    def score(self, params: nnx.State, tokens: Any, mask: Any) -> jax.Array:
        """Log-probs `[micro, rows, completion]` of the completions under `params`, nats."""
        width = self.config.completion_length
        return self._score(params, self.state.frozen, tokens, mask, completion=width)

    def compile(self, batch: Batch) -> Update:
        """The update `(state, batch) -> (state, metrics)`, compiled once; it donates the state.

        `about` then holds `update_temp_bytes`, which XLA reports, and the bytes of `kept_bytes`;
        of several plans, the most.
        """
        compiled = self.strategy.compile(self.state, batch)
        if not self.about:
            kept = most_kept_bytes(self.config, self._shape, *batch.tokens.shape[1:])
            self.about = {**self.strategy.about, **kept}
        return compiled

    def update(
        self, batch: Batch, *, tolerate: bool = False
    ) -> tuple[dict[str, Any], Coefficients]:
        """One actor update; the state moves on.

        Args:
            batch: of the update.
            tolerate: an update that is not finite, which leaves the state as it is, is told in a
                warning and by the metric `nonfinite`.

        Returns:
            Its metrics, and the coefficients of its tokens.

        Raises:
            FloatingPointError: an update that is not finite, unless it is tolerated.
        """
        self.state, metrics = self.compile(batch)(self.state, batch)
        self._factors = metrics.pop("factors", None)  # on the device, until `publish`
        metrics = jax.device_get(metrics)
        try:
            raise_if_nonfinite(metrics, batch)
        except FloatingPointError as error:
            if not tolerate:
                raise
            _LOG.warning("%s", error)
            self._factors = None  # there is no step to publish
        del metrics["nonfinite_index"]
        rows = np.arange(batch.tokens.shape[0] * batch.tokens.shape[1])
        omega = np.asarray(metrics.pop("omega")).reshape(rows.size, -1)
        micro = metrics.pop("micro_of_row", rows // batch.tokens.shape[1])
        metrics |= risk_metrics(metrics, self.plan)
        plain = {name: np.asarray(value).tolist() for name, value in metrics.items()}
        return plain, Coefficients(omega, np.asarray(micro))

    def publish(self) -> dict[str, int]:
        """Writes the packet of the update just made; sizes of it, bytes."""
        if self.publisher is None or self._factors is None:
            return {}
        # The state's own count: from it were the projections drawn.
        number = int(self.state.step) - 1
        return self.publisher.update(number, self._factors, self.state.params)

    def measure_error(self, batch: Batch) -> dict[str, float]:
        """`gradient_error` and `predicted_error` of the update to come, see `measure_error`."""
        return measure_error(self.strategy, self.state, batch, self.plan)

    def _reference_params(self, model: Decoder) -> nnx.State | None:
        if self.config.beta == 0:
            return None
        # Adapters at zero are the base model; without them the start must be copied, since the
        # update donates its state.
        frozen = jnp.zeros_like if model.config.lora is not None else jnp.copy
        return jax.tree.map(frozen, self.state.params)
