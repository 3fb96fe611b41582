"""Whole runs of a tiny model: files, one trace, interruption and resume, bad input."""

import dataclasses
import json
import signal
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from hilore_jax.training import checkpoint
from hilore_jax.training.config import TrainConfig
from hilore_jax.training.metrics import read_metrics
from hilore_jax.training.tasks import Task
from hilore_jax.training.trainer import Learner, train


@pytest.fixture
def config(tmp_path):
    return TrainConfig(
        prompts=2,
        group=4,
        micro_rows=4,
        prompt_length=6,
        completion_length=3,
        task="count",
        updates=3,
        learning_rate=1e-2,
        lora_rank=0,
        beta=0.01,
        save_every=0,
        run_dir=str(tmp_path / "run"),
        quiet=True,
    )


def fresh(parts, **options):
    """Parts whose arrays a run may consume: cached models are shared by the tests."""
    built = parts(**options)
    return dataclasses.replace(built, model=jax.tree.map(jnp.copy, built.model))


def untimed(metrics):
    return [{k: v for k, v in m.items() if not k.startswith("seconds/")} for m in metrics]


def lines(config):
    return untimed(read_metrics(Path(config.run_dir) / "metrics.jsonl"))


NAMES = """step reward reward_std frac_reward_zero_std completions/mean_length
completions/min_length completions/max_length completions/clipped_ratio rollout_logp_diff loss
grad_norm kl clip_ratio/low_mean clip_ratio/high_mean clip_ratio/region_mean is_ratio/mean
is_ratio/max exposure n_tokens nonfinite n_traces update_temp_bytes""".split()


def test_a_run_leaves_its_files_and_resumes_bit_for_bit(config, parts, tmp_path):
    run = train(config, fresh(parts))
    assert not run.interrupted
    assert [m["step"] for m in run.metrics] == [1, 2, 3]
    assert {m["n_traces"] for m in run.metrics} == {1}
    assert {m["nonfinite"] for m in run.metrics} == {0}
    assert set(NAMES) <= set(run.metrics[0])
    assert max(m["rollout_logp_diff"] for m in run.metrics) < 1e-4
    assert max(m["grad_norm"] for m in run.metrics) > 0
    folder = tmp_path / "run"
    assert json.loads((folder / "config.json").read_text())["group"] == 4
    recorded = json.loads((folder / "versions.json").read_text())
    assert {"python", "jax", "flax", "optax", "device", "policy"} <= set(recorded)
    assert checkpoint.steps(folder / "checkpoints") == [3]

    # The same run, interrupted after its second update, then resumed.
    halved = dataclasses.replace(config, run_dir=str(tmp_path / "halved"))

    def interrupt(metrics, batch):
        if metrics["step"] == 2:
            signal.raise_signal(signal.SIGINT)

    stopped = train(halved, fresh(parts), on_update=interrupt)
    assert stopped.interrupted
    assert len(lines(halved)) == 2
    with (tmp_path / "halved" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "rew')  # as if the process had died while writing
    resumed = train(dataclasses.replace(halved, resume=True), fresh(parts))
    assert [m["step"] for m in resumed.metrics] == [3]
    assert lines(halved) == lines(config)
    for one, other in zip(
        jax.tree.leaves(resumed.state.params), jax.tree.leaves(run.state.params), strict=True
    ):
        np.testing.assert_array_equal(one, other)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

    # Other settings are refused by name.
    other = dataclasses.replace(halved, resume=True, learning_rate=2e-2, updates=4)
    with pytest.raises(ValueError, match=r"learning_rate: checkpoint 0\.01, this run 0\.02"):
        train(other, fresh(parts))


def test_lora_reference_is_the_base_model(config, parts):
    # Adapters start away from zero here, so that policy and reference differ.
    learner = Learner(dataclasses.replace(config, lora_rank=2), fresh(parts, lora=True).model)
    tokens = np.full((1, 2, 5), 7, np.int32)
    mask = np.ones((1, 2, 5), bool)
    base = fresh(parts).model
    nnx.update(base, learner.state.frozen)
    with_adapters = learner._scored(learner.state.params, tokens, mask)
    without = learner._scored(learner._reference, tokens, mask)
    logp = jax.nn.log_softmax(base.logits(jnp.asarray(tokens[0])))
    np.testing.assert_allclose(without[0], logp[:, 1:4, 7], atol=1e-5)
    assert float(jnp.max(jnp.abs(with_adapters - without))) > 1e-3


def test_no_reference_without_beta(config, parts):
    learner = Learner(dataclasses.replace(config, beta=0.0), fresh(parts).model)
    assert learner._reference is None


def test_a_long_prompt_names_the_item_and_the_remedy(config, parts):
    with pytest.raises(ValueError, match=r"item \d+ .*'count'.*prompt_length to at least"):
        train(dataclasses.replace(config, prompt_length=1), fresh(parts))


def test_a_sequence_beyond_the_model_is_refused(config, parts):
    with pytest.raises(ValueError, match="= 103 tokens exceeds the model's 64"):
        train(dataclasses.replace(config, prompt_length=100), fresh(parts))


def test_a_failing_reward_names_the_item(config, parts):
    def broken(answer, item):
        raise RuntimeError("no verifier")

    built = fresh(parts)
    task = Task("broken", built.task.draw, broken, instruction="")
    # A number in the completion is needed for the scorer to be called: count prompts are letters,
    # so let every completion count as words.
    words = dataclasses.replace(
        task, draw=lambda i: dataclasses.replace(built.task.draw(i), answer="x")
    )
    with pytest.raises(ValueError, match="'broken' raised RuntimeError on item"):
        train(config, dataclasses.replace(built, task=words))
