"""Rollouts of another engine: completions by token, checked before they are learned from."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hilore_jax.planning import expect
from hilore_jax.training.experience import Experience, TextTokenizer, experience_metrics

_LOG = logging.getLogger("hilore_jax")
_POLL = 0.2  # seconds between looks for a file
_FIELDS = ("prompt", "completion", "logps", "reward", "finished")


@dataclasses.dataclass(frozen=True)
class Sampled:
    """One completion that an engine sampled.

    Attributes:
        prompt: token ids, no padding.
        completion: token ids; the end of sequence is one of them where it was sampled.
        logps: of each token of the completion under the policy that sampled, nats.
        reward: any finite number.
        finished: whether the completion ended itself.
    """

    prompt: Sequence[int]
    completion: Sequence[int]
    logps: Sequence[float]
    reward: float
    finished: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExternalSettings:
    """Rollouts of another engine, among the settings of `hilore train`."""

    rollouts: str = ""
    """Folder into which another engine writes its completions, `rollout-000000.jsonl` and so on;
    the run samples none itself."""
    rollout_timeout: float = 3600.0
    """The longest to wait for a rollout of that engine, seconds."""


Rollouts = Callable[[int], Sequence[Sampled]]
"""The completions of a rollout by its number, from 0: `prompts` groups, one after the other."""


def check_sampled(
    rows: Sequence[Sampled],
    *,
    prompts: int,
    group: int,
    prompt_length: int,
    completion_length: int,
    vocab_size: int,
    where: str = "rollout",
) -> None:
    """Refuses completions that an update could not be made of.

    Args:
        rows: the completions, a prompt's `group` ones after each other.
        prompts: prompts of a rollout.
        group: completions a prompt.
        prompt_length: tokens that a prompt may have.
        completion_length: tokens that a completion may have.
        vocab_size: of the model.
        where: what to call the rollout in the error.

    Raises:
        ValueError: names the row and its field, what was found and what was expected.
    """
    if len(rows) != prompts * group:
        raise ValueError(
            f"{where} has {len(rows)} rows, expected prompts x group = {prompts} x {group} = "
            f"{prompts * group}"
        )
    for number, row in enumerate(rows):
        here = f"{where}, row {number}"
        for field, longest in (("prompt", prompt_length), ("completion", completion_length)):
            ids = getattr(row, field)
            if not 0 < len(ids) <= longest:
                raise ValueError(
                    f"{here}: {field} has {len(ids)} tokens, expected 1 to {longest} "
                    f"({field}_length)"
                )
            for place, token in enumerate(ids):
                if not expect.is_whole(token) or not 0 <= token < vocab_size:
                    raise ValueError(
                        f"{here}: {field}[{place}] is {expect.shown(token)}, expected a token id "
                        f"from 0 to {vocab_size - 1}"
                    )
        if len(row.logps) != len(row.completion):
            raise ValueError(
                f"{here}: logps has {len(row.logps)} numbers for {len(row.completion)} tokens of "
                "the completion, expected one each"
            )
        for place, logp in enumerate(row.logps):
            # A sampler's rounding may put a certain token a little above 0.
            if not expect.is_number(logp) or not -math.inf < logp <= 1e-3:
                raise ValueError(
                    f"{here}: logps[{place}] is {expect.shown(logp)}, expected a finite log-prob "
                    "<= 0, nats"
                )
        if not expect.is_number(row.reward) or not math.isfinite(row.reward):
            raise ValueError(
                f"{here}: reward is {expect.shown(row.reward)}, expected a finite number"
            )
        first = rows[number // group * group]
        if list(row.prompt) != list(first.prompt):
            raise ValueError(
                f"{here}: prompt differs from that of row {number // group * group}; the {group} "
                "completions of a prompt stand one after the other"
            )


def to_experience(
    rows: Sequence[Sampled],
    tokenizer: TextTokenizer,
    *,
    group: int,
    prompt_length: int,
    completion_length: int,
    mask_truncated: bool = False,
) -> Experience:
    """Checked completions as what an update learns from.

    Args:
        rows: as for `check_sampled`, which they have passed.
        tokenizer: for padding and for the texts of records.
        group: completions a prompt.
        prompt_length: tokens, padding included.
        completion_length: tokens, padding included.
        mask_truncated: optimize no token of completions that did not end.
    """
    count = len(rows)
    tokens = np.full((count, prompt_length + completion_length), tokenizer.pad_id, np.int32)
    attention = np.zeros(tokens.shape, bool)
    kept = np.zeros((count, completion_length), bool)
    logps = np.zeros(kept.shape, np.float32)
    for i, row in enumerate(rows):
        start, width = prompt_length - len(row.prompt), len(row.completion)
        tokens[i, start : prompt_length + width] = [*row.prompt, *row.completion]
        attention[i, start : prompt_length + width] = True
        kept[i, :width] = True
        logps[i, :width] = row.logps
    finished = np.array([row.finished for row in rows])
    rewards = np.array([row.reward for row in rows], np.float32).reshape(-1, group)
    return Experience(
        tokens=tokens,
        attention_mask=attention,
        completion_mask=kept & finished[:, None] if mask_truncated else kept,
        rollout_logps=logps,
        rewards=rewards,
        texts=tuple(tokenizer.decode(list(row.completion)) for row in rows),
        metrics=experience_metrics(rewards, kept.sum(axis=1), finished),
    )


def write_rollout(path: str | Path, rows: Sequence[Sampled]) -> None:
    """Writes completions as a rollout file, one JSON object a line; whole or not at all.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "rollout-000000.jsonl"
        >>> write_rollout(path, [Sampled([3, 4], [5, 1], [-0.5, -0.25], 1.0)])
        >>> read_rollout(path)
        [Sampled(prompt=[3, 4], completion=[5, 1], logps=[-0.5, -0.25], reward=1.0, finished=True)]
    """
    path = Path(path)
    fresh = path.with_name(path.name + ".tmp")
    lines = (json.dumps({name: _plain(getattr(row, name)) for name in _FIELDS}) for row in rows)
    fresh.write_text("".join(line + "\n" for line in lines))
    fresh.replace(path)


def read_rollout(path: str | Path) -> list[Sampled]:
    """The completions of a rollout file.

    Raises:
        ValueError: a line that is no JSON object of the fields; names file, line and field.
    """
    rows = []
    for number, line in enumerate(Path(path).read_text().splitlines(), 1):
        here = f"{path}, line {number}"
        try:
            found = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{here} is not JSON: {error}") from error
        if not isinstance(found, dict):
            raise ValueError(f"{here} is {expect.shown(found)}, expected an object")
        found: dict[str, Any] = {"finished": True} | found
        if missing := [name for name in _FIELDS if name not in found]:
            raise ValueError(f"{here} has no {', '.join(missing)}; it has {sorted(found)}")
        for name in ("prompt", "completion", "logps"):
            if not isinstance(found[name], list):
                raise ValueError(f"{here}: {name} is {expect.shown(found[name])}, expected a list")
        if not isinstance(found["finished"], bool):
            raise ValueError(
                f"{here}: finished is {expect.shown(found['finished'])}, expected true or false"
            )
        rows.append(Sampled(**{name: found[name] for name in _FIELDS}))
    return rows


def rollout_folder(folder: str | Path, timeout: float = 3600.0) -> Rollouts:
    """Rollouts from a folder that an engine writes `rollout-000000.jsonl` and so on into.

    Args:
        folder: may be made later.
        timeout: the longest to wait for a rollout, seconds.

    Returns:
        The rollouts by number; each call waits for its file.
    """

    def read(number: int) -> list[Sampled]:
        path = Path(folder) / f"rollout-{number:06d}.jsonl"
        began = time.monotonic()
        if not path.exists():
            _LOG.info("waiting for %s", path)
        while not path.exists():
            if time.monotonic() - began > timeout:
                raise ValueError(
                    f"{path} did not come within {timeout:g} s: has the engine stopped? Start it "
                    "again, then go on with --resume; --rollout-timeout allows more"
                )
            time.sleep(_POLL)
        return read_rollout(path)

    return read


def _plain(value: Any) -> Any:
    return np.asarray(value).tolist()
