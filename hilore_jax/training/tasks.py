"""Verifiable tasks: a question by index, a prompt for it, a reward for what was answered."""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hilore_jax._extras import require
from hilore_jax.training.time_limit import TimeLimitError, limited

NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?")
TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
INSTRUCTION = "Answer briefly."
DEFAULT_ARGS: Mapping[str, Any] = {
    "min_terms": 2,
    "max_terms": 2,
    "min_digits": 1,
    "max_digits": 1,
}
# Datasets are virtual and drawn by index, so that the size is only an upper bound.
VIRTUAL_SIZE = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Item:
    """One question of a task and what is needed to score an answer to it."""

    index: int  # position in the task's stream
    question: str
    answer: str  # a correct answer, for display and numeric comparison
    entry: Mapping[str, Any] = dataclasses.field(default_factory=dict, compare=False)


@dataclasses.dataclass(frozen=True)
class Task:
    """A stream of questions with a verifier; the same (seed, index) is always the same question."""

    name: str
    draw: Callable[[int], Item]  # index -> Item
    score: Callable[[str, Item], float]  # (extracted answer, item) -> 1.0 for a right answer
    instruction: str = INSTRUCTION  # appended to the question
    format_reward: float = 0.0  # added when the completion holds an answer in <answer> tags


def extract_answer(completion: str, *, numeric: bool = True) -> str | None:
    """The answer in a completion: the last `<answer>` tag, else the last number (or last line).

    Args:
        completion: the decoded completion.
        numeric: whether the expected answer is a number.

    Returns:
        The answer's text, without thousands separators for a number; None where there is none.

    Example:
        >>> extract_answer("7 + 5 = 12."), extract_answer("<answer> Zoe </answer>", numeric=False)
        ('12', 'Zoe')
    """
    tagged = TAGGED.findall(completion)
    text = tagged[-1].strip() if tagged else completion
    if numeric:
        numbers = NUMBER.findall(text)
        return numbers[-1].replace(",", "") if numbers else None
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else None


class RewardError(ValueError):
    """A completion that could not be scored."""


def reward(task: Task, item: Item, completion: str, *, seconds: float = 0.0) -> float:
    """The reward of one completion: 1 for a right answer, else 0, plus the task's format reward.

    Args:
        task: the task that drew `item`.
        item: the question.
        completion: the decoded completion.
        seconds: the most that scoring it may take, see `limited`; 0 sets no limit.

    Returns:
        A finite reward.

    Raises:
        RewardError: the task's scorer raised, took too long, or returned something that is not a
            finite number.
    """
    answer = extract_answer(completion, numeric=_is_number(item.answer))
    try:
        value = 0.0 if answer is None else float(limited(task.score, seconds, answer, item))
    except TimeLimitError as error:
        raise RewardError(
            f"the reward of task {task.name!r} {error} on item {item.index} (answer "
            f"{answer!r:.200}); make the scorer faster, or allow it more"
        ) from error
    except Exception as error:
        raise RewardError(
            f"the reward of task {task.name!r} raised {type(error).__name__} on item {item.index} "
            f"(answer {answer!r:.200}): {error}; make the scorer return a number for every string"
        ) from error
    if not math.isfinite(value):
        raise RewardError(
            f"the reward of task {task.name!r} is {value} on item {item.index} (answer "
            f"{answer!r:.200}); a reward must be a finite number"
        )
    return value + task.format_reward * bool(TAGGED.search(completion))


def messages(task: Task, item: Item) -> list[dict[str, str]]:
    """The chat messages that put `item` to a model."""
    text = f"{item.question}\n{task.instruction}" if task.instruction else item.question
    return [{"role": "user", "content": text}]


def reasoning_gym_task(
    name: str = "chain_sum",
    args: Mapping[str, Any] | None = None,
    *,
    seed: int = 0,
    instruction: str | None = None,
    format_reward: float = 0.0,
) -> Task:
    """A `reasoning-gym` dataset as a task with reward 0 or 1.

    Args:
        name: a registered dataset's name.
        args: the dataset's own arguments; one-digit sums of two terms when None.
        seed: the stream's seed.
        instruction: appended to each question; chosen by the answer's kind when None.
        format_reward: added when the completion holds an `<answer>` tag.

    Returns:
        The task.

    Raises:
        ImportError: the `[tasks]` extra is missing.
        ValueError: no such dataset (the nearest names are listed), or arguments it refuses.
    """
    gym = require("reasoning_gym", "tasks", f"the task {name!r}")
    factory = require("reasoning_gym.factory", "tasks", f"the task {name!r}")
    if name not in factory.DATASETS:
        raise ValueError(
            f"no task is called {name!r}: neither 'copy' nor 'count', nor a reasoning-gym dataset; "
            f"near it are {nearest(name, [*factory.DATASETS, 'copy', 'count'])}. The "
            f"{len(factory.DATASETS)} datasets are listed by "
            "sorted(reasoning_gym.factory.DATASETS) and in that package's gallery."
        )
    settings = factory.DATASETS[name][1]
    known = [field.name for field in dataclasses.fields(settings)]
    check_args(name, args or {}, [field for field in known if field not in ("seed", "size")])
    chosen = dict(DEFAULT_ARGS if args is None and name == "chain_sum" else args or {})
    try:
        data = gym.create_dataset(name, size=VIRTUAL_SIZE, seed=seed, **chosen)
        numeric = _is_number(str(data[0]["answer"]))
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(
            f"reasoning-gym dataset {name!r} refused the arguments {chosen}: {error}"
        ) from error

    def draw(index: int) -> Item:
        entry = data[index]
        return Item(index, str(entry["question"]), str(entry["answer"]), entry)

    def score(answer: str, item: Item) -> float:
        if _is_number(answer) and _is_number(item.answer):
            return float(float(answer) == float(item.answer))
        # Some sets pay partial credit for an answer that merely contains the right one.
        return float(data.score_answer(answer, item.entry) >= 0.999)

    if instruction is None:
        instruction = INSTRUCTION if numeric else "Answer as <answer>your answer</answer>."
    return Task(name, draw, score, instruction, format_reward)


def nearest(name: str, known: Sequence[str], n: int = 6) -> list[str]:
    """The known names most like `name`; those that hold it, or a word of it, come first.

    Example:
        >>> nearest("sum", ["chain_sum", "sudoku", "maze"])
        ['chain_sum', 'sudoku']
    """
    wanted = name.lower().replace("-", "_")
    words = [word for word in wanted.split("_") if len(word) > 2]
    scores = {}
    for other in known:
        like = difflib.SequenceMatcher(None, wanted, other).ratio()
        scores[other] = like + (wanted in other) + sum(word in other for word in words) / 2
    best = sorted(known, key=lambda other: -scores[other])
    return [other for other in best if scores[other] > 0.4][:n] or best[:n]


def check_args(task: str, args: Mapping[str, Any], known: Sequence[str]) -> None:
    """Refuses arguments that a task does not have.

    Raises:
        ValueError: names them, and those that the task has.
    """
    unknown = sorted(set(args) - set(known))
    if unknown:
        raise ValueError(f"task {task!r} has no arguments {unknown}; it has {sorted(known)}")


def parse_args(text: str) -> dict[str, Any]:
    """Reads `key=value` pairs separated by commas; values are JSON where they parse as such.

    Example:
        >>> parse_args("min_terms=2,operators=[1,2],kind=easy")
        {'min_terms': 2, 'operators': [1, 2], 'kind': 'easy'}
    """
    pairs: dict[str, Any] = {}
    for part in re.split(r",(?=\s*\w+=)", text.strip()):
        if not part.strip():
            continue
        key, found, value = part.partition("=")
        if not found or not key.strip():
            raise ValueError(f"{part!r} is not key=value; write e.g. min_terms=2,max_terms=3")
        try:
            pairs[key.strip()] = json.loads(value)
        except json.JSONDecodeError:
            pairs[key.strip()] = value.strip()
    return pairs


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False
