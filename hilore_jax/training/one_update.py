"""One update of a run from its questions to its metrics, and how well the policy does after it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from hilore_jax.grpo import group_advantages
from hilore_jax.training.batch import Batch
from hilore_jax.training.config import TrainConfig
from hilore_jax.training.evaluate import FIRST, evaluate
from hilore_jax.training.experience import collect
from hilore_jax.training.exposures import make_record, write_record
from hilore_jax.training.learner import Learner
from hilore_jax.training.parts import Parts


def one_update(
    config: TrainConfig, parts: Parts, learner: Learner, step: int, *, tolerate: bool
) -> tuple[dict[str, Any], Batch]:
    """Samples, scores, measures and updates; the learner's state moves on.

    Args:
        config: the settings.
        parts: model, tokenizer and task.
        learner: whose state is updated.
        step: updates done before.
        tolerate: as of `Learner.update`.

    Returns:
        The update's metrics and its batch.

    Raises:
        ValueError, FloatingPointError: as of `trainer.train`; the state is as it was before.
    """
    began = time.perf_counter()
    experience = collect(
        learner.model(),
        parts.tokenizer,
        parts.task,
        range(step * config.prompts, (step + 1) * config.prompts),
        jax.random.fold_in(learner.state.key, step),
        group=config.group,
        prompt_length=config.prompt_length,
        completion_length=config.completion_length,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        mask_truncated=config.mask_truncated,
        drop_failed=config.reward_failures == "drop",
        reward_seconds=config.reward_seconds,
    )
    sampled = time.perf_counter()
    batch, scores = learner.batch(experience)
    learner.compile(batch)
    jax.block_until_ready(batch)
    measured = {}
    if _is_due(config.measure_error_every, step):
        measured = learner.measure_error(batch)
    ready = time.perf_counter()
    metrics, coefficients = learner.update(batch, tolerate=tolerate)
    done = time.perf_counter()
    if not _is_due(config.realized_kl_every, step):
        metrics.pop("realized_kl", None)
    if _is_due(config.log_exposure_every, step) and not metrics["nonfinite"]:
        advantages = np.asarray(group_advantages(experience.rewards, config.scale_rewards))
        record = make_record(
            step + 1, experience, advantages.reshape(-1), coefficients, parts.tokenizer
        )
        write_record(Path(config.run_dir), record)
    return {
        "step": step + 1,
        **experience.metrics,
        **scores,
        **metrics,
        **measured,
        "n_traces": learner.n_traces,
        **learner.about,
        "seconds/rollout": sampled - began,
        "seconds/update": done - ready,
    }, batch


def _is_due(every: int, step: int) -> bool:
    """Whether something is done in the update after `step`: in the first, and each `every` more."""
    return every > 0 and step % every == 0


def evaluation(config: TrainConfig, parts: Parts, learner: Learner, step: int) -> dict[str, Any]:
    """Metrics of the policy on held-out questions, where they are due after `step` updates.

    Args:
        config: the settings.
        parts: tokenizer and task.
        learner: whose policy is looked at.
        step: updates done.
    """
    if config.eval_every <= 0 or (step % config.eval_every and step != config.updates):
        return {}
    began = time.perf_counter()
    sampling: dict[str, Any] = {"temperature": 0.0}
    if config.eval_sampling == "as-trained":
        sampling = {name: getattr(config, name) for name in ("temperature", "top_p", "top_k")}
    found = evaluate(
        learner.model(),
        parts.tokenizer,
        parts.task,
        range(FIRST, FIRST + config.eval_prompts),
        rows=min(config.rows, config.eval_prompts),
        prompt_length=config.prompt_length,
        completion_length=config.completion_length,
        reward_seconds=config.reward_seconds,
        key=jax.random.key(config.seed),
        **sampling,
    )
    return {**found.metrics(), "seconds/eval": time.perf_counter() - began}
