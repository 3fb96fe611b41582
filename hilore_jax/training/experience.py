"""What an update learns from: prompts, sampled completions, rewards, and the batch made of them."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from hilore_jax.models.decoder import Decoder
from hilore_jax.training.batch import Batch, check_batch, micro
from hilore_jax.training.rollout import generate
from hilore_jax.training.tasks import Item, RewardError, Task, messages, reward

_LOG = logging.getLogger("hilore_jax")


@runtime_checkable
class TextTokenizer(Protocol):
    """What training needs of a tokenizer."""

    @property
    def eos_id(self) -> int:
        """The token that ends a completion."""
        ...

    @property
    def pad_id(self) -> int:
        """The token that fills padding; may equal `eos_id`."""
        ...

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids."""
        ...

    def apply_chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The prompt text of a conversation, up to where the assistant speaks."""
        ...


@dataclasses.dataclass(frozen=True)
class Experience:
    """Scored completions of one update; rows are prompt by prompt, `group` rows each."""

    tokens: Int[np.ndarray, "rows seq"]
    attention_mask: Bool[np.ndarray, "rows seq"]
    completion_mask: Bool[np.ndarray, "rows completion"]
    rollout_logps: Float[np.ndarray, "rows completion"]
    rewards: Float[np.ndarray, "prompts group"]
    texts: tuple[str, ...]
    metrics: dict[str, float]


def encode_prompts(
    task: Task, items: Sequence[Item], tokenizer: TextTokenizer, length: int
) -> tuple[Int[np.ndarray, "prompts seq"], Bool[np.ndarray, "prompts seq"]]:
    """Prompts as left-padded token ids, and their mask.

    Raises:
        ValueError: a prompt is longer than `length`; names the item and the length it needs.
    """
    tokens = np.full((len(items), length), tokenizer.pad_id, np.int32)
    mask = np.zeros((len(items), length), bool)
    for row, item in enumerate(items):
        ids = tokenizer.encode(tokenizer.apply_chat(messages(task, item)))
        if not 0 < len(ids) <= length:
            raise ValueError(
                f"item {item.index} of task {task.name!r} has a prompt of {len(ids)} tokens, "
                f"expected 1 to {length}; set prompt_length to at least {len(ids)}"
            )
        tokens[row, -len(ids) :] = ids
        mask[row, -len(ids) :] = True
    return tokens, mask


def collect(
    model: Decoder,
    tokenizer: TextTokenizer,
    task: Task,
    indices: Sequence[int],
    key: Key[Array, "..."],
    *,
    group: int,
    prompt_length: int,
    completion_length: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    mask_truncated: bool = False,
    drop_failed: bool = False,
    reward_seconds: float = 0.0,
) -> Experience:
    """Samples `group` completions for each question and scores them.

    Args:
        model: the current policy.
        tokenizer: of that model.
        task: where questions come from and how answers are scored.
        indices: positions in the task's stream.
        key: randomness of the sampling.
        group: completions a prompt.
        prompt_length: tokens, padding included.
        completion_length: tokens.
        temperature: sampling temperature.
        top_p: nucleus mass.
        top_k: tokens kept, 0 for all.
        mask_truncated: optimize no token of completions that did not end.
        drop_failed: a group of which a reward fails is left out (its rewards are 0, none of its
            tokens is optimized) and counted, `reward_failed`; else the failure is raised.
        reward_seconds: the most that scoring a completion may take; 0 sets no limit.

    Returns:
        The scored completions and TRL-named metrics about them.

    Raises:
        RewardError: a reward that failed or, with `drop_failed`, one of every group.
    """
    items = [task.draw(index) for index in indices]
    tokens, mask = encode_prompts(task, items, tokenizer, prompt_length)
    tokens, mask = np.repeat(tokens, group, axis=0), np.repeat(mask, group, axis=0)
    rollout = generate(
        model,
        tokens,
        mask,
        key,
        max_new_tokens=completion_length,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        eos_id=tokenizer.eos_id,
        pad_id=tokenizer.pad_id,
    )
    new, kept, logps, finished = jax.device_get(
        (rollout.tokens, rollout.mask, rollout.logps, rollout.finished)
    )
    texts = tuple(tokenizer.decode(row[m].tolist()) for row, m in zip(new, kept, strict=True))
    rewards, good = _rewards(task, items, texts, group, drop_failed, reward_seconds)
    optimized = kept & np.repeat(good, group)[:, None]
    return Experience(
        tokens=np.concatenate([tokens, new], axis=1),
        attention_mask=np.concatenate([mask, kept], axis=1),
        completion_mask=optimized & finished[:, None] if mask_truncated else optimized,
        rollout_logps=logps,
        rewards=rewards,
        texts=texts,
        metrics={
            **experience_metrics(rewards[good], kept.sum(axis=1), finished),
            **({"reward_failed": int(np.sum(~good))} if drop_failed else {}),
        },
    )


def experience_metrics(
    rewards: Float[np.ndarray, "prompts group"],
    lengths: Int[np.ndarray, "rows"],
    finished: Bool[np.ndarray, "rows"],
) -> dict[str, float]:
    """What is said of completions, under TRL's names: rewards, lengths in tokens, and ends."""
    return {
        "reward": float(rewards.mean()),
        "reward_std": float(rewards.std(axis=1).mean()),
        "frac_reward_zero_std": float(np.mean(np.ptp(rewards, axis=1) == 0)),
        "completions/mean_length": float(lengths.mean()),
        "completions/min_length": int(lengths.min()),
        "completions/max_length": int(lengths.max()),
        "completions/clipped_ratio": float(np.mean(~finished)),
    }


def _rewards(
    task: Task,
    items: Sequence[Item],
    texts: Sequence[str],
    group: int,
    drop_failed: bool,
    seconds: float,
) -> tuple[Float[np.ndarray, "prompts group"], Bool[np.ndarray, "prompts"]]:
    """Rewards, and whether all of a group could be given; a group that failed has zeros."""
    rewards = np.zeros((len(items), group), np.float32)
    good = np.ones(len(items), bool)
    for row, text in enumerate(texts):
        prompt, place = divmod(row, group)
        if not good[prompt]:
            continue
        try:
            rewards[prompt, place] = reward(task, items[prompt], text, seconds=seconds)
        except RewardError as error:
            if not drop_failed:
                raise
            good[prompt], rewards[prompt] = False, 0.0
            _LOG.warning("left out the %d completions of a prompt: %s", group, error)
            if not good.any():
                raise RewardError(
                    f"a reward of each of the update's {len(items)} prompts failed; the last: "
                    f"{error}"
                ) from error
    return rewards, good


def to_batch(
    experience: Experience,
    advantages: Float[Array | np.ndarray, "micro rows *completion"],
    logp_old: Float[Array | np.ndarray, "micro rows completion"],
    logp_ref: Float[Array | np.ndarray, "micro rows completion"] | None,
    micro_rows: int,
    *,
    divisors: Float[Array | np.ndarray, "micro rows"] | None = None,
    mismatch: bool = False,
) -> Batch:
    """The batch of one update, in microbatches of `micro_rows` rows, checked by `check_batch`.

    With `mismatch` it holds the rollouts' log-probs too, for LoGRA's step control.
    """
    batch = Batch(
        tokens=jax.numpy.asarray(micro(experience.tokens, micro_rows)),
        attention_mask=jax.numpy.asarray(micro(experience.attention_mask, micro_rows)),
        completion_mask=jax.numpy.asarray(micro(experience.completion_mask, micro_rows)),
        logp_old=jax.numpy.asarray(logp_old),
        logp_ref=None if logp_ref is None else jax.numpy.asarray(logp_ref),
        advantages=jax.numpy.asarray(advantages),
        divisors=None if divisors is None else jax.numpy.asarray(divisors),
        logp_rollout=(
            jax.numpy.asarray(micro(experience.rollout_logps, micro_rows)) if mismatch else None
        ),
    )
    check_batch(batch)
    return batch


def logp_difference(
    experience: Experience, logp: Float[np.ndarray, "micro rows completion"]
) -> float:
    """Mean |rollout - learner| log-prob over optimized tokens: is the sampler the policy?"""
    gap = np.abs(
        experience.rollout_logps - np.asarray(logp).reshape(experience.rollout_logps.shape)
    )
    count = max(int(experience.completion_mask.sum()), 1)
    return float(np.sum(gap, where=experience.completion_mask) / count)
