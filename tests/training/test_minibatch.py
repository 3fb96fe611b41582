"""Mini-batches and epochs: whole groups, each row once an epoch, and runs that can be resumed."""

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest

from hilore_jax.training import checkpoint
from hilore_jax.training.config import TrainConfig, faults
from hilore_jax.training.minibatch import rows_of
from hilore_jax.training.tasks import Task
from hilore_jax.training.toy import count_task
from hilore_jax.training.trainer import train

SETTINGS = TrainConfig(
    prompts=4,
    group=2,
    micro_rows=2,
    prompt_length=6,
    completion_length=3,
    task="count",
    updates=8,
    mini_batches=2,
    epochs=2,
    lora_rank=0,
    learning_rate=1e-2,
    loss="grpo",
    save_every=3,
    keep_checkpoints=5,
    quiet=True,
)


@pytest.fixture
def config(tmp_path):
    return dataclasses.replace(SETTINGS, run_dir=str(tmp_path / "run"))


def test_each_epoch_deals_whole_groups_anew():
    dealt = [rows_of(SETTINGS, step) for step in range(8)]
    for first, second in (dealt[:2], dealt[2:4], dealt[4:6], dealt[6:]):
        assert sorted([*first, *second]) == list(range(8))
        for rows in (first, second):
            assert (rows.reshape(-1, 2) // 2 == rows.reshape(-1, 2)[:, :1] // 2).all()
    assert len({tuple(rows.tolist()) for rows in dealt}) > 2
    again = [rows_of(SETTINGS, step) for step in range(8)]
    assert all((one == other).all() for one, other in zip(dealt, again, strict=True))
    whole = dataclasses.replace(SETTINGS, mini_batches=1)
    assert rows_of(whole, 5).tolist() == list(range(8))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mini_batches": 3, "updates": 6}, r"must divide prompts = 4, found 3; legal .*\[1, 2, 4"),
        ({"mini_batches": 4, "micro_rows": 4}, r"8 / 4 = 2, found 4; legal values are \[1, 2\]"),
        ({"updates": 6}, r"multiple of mini_batches x epochs = 4, .* found 6; .* \[4, 8\]"),
        ({"epochs": 0}, "epochs must be >= 1, found 0"),
        ({"mini_batches": -1}, "mini_batches must be >= 1"),
    ],
)
def test_faults(config, changes, message):
    (found,) = faults(dataclasses.replace(config, **changes))
    assert pytest.importorskip("re").search(message, found)


def odd_task() -> Task:
    """Pays for about every second completion, so that advantages differ."""
    counting = count_task(limit=3)
    return Task(
        "odd",
        lambda index: dataclasses.replace(counting.draw(index), answer="x"),
        lambda answer, item: float(sum(map(ord, answer)) % 2),
        instruction="",
    )


def test_a_run_learns_from_each_rollout_in_parts_and_resumes(config, parts):
    seen: list = []

    def built():
        return dataclasses.replace(parts(), task=odd_task())

    whole = train(config, built(), on_update=lambda metrics, batch: seen.append((metrics, batch)))
    assert [m["step"] for m in whole.metrics] == list(range(1, 9))
    tokens = [np.asarray(batch.tokens).reshape(4, -1) for _, batch in seen]
    for rollout in (tokens[:4], tokens[4:]):
        rows = [sorted(map(tuple, np.concatenate(pair))) for pair in (rollout[:2], rollout[2:])]
        assert rows[0] == rows[1]  # both epochs
    assert sorted(map(tuple, np.concatenate(tokens[:2]))) != sorted(
        map(tuple, np.concatenate(tokens[4:6]))
    )
    for metrics, batch in seen:
        lengths = np.asarray(batch.completion_mask.sum(axis=-1))
        np.testing.assert_allclose(batch.divisors, 4 * lengths)  # of the mini-batch alone
        assert metrics["n_tokens"] == lengths.sum()
    # The ratio is 1 in the first update of a rollout, and no more later.
    spread = [abs(m["is_ratio/max"] - 1) for m in whole.metrics]
    assert max(spread[0], spread[4]) < 1e-4 < min(spread[1:4] + spread[5:])
    assert [m["seconds/rollout"] > 0 for m in whole.metrics] == [True, False, False, False] * 2
    # Checkpoints lie between rollouts, and a run goes on from them.
    assert checkpoint.steps(Path(config.run_dir) / "checkpoints") == [4, 8]
    half = dataclasses.replace(config, updates=4, run_dir=config.run_dir + "2")
    train(half, built())
    resumed = train(dataclasses.replace(half, updates=8, resume=True), built())
    same = [{k: v for k, v in m.items() if "seconds" not in k} for m in whole.metrics[4:]]
    assert [{k: v for k, v in m.items() if "seconds" not in k} for m in resumed.metrics] == same
    for one, other in zip(
        jax.tree.leaves(whole.state.params), jax.tree.leaves(resumed.state.params), strict=True
    ):
        np.testing.assert_array_equal(one, other)
