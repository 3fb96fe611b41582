"""Losses by name: what a run's batch and update are made of, and settings that do not fit."""

import dataclasses
import math

import numpy as np
import pytest

from hilore_jax.training.config import TrainConfig, faults
from hilore_jax.training.loss_config import (
    FORMULAS,
    LossSettings,
    loss_options,
    row_advantages,
    row_divisors,
)
from hilore_jax.training.metrics import read_metrics
from hilore_jax.training.trainer import train

SETTINGS = TrainConfig(
    prompts=2,
    group=2,
    micro_rows=2,
    prompt_length=6,
    completion_length=3,
    task="count",
    updates=1,
    lora_rank=0,
    save_every=0,
    quiet=True,
)
MASK = np.array([[1, 1, 1], [1, 0, 0], [0, 0, 0], [1, 1, 0]], bool)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"clip_dual": 1.0}, "clip_dual must be > 1, found 1.0"),
        ({"clip_dual": 3.0, "loss": "cispo"}, "clip_dual with loss cispo, which holds all"),
        ({"loss": "gspo", "correction": "token"}, "correction token with loss gspo"),
        ({"correction": "token", "old_logps": "rollout"}, "there is nothing to correct"),
        ({"correction_cap": 3.0}, "correction_cap 3.0 would do nothing without correction"),
        ({"correction_beyond": "mask"}, "correction_beyond mask would do nothing without"),
        ({"reference": "k1"}, "reference k1 would do nothing with beta 0"),
        ({"entropy_coef": 0.1, "skip_rows": True}, "entropy_coef with skip_rows: the bonus moves"),
        ({"clip_high": -0.1}, "clip_high must be"),
        ({"entropy_coef": math.nan}, "entropy_coef must be"),
        ({"correction": "token", "correction_cap": 0.0}, "correction_cap must be"),
    ],
)
def test_each_fault_is_named(changes, message, tmp_path):
    config = dataclasses.replace(SETTINGS, run_dir=str(tmp_path / "run"), **changes)
    (found,) = faults(config)
    assert found.startswith(message) or message in found


def test_defaults_are_those_of_runs_from_before():
    names = {field.name for field in dataclasses.fields(LossSettings)}
    assert not names & TrainConfig().fingerprint().keys()
    changed = dataclasses.replace(TrainConfig(), loss="gspo", clip_high=0.3)
    assert changed.fingerprint() == TrainConfig().fingerprint() | {"loss": "gspo", "clip_high": 0.3}


def test_divisors_by_name():
    want = {
        "dapo": None,
        "cispo": None,
        "grpo": [9, 3, 0, 6],
        "gspo": [9, 3, 0, 6],
        "dr_grpo": [9, 9, 0, 9],
        "bnpo": [8, 8, 0, 4],
    }
    assert want.keys() == FORMULAS.keys()
    for loss, divisors in want.items():
        found = row_divisors(dataclasses.replace(SETTINGS, loss=loss), MASK)
        assert (found is None) == (divisors is None)
        if found is not None:
            assert found.shape == (2, 2) and found.reshape(-1).tolist() == divisors
    options = loss_options(dataclasses.replace(SETTINGS, loss="gspo", clip_high=0.3, beta=0.1))
    assert options == {
        "clip": 0.2,
        "beta": 0.1,
        "clip_high": 0.3,
        "clip_dual": None,
        "ratio": "sequence",
        "surrogate": "clip",
        "reference": "k3",
    }


def test_advantages_are_weighed_by_the_correction():
    rewards = np.array([[0.0, 2.0], [1.0, 5.0]], np.float32)
    old = np.zeros((4, 3), np.float32)
    rollout = old - np.log(np.array([[1, 2, 4], [1, 9, 9], [9, 9, 9], [2, 0.5, 9]], np.float32))
    rollout = np.where(MASK, rollout, np.nan)
    plain = dataclasses.replace(SETTINGS, scale_rewards="none")
    found, seen = row_advantages(plain, rewards, old.reshape(2, 2, 3), rollout, MASK)
    assert found.tolist() == [[-1, 1], [-2, 2]] and seen == {}
    tokens = dataclasses.replace(plain, correction="token", correction_cap=3.0)
    found, seen = row_advantages(tokens, rewards, old.reshape(2, 2, 3), rollout, MASK)
    assert found.shape == (2, 2, 3)
    want = [[-1, -2, -3], [1], [], [4, 1]]
    for row, expected in zip(np.asarray(found).reshape(4, 3), want, strict=True):
        np.testing.assert_allclose(row[: len(expected)], expected, rtol=1e-6)
    name = "sampling/importance_sampling_ratio/"
    assert seen == pytest.approx({name + "mean": 9.5 / 6, name + "min": 0.5, name + "max": 3})
    rows = dataclasses.replace(tokens, correction="sequence", correction_beyond="mask")
    found, seen = row_advantages(rows, rewards, old.reshape(2, 2, 3), rollout, MASK)
    np.testing.assert_allclose(found, [[0, 1], [-2, 2]], rtol=1e-6)
    assert seen[name + "max"] == pytest.approx(1)


def test_a_run_with_every_knob(parts, tmp_path):
    config = dataclasses.replace(
        SETTINGS,
        run_dir=str(tmp_path / "run"),
        loss="dr_grpo",
        clip_high=0.3,
        clip_dual=3.0,
        beta=0.1,
        reference="k2",
        scale_rewards="none",
        mask_truncated=True,
        prompts=4,
        group=8,
        micro_rows=8,
        correction="token",
        entropy_coef=0.01,
        log_exposure_every=1,
    )
    batches = []
    run = train(config, parts(), on_update=lambda metrics, batch: batches.append(batch))
    (metrics,), (batch,) = run.metrics, batches
    assert metrics == read_metrics(tmp_path / "run" / "metrics.jsonl")[0]
    assert {"entropy", "clip_ratio/dual_mean", "kl"} <= metrics.keys()
    assert abs(metrics["sampling/importance_sampling_ratio/mean"] - 1) < 1e-3
    ended = np.asarray(batch.completion_mask.any(axis=-1))
    assert 0 < metrics["completions/clipped_ratio"] == 1 - ended.mean()
    assert metrics["n_tokens"] == int(batch.completion_mask.sum())
    # A token counts 1/(rows that ended x 3), whatever their lengths.
    count = max(int(ended.sum()), 1)
    assert np.unique(np.asarray(batch.divisors)).tolist() == sorted({0.0, 3.0 * count})
    assert batch.advantages.shape == batch.completion_mask.shape
