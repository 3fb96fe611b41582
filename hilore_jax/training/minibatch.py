"""Several updates from one set of rollouts: mini-batches of whole groups, over some epochs."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax
import numpy as np
from jaxtyping import Int

from hilore_jax.planning.bounds import divisors
from hilore_jax.training.batch import Batch, micro
from hilore_jax.training.experience import Experience
from hilore_jax.training.loss_config import row_divisors

if TYPE_CHECKING:
    from hilore_jax.training.config import TrainConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class EpochSettings:
    """What a run's rollouts are used for, among the settings of `hilore train`."""

    mini_batches: int = 1
    """Updates an epoch: the rollouts of `prompts` are dealt into as many, group by group."""
    epochs: int = 1
    """Times that each rollout is learned from."""


def updates_per_rollout(config: EpochSettings) -> int:
    """Updates between two times of sampling."""
    return config.mini_batches * config.epochs


def epoch_faults(config: TrainConfig) -> list[str]:
    """What is wrong with the settings, one sentence each; their numbers are good."""
    found: list[str] = []
    if config.prompts % config.mini_batches:
        legal = divisors(config.prompts, config.mini_batches)
        found.append(
            f"mini_batches must divide prompts = {config.prompts}, found {config.mini_batches}; "
            f"legal values are {legal}"
        )
    elif (rows := config.rows // config.mini_batches) % config.micro_rows:
        legal = divisors(rows, config.micro_rows)
        found.append(
            f"micro_rows must divide the rows of a mini-batch, {config.rows} / "
            f"{config.mini_batches} = {rows}, found {config.micro_rows}; legal values are "
            f"{legal}"
        )
    per = updates_per_rollout(config)
    if config.updates % per:
        near = [n for n in (config.updates // per * per, -(-config.updates // per) * per) if n]
        found.append(
            f"updates must be a multiple of mini_batches x epochs = {per}, so that the run ends "
            f"with its rollouts used up, found {config.updates}; the nearest are {near}"
        )
    return found


def rows_of(config: TrainConfig, step: int) -> Int[np.ndarray, "rows"]:
    """The rollout's rows that an update learns from.

    Groups stay whole. With one mini-batch they are all rows in their order; else each epoch deals
    the prompts anew, from the run's seed, the rollout's number and the epoch's.

    Args:
        config: the settings.
        step: updates done before.
    """
    if config.mini_batches == 1:
        return np.arange(config.rows)
    rollout, within = divmod(step, updates_per_rollout(config))
    epoch, place = divmod(within, config.mini_batches)
    order = np.random.default_rng([config.seed, rollout, epoch]).permutation(config.prompts)
    prompts = np.split(order, config.mini_batches)[place]
    return (prompts[:, None] * config.group + np.arange(config.group)).reshape(-1)


def mini_batch(
    config: TrainConfig, experience: Experience, batch: Batch, rows: Int[np.ndarray, "rows"]
) -> tuple[Experience, Batch]:
    """Some rows of an experience and of the batch made of it, as a complete update.

    Args:
        config: the settings.
        experience: of all rows.
        batch: of all rows.
        rows: those to take, groups whole.

    Returns:
        The experience without metrics, and the batch with divisors of its own rows.
    """
    if len(rows) == config.rows:  # one mini-batch is the whole
        return experience, batch
    prompts = rows[:: config.group] // config.group
    part = dataclasses.replace(
        experience,
        tokens=experience.tokens[rows],
        attention_mask=experience.attention_mask[rows],
        completion_mask=experience.completion_mask[rows],
        rollout_logps=experience.rollout_logps[rows],
        rewards=experience.rewards[prompts],
        texts=tuple(experience.texts[row] for row in rows),
    )

    def take(array: jax.Array) -> jax.Array:
        return micro(array.reshape(-1, *array.shape[2:])[rows], config.micro_rows)

    taken = jax.tree.map(take, batch)
    return part, dataclasses.replace(taken, divisors=row_divisors(config, part.completion_mask))
