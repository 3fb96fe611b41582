"""Evaluation on held-out questions: each once, in order, whatever fits into a call."""

from typing import Any

import jax
import numpy as np
import pytest

from hilore_jax.training.evaluate import FIRST, evaluate
from hilore_jax.training.tasks import Task
from hilore_jax.training.toy import CharTokenizer, count_task

SIZES: dict[str, Any] = {"prompt_length": 6, "completion_length": 3}


def recording(seen):
    """A task whose reward is its index modulo 3, and that notes what was scored."""
    counting = count_task(limit=3)

    def score(answer, item):
        seen.append((item.index, answer))
        return item.index % 3

    def draw(index):
        item = counting.draw(index % 7)
        return type(item)(index, item.question, "word")

    return Task("modulo", draw, score, instruction="")


def test_every_question_counts_once_whatever_the_rows(tiny):
    found = {}
    for rows in (2, 5):
        seen: list = []
        indices = range(FIRST, FIRST + 5)
        found[rows] = evaluate(
            tiny(), CharTokenizer(), recording(seen), indices, rows=rows, **SIZES
        )
        assert sorted({index for index, _ in seen}) == sorted(indices)
        assert len(seen) <= 5  # completions without an answer are not scored
    assert found[2] == found[5]  # greedy: a row depends on its own prompt alone
    answered = {index for index, _ in seen}
    want = [float(i % 3) if i in answered else 0.0 for i in indices]
    assert list(found[5].rewards) == want
    metrics = found[5].metrics()
    assert metrics["eval/reward"] == pytest.approx(np.mean(want))
    assert metrics["eval/reward_se"] == pytest.approx(np.std(want, ddof=1) / 5**0.5)
    assert metrics["eval/completions/mean_length"] <= 3


def test_sampling_depends_on_the_key(tiny):
    task, indices = recording([]), range(8)
    draws = [
        evaluate(tiny(), CharTokenizer(), task, indices, rows=8, temperature=1.0, key=key, **SIZES)
        for key in (jax.random.key(1), jax.random.key(1), jax.random.key(2))
    ]
    assert draws[0] == draws[1]
    seen: list = []
    texts = []
    for key in (jax.random.key(1), jax.random.key(2)):
        seen.clear()
        evaluate(
            tiny(),
            CharTokenizer(),
            recording(seen),
            indices,
            rows=8,
            temperature=1.0,
            key=key,
            **SIZES,
        )
        texts.append(list(seen))
    assert texts[0] != texts[1]


def test_no_question_is_refused(tiny):
    with pytest.raises(ValueError, match="0 questions, 2 at a time"):
        evaluate(tiny(), CharTokenizer(), count_task(limit=3), [], rows=2, **SIZES)
