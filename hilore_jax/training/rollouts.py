"""Real updates to measure on: sampled, scored, and without groups that teach nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from hilore_jax.grpo import group_advantages
from hilore_jax.models.decoder import Decoder
from hilore_jax.planning.bar import LINES, Bar
from hilore_jax.training.batch import Batch, micro
from hilore_jax.training.config import TrainConfig
from hilore_jax.training.experience import Experience, collect, to_batch
from hilore_jax.training.parts import Parts
from hilore_jax.training.step import init_state, make_score

_TRIES = 12  # as many prompts as are wanted, at most


@dataclasses.dataclass(frozen=True)
class Measured:
    """A model's static part, its arrays, and updates to differentiate.

    Attributes:
        graphdef: the static part.
        params: arrays that train.
        frozen: the others.
        updates: complete ones.
        prompts: how many were drawn for them from the task's stream, all tries together.
    """

    graphdef: nnx.GraphDef
    params: Any
    frozen: Any
    updates: tuple[Batch, ...]
    prompts: int = 0


def real_updates(
    config: TrainConfig,
    parts: Parts,
    updates: int,
    *,
    first: int = 0,
    progress: bool | None = False,
) -> Measured:
    """Samples complete updates from a model, as training would at its start.

    Groups whose rewards are all equal have no gradient (beta 0) and are replaced by the next
    prompts': every microbatch has something to measure.

    Args:
        config: prompts, group, lengths, temperature and microbatch rows of an update.
        parts: model, tokenizer and task.
        updates: how many.
        first: position in the task's stream to begin at, for updates that others did not see.
        progress: as of `planning.bar.Bar`, over prompts whose rewards differ.

    Raises:
        ValueError: too few prompts have rewards that differ; says how many did.
    """
    wanted = updates * config.prompts
    found: list[Experience] = []
    tried = 0
    with Bar(progress, wanted, "prompt with a gradient", every=LINES) as bar:
        while len(found) < wanted and tried < _TRIES * wanted:
            indices = range(first + tried, first + tried + config.prompts)
            new = _teaching(_sample(config, parts, indices), config.group)
            bar.end(count=min(len(new), wanted - len(found)))
            found += new
            tried += config.prompts
    if len(found) < wanted:
        raise ValueError(
            f"of {tried} prompts of task {config.task!r} only {len(found)} have rewards that "
            f"differ within their {config.group} completions, expected {wanted}: the others have "
            "no gradient. Choose an easier task, --format-reward, or a higher temperature."
        )
    graphdef, state = init_state(parts.model, optax.identity(), jax.random.key(config.seed))
    score = make_score(graphdef, temperature=config.temperature)
    batches = []
    for start in range(0, wanted, config.prompts):
        whole = _joined(found[start : start + config.prompts])
        tokens, mask = (micro(x, config.micro_rows) for x in (whole.tokens, whole.attention_mask))
        width = config.completion_length
        logp = score(state.params, state.frozen, tokens, mask, completion=width)
        advantages = group_advantages(jnp.asarray(whole.rewards)).reshape(-1, config.micro_rows)
        reference = logp if config.beta else None
        batches.append(to_batch(whole, advantages, logp, reference, config.micro_rows))
    return Measured(graphdef, state.params, state.frozen, tuple(batches), tried)


def _sample(config: TrainConfig, parts: Parts, indices: Sequence[int]) -> Experience:
    model: Decoder = parts.model
    return collect(
        model,
        parts.tokenizer,
        parts.task,
        indices,
        jax.random.fold_in(jax.random.key(config.seed), indices[0]),
        group=config.group,
        prompt_length=config.prompt_length,
        completion_length=config.completion_length,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
    )


def _teaching(experience: Experience, group: int) -> list[Experience]:
    """The groups with rewards that differ, one experience each."""
    kept = []
    for i, rewards in enumerate(experience.rewards):
        if rewards.max() > rewards.min():
            rows = slice(i * group, (i + 1) * group)
            kept.append(
                Experience(
                    experience.tokens[rows],
                    experience.attention_mask[rows],
                    experience.completion_mask[rows],
                    experience.rollout_logps[rows],
                    experience.rewards[i : i + 1],
                    experience.texts[rows],
                    {},
                )
            )
    return kept


def _joined(groups: Sequence[Experience]) -> Experience:
    arrays = ("tokens", "attention_mask", "completion_mask", "rollout_logps", "rewards")
    joined = {name: np.concatenate([getattr(g, name) for g in groups]) for name in arrays}
    return Experience(**joined, texts=tuple(t for g in groups for t in g.texts), metrics={})
