"""The learning half of a run: its state, scoring and the compiled update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from hilore_jax.grpo import group_advantages
from hilore_jax.models.decoder import Decoder, segment
from hilore_jax.training.batch import Batch, micro
from hilore_jax.training.config import TrainConfig
from hilore_jax.training.experience import Experience, logp_difference, to_batch
from hilore_jax.training.planned import run_policies
from hilore_jax.training.report import kept_bytes
from hilore_jax.training.step import (
    TrainState,
    init_state,
    jit_update,
    make_actor_update,
    make_score,
    raise_if_nonfinite,
)


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
        self.policies = run_policies(config, model.config)
        self.n_traces = 0
        self.about: dict[str, int | None] = {}  # of the compiled update, the same in every line
        self._shape = model.config
        optimizer = make_optimizer(config)
        key = jax.random.key(config.seed)
        self.graphdef, self.state = init_state(segment(model, self.policies), optimizer, key)
        self.reference = self._reference_params(model)
        temperature = config.temperature or 1.0
        self._score = make_score(self.graphdef, temperature=temperature)
        update = make_actor_update(
            self.graphdef,
            optimizer,
            clip=config.clip,
            beta=config.beta,
            temperature=temperature,
            max_grad_norm=config.max_grad_norm,
            entropy=config.log_entropy,
        )
        self._jitted = jit_update(self._counted(update))
        self._compiled: Callable[[TrainState, Batch], Any] | None = None

    def model(self) -> Decoder:
        """The current policy, for rollouts."""
        return nnx.merge(self.graphdef, self.state.params, self.state.frozen)

    def batch(self, experience: Experience) -> tuple[Batch, dict[str, float]]:
        """The update's batch: advantages, old and reference log-probs."""
        config = self.config
        advantages = group_advantages(jnp.asarray(experience.rewards))
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
        return to_batch(experience, advantages, old, ref, config.micro_rows), metrics

    def score(self, params: nnx.State, tokens: Any, mask: Any) -> jax.Array:
        """Log-probs `[micro, rows, completion]` of the completions under `params`, nats."""
        width = self.config.completion_length
        return self._score(params, self.state.frozen, tokens, mask, completion=width)

    def compile(self, batch: Batch) -> Callable[[TrainState, Batch], Any]:
        """The update `(state, batch) -> (state, metrics)`, compiled once; it donates the state.

        `about` then holds `update_temp_bytes`, which XLA reports, and the bytes of `kept_bytes`.
        """
        if self._compiled is None:
            compiled = self._jitted.lower(self.policies, self.state, batch).compile()
            analysis = compiled.memory_analysis()
            temp = None if analysis is None else int(analysis.temp_size_in_bytes)
            rows, seq = batch.tokens.shape[1:]
            kept = kept_bytes(self._shape, self.policies, rows, seq)
            self.about = {"update_temp_bytes": temp, **kept}
            self._compiled = compiled
            return compiled
        return self._compiled

    def update(self, batch: Batch) -> dict[str, Any]:
        """One actor update; the state moves on. Raises FloatingPointError on a non-finite one."""
        self.state, metrics = self.compile(batch)(self.state, batch)
        metrics = jax.device_get(metrics)
        raise_if_nonfinite(metrics, batch)
        del metrics["nonfinite_index"]
        return {name: value.item() for name, value in metrics.items()}

    def _reference_params(self, model: Decoder) -> nnx.State | None:
        if self.config.beta == 0:
            return None
        # Adapters at zero are the base model; without them the start must be copied, since the
        # update donates its state.
        frozen = jnp.zeros_like if model.config.lora is not None else jnp.copy
        return jax.tree.map(frozen, self.state.params)

    def _counted(self, update):
        def counted(policies, state, batch):
            self.n_traces += 1
            return update(policies, state, batch)

        return counted
