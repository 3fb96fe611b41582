"""How well the policy does on questions that it is not trained on."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

import jax
import numpy as np

from hilore_jax.models.decoder import Decoder
from hilore_jax.training.experience import TextTokenizer, encode_prompts
from hilore_jax.training.rollout import generate
from hilore_jax.training.tasks import Task, reward

FIRST = 2**30
"""Where held-out questions begin in a task's stream; training takes those from 0 on."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalSettings:
    """Evaluation among the settings of `hilore train`."""

    eval_every: int = 0
    """Updates between evaluations on held-out questions, after the update; 0 never evaluates."""
    eval_prompts: int = 64
    """Held-out questions, the same ones at every evaluation."""
    eval_sampling: Literal["greedy", "as-trained"] = "greedy"
    """Most likely tokens, or sampled as the rollouts are."""


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """What held-out questions gave.

    Attributes:
        rewards: of each question.
        lengths: tokens of each completion.
        finished: whether each ended itself.
    """

    rewards: tuple[float, ...]
    lengths: tuple[int, ...]
    finished: tuple[bool, ...]

    def metrics(self) -> dict[str, float]:
        """Means, and the standard error of the reward's."""
        rewards = np.asarray(self.rewards)
        error = rewards.std(ddof=1) / np.sqrt(rewards.size) if rewards.size > 1 else float("nan")
        return {
            "eval/reward": float(rewards.mean()),
            "eval/reward_se": float(error),
            "eval/completions/mean_length": float(np.mean(self.lengths)),
            "eval/completions/clipped_ratio": 1.0 - float(np.mean(self.finished)),
        }


def evaluate(
    model: Decoder,
    tokenizer: TextTokenizer,
    task: Task,
    indices: Sequence[int],
    *,
    rows: int,
    prompt_length: int,
    completion_length: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    reward_seconds: float = 0.0,
    key: jax.Array | None = None,
) -> Evaluation:
    """One completion of each question, scored.

    Args:
        model: the policy.
        tokenizer: of that model.
        task: where questions come from and how answers are scored.
        indices: positions in the task's stream.
        rows: completions sampled at a time; the last call is filled up with its last question.
        prompt_length: tokens, padding included.
        completion_length: tokens.
        temperature: 0 is greedy.
        top_p: nucleus mass.
        top_k: tokens kept, 0 for all.
        reward_seconds: as in `tasks.reward`.
        key: randomness of the sampling; None: `jax.random.key(0)`.

    Returns:
        Rewards and lengths, in the order of the indices.

    Raises:
        ValueError: no question, or one whose prompt is too long.
        RewardError: a reward that failed.
    """
    if not len(indices) or rows < 1:
        raise ValueError(f"{len(indices)} questions, {rows} at a time: expected at least one")
    key = jax.random.key(0) if key is None else key
    rewards: list[float] = []
    lengths: list[int] = []
    finished: list[bool] = []
    for start in range(0, len(indices), rows):
        part = list(indices[start : start + rows])
        items = [task.draw(index) for index in part + part[-1:] * (rows - len(part))]
        tokens, mask = encode_prompts(task, items, tokenizer, prompt_length)
        rollout = generate(
            model,
            tokens,
            mask,
            jax.random.fold_in(key, start),
            max_new_tokens=completion_length,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            eos_id=tokenizer.eos_id,
            pad_id=tokenizer.pad_id,
        )
        new, kept, ended = jax.device_get((rollout.tokens, rollout.mask, rollout.finished))
        for row in range(len(part)):
            text = tokenizer.decode(new[row][kept[row]].tolist())
            rewards.append(reward(task, items[row], text, seconds=reward_seconds))
            lengths.append(int(kept[row].sum()))
            finished.append(bool(ended[row]))
    return Evaluation(tuple(rewards), tuple(lengths), tuple(finished))
