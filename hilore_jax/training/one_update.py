"""One update of a run from its questions to its metrics, and how well the policy does after it."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from hilore_jax.grpo import group_advantages
from hilore_jax.training.batch import Batch
from hilore_jax.training.config import TrainConfig
from hilore_jax.training.evaluate import FIRST, evaluate
from hilore_jax.training.experience import Experience, collect
from hilore_jax.training.exposures import make_record, write_record
from hilore_jax.training.external import Rollouts, check_sampled, to_experience
from hilore_jax.training.learner import Learner
from hilore_jax.training.minibatch import mini_batch, rows_of, updates_per_rollout
from hilore_jax.training.parts import Parts


@dataclasses.dataclass(frozen=True)
class Rollout:
    """What a run learns from until it samples again.

    Attributes:
        experience: the completions and their rewards.
        batch: all of them, scored by the policy that sampled.
        metrics: about them.
    """

    experience: Experience
    batch: Batch
    metrics: dict[str, Any]


def sample_rollout(
    config: TrainConfig,
    parts: Parts,
    learner: Learner,
    number: int,
    rollouts: Rollouts | None = None,
) -> Rollout:
    """Samples completions of the run's next questions, or takes those of another engine.

    Args:
        config: the settings.
        parts: model, tokenizer and task.
        learner: whose policy samples.
        number: rollouts before this one.
        rollouts: of another engine.

    Raises:
        ValueError: a prompt that is too long, a reward that failed, or completions of the engine
            that do not fit.
    """
    began = time.perf_counter()
    if rollouts is None:
        experience = _sampled(config, parts, learner, number)
    else:
        experience = _taken(config, parts, number, rollouts)
    sampled = time.perf_counter()
    batch, scores = learner.batch(experience)
    metrics = {**experience.metrics, **scores, "seconds/rollout": sampled - began}
    return Rollout(experience, batch, metrics)


def _taken(config: TrainConfig, parts: Parts, number: int, rollouts: Rollouts) -> Experience:
    rows = rollouts(number)
    sizes = {"prompt_length": config.prompt_length, "completion_length": config.completion_length}
    check_sampled(
        rows,
        prompts=config.prompts,
        group=config.group,
        vocab_size=parts.model.config.vocab_size,
        where=f"rollout {number}",
        **sizes,
    )
    return to_experience(
        rows, parts.tokenizer, group=config.group, mask_truncated=config.mask_truncated, **sizes
    )


def _sampled(config: TrainConfig, parts: Parts, learner: Learner, number: int) -> Experience:
    return collect(
        learner.model(),
        parts.tokenizer,
        parts.task,
        range(number * config.prompts, (number + 1) * config.prompts),
        jax.random.fold_in(learner.state.key, number),
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


def one_update(
    config: TrainConfig,
    parts: Parts,
    learner: Learner,
    rollout: Rollout,
    step: int,
    *,
    tolerate: bool,
) -> tuple[dict[str, Any], Batch]:
    """Learns from a rollout, or a part of it; the learner's state moves on.

    Args:
        config: the settings.
        parts: of them the tokenizer.
        learner: whose state is updated.
        rollout: the present one.
        step: updates done before.
        tolerate: as of `Learner.update`.

    Returns:
        The update's metrics and its batch.

    Raises:
        FloatingPointError: as of `Learner.update`; the state is as it was before.
    """
    rows = rows_of(config, step)
    experience, batch = mini_batch(config, rollout.experience, rollout.batch, rows)
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
        # Of a mini-batch, advantages relative to the whole rollout's deviation.
        whole = group_advantages(rollout.experience.rewards, config.scale_rewards)
        advantages = np.asarray(whole).reshape(-1)[rows]
        record = make_record(step + 1, experience, advantages, coefficients, parts.tokenizer)
        write_record(Path(config.run_dir), record)
    timed = {"seconds/update": done - ready}
    if step % updates_per_rollout(config):  # sampling took its time once
        timed["seconds/rollout"] = 0.0
    return {
        "step": step + 1,
        **rollout.metrics,
        **metrics,
        **measured,
        "n_traces": learner.n_traces,
        **learner.about,
        **timed,
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
