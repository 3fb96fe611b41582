"""Rollouts of another engine: what a run learns from them, and every fault by row and field."""

import dataclasses
import json
import math
from typing import Any

import numpy as np
import pytest

from hilore_jax.training.config import TrainConfig
from hilore_jax.training.external import (
    Sampled,
    check_sampled,
    read_rollout,
    rollout_folder,
    to_experience,
    write_rollout,
)
from hilore_jax.training.toy import CharTokenizer
from hilore_jax.training.trainer import train

SIZES: dict[str, Any] = {"group": 2, "prompt_length": 4, "completion_length": 3}
SETTINGS = TrainConfig(
    prompts=2,
    micro_rows=2,
    task="count",
    updates=2,
    lora_rank=0,
    learning_rate=1e-2,
    save_every=0,
    quiet=True,
    **SIZES,
)


def rows(shift: int = 0) -> list[Sampled]:
    return [
        Sampled([5, 6, 7], [8 + shift, 1], [-1.0, -2.0], 1.0),
        Sampled([5, 6, 7], [9, 9, 9 + shift], [-3.0, -0.5, 0.0], 0.0, finished=False),
        Sampled([4], [1], [-0.25], 0.5),
        Sampled([4], [3, 1], [-4.0, -1.0], -1.5),
    ]


def test_completions_become_padded_arrays():
    found = to_experience(rows(), CharTokenizer(), mask_truncated=True, **SIZES)
    assert found.tokens.tolist() == [
        [0, 5, 6, 7, 8, 1, 0],
        [0, 5, 6, 7, 9, 9, 9],
        [0, 0, 0, 4, 1, 0, 0],
        [0, 0, 0, 4, 3, 1, 0],
    ]
    assert found.attention_mask.astype(int).tolist()[2] == [0, 0, 0, 1, 1, 0, 0]
    assert found.completion_mask.astype(int).tolist() == [[1, 1, 0], [0] * 3, [1, 0, 0], [1, 1, 0]]
    assert found.rollout_logps.tolist()[1] == [-3, -0.5, 0]
    assert found.rewards.tolist() == [[1, 0], [0.5, -1.5]]
    assert found.metrics["completions/clipped_ratio"] == 0.25
    assert found.metrics["reward"] == 0 and found.metrics["completions/mean_length"] == 2


FAULTS = [
    (1, {"prompt": [5, 6]}, "row 1: prompt differs from that of row 0; the 2 completions"),
    (0, {"prompt": []}, r"row 0: prompt has 0 tokens, expected 1 to 4 \(prompt_length\)"),
    (2, {"completion": [1] * 4}, r"row 2: completion has 4 tokens, expected 1 to 3 \(completion_"),
    (2, {"completion": [64]}, r"row 2: completion\[0\] is 64, expected a token id from 0 to 63"),
    (3, {"completion": [3, -1]}, r"row 3: completion\[1\] is -1, expected a token id"),
    (3, {"completion": [3.5, 1]}, r"row 3: completion\[0\] is 3\.5, expected a token id"),
    (0, {"prompt": [True, 6, 7]}, r"row 0: prompt\[0\] is True, expected a token id"),
    (0, {"logps": [-1.0]}, "row 0: logps has 1 numbers for 2 tokens of the completion"),
    (3, {"logps": [-1.0, math.nan]}, r"row 3: logps\[1\] is nan, expected a finite log-prob"),
    (3, {"logps": [-math.inf, -1.0]}, r"row 3: logps\[0\] is -inf, expected a finite"),
    (3, {"logps": [0.5, -1.0]}, r"row 3: logps\[0\] is 0\.5, expected a finite log-prob <= 0"),
    (3, {"logps": [None, -1.0]}, r"row 3: logps\[0\] is None"),
    (1, {"reward": math.nan}, "row 1: reward is nan, expected a finite number"),
    (1, {"reward": "1"}, "row 1: reward is '1', expected a finite number"),
]


@pytest.mark.parametrize(("row", "changes", "message"), FAULTS)
def test_faults_name_row_and_field(row, changes, message):
    made = rows()
    check_sampled(made, prompts=2, vocab_size=64, **SIZES)
    for name, value in changes.items():  # not `replace`: the tests' type checks would refuse it
        object.__setattr__(made[row], name, value)
    with pytest.raises(ValueError, match=f"rollout 7, {message}"):
        check_sampled(made, prompts=2, vocab_size=64, where="rollout 7", **SIZES)


def test_another_number_of_rows_is_refused():
    with pytest.raises(ValueError, match="has 3 rows, expected prompts x group = 2 x 2 = 4"):
        check_sampled(rows()[:3], prompts=2, vocab_size=64, **SIZES)


def test_files_are_read_as_written_and_damage_is_named(tmp_path):
    path = tmp_path / "rollout-000000.jsonl"
    write_rollout(path, rows())
    assert read_rollout(path) == rows()
    lines = path.read_text().splitlines()
    for line, message in (
        ("{", "line 2 is not JSON"),
        ("[1]", r"line 2 is \[1\], expected an object"),
        ('{"prompt": [1]}', "line 2 has no completion, logps, reward; it has"),
        (json.dumps(json.loads(lines[1]) | {"logps": 3}), "line 2: logps is 3, expected a list"),
        (
            json.dumps(json.loads(lines[1]) | {"finished": 1}),
            "line 2: finished is 1, expected true",
        ),
    ):
        path.write_text("\n".join([lines[0], line, *lines[2:]]))
        with pytest.raises(ValueError, match=message):
            read_rollout(path)
    path.write_text(lines[0].replace(', "finished": true', ""))
    assert read_rollout(path) == rows()[:1]  # `finished` may be left out


def test_a_rollout_that_does_not_come_is_not_waited_for_without_end(tmp_path):
    with pytest.raises(ValueError, match=r"rollout-000003\.jsonl did not come within 0\.01 s"):
        rollout_folder(tmp_path, timeout=0.01)(3)


def test_a_run_learns_from_a_folder_as_from_a_function_and_resumes(parts, tmp_path):
    folder = tmp_path / "engine"
    folder.mkdir()
    for number in range(2):
        write_rollout(folder / f"rollout-{number:06d}.jsonl", rows(number))
    given = dataclasses.replace(SETTINGS, rollouts=str(folder), run_dir=str(tmp_path / "a"))
    batches: list = []
    whole = train(given, parts(), on_update=lambda metrics, batch: batches.append(batch))
    assert [int(batch.tokens[0, 0, 4]) for batch in batches] == [8, 9]
    assert whole.metrics[0]["reward"] == 0 and whole.metrics[0]["grad_norm"] > 0
    half = dataclasses.replace(given, updates=1, run_dir=str(tmp_path / "b"), rollouts="")
    train(half, parts(), rollouts=rows)
    resumed = train(dataclasses.replace(half, updates=2, resume=True), parts(), rollouts=rows)
    assert resumed.metrics[0]["loss"] == whole.metrics[1]["loss"]
    assert resumed.metrics[0]["grad_norm"] == whole.metrics[1]["grad_norm"]
    bad = [*rows()[:3], dataclasses.replace(rows()[3], logps=[-1.0])]
    with pytest.raises(ValueError, match="rollout 0, row 3: logps has 1 numbers"):
        train(
            dataclasses.replace(half, run_dir=str(tmp_path / "c")), parts(), rollouts=lambda n: bad
        )
    np.testing.assert_allclose(batches[0].advantages.sum(axis=1), 0, atol=1e-6)
