"""Whole runs of a tiny model: files, one trace, interruption and resume, bad input."""

import dataclasses
import json
import math
import signal
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import hilore_jax as hl
from hilore_jax.grpo.gradient_norm import next_ghat
from hilore_jax.planning.ladder import Ladder
from hilore_jax.planning.menu import Entry
from hilore_jax.training import checkpoint, trainer
from hilore_jax.training.config import TrainConfig
from hilore_jax.training.exposures import read_record, record_paths
from hilore_jax.training.learner import Learner
from hilore_jax.training.metrics import read_metrics
from hilore_jax.training.report import kept_bytes
from hilore_jax.training.tasks import Task
from hilore_jax.training.trainer import Parts, train
from plans import bare_plan

SETTINGS = TrainConfig(
    prompts=2,
    group=4,
    micro_rows=4,
    prompt_length=6,
    completion_length=3,
    task="count",
    policy="mlp_gate=int8,attn_out=store",
    updates=3,
    learning_rate=1e-2,
    lora_rank=0,
    beta=0.01,
    save_every=0,
    quiet=True,
)


@pytest.fixture
def config(tmp_path):
    return dataclasses.replace(SETTINGS, run_dir=str(tmp_path / "run"))


@pytest.fixture(scope="module")
def shared(parts):
    """(learner, parts, its first state), so that the update is compiled once for all tests."""
    built = parts()
    quick = hl.compiler_options() | {"xla_backend_optimization_level": 0}
    with pytest.MonkeyPatch.context() as patch:  # the gradients that are only measured
        patch.setattr("hilore_jax.training.strategy.compiler_options", lambda: quick)
        learner = Learner(SETTINGS, built.model)
    start = jax.tree.map(jnp.copy, learner.state)
    return learner, built, start


@pytest.fixture
def run(shared):
    """`train` as a new process would: the learner starts from the first state again."""
    learner, built, start = shared

    def begin(config, parts: Parts = built, **options):
        learner.state = jax.tree.map(jnp.copy, start)
        return train(config, parts, learner=learner, **options)

    return begin


def untimed(metrics):
    return [{k: v for k, v in m.items() if not k.startswith("seconds/")} for m in metrics]


def lines(config):
    return untimed(read_metrics(Path(config.run_dir) / "metrics.jsonl"))


NAMES = """step reward reward_std frac_reward_zero_std completions/mean_length
completions/min_length completions/max_length completions/clipped_ratio rollout_logp_diff loss
grad_norm kl clip_ratio/low_mean clip_ratio/high_mean clip_ratio/region_mean is_ratio/mean
is_ratio/max exposure n_tokens nonfinite n_traces update_temp_bytes
bytes_H bytes_L bytes_R bytes_O""".split()


def interrupt(number, at):
    """An `on_update` that receives a signal during update `at`."""

    def on_update(metrics, batch):
        if metrics["step"] == at:
            signal.raise_signal(number)

    return on_update


@pytest.fixture(scope="module")
def whole(shared, tmp_path_factory):
    """An uninterrupted run, its settings and its lines; tests compare with it."""
    learner, built, start = shared
    config = dataclasses.replace(SETTINGS, run_dir=str(tmp_path_factory.mktemp("whole") / "run"))
    learner.state = jax.tree.map(jnp.copy, start)
    done = train(config, built, learner=learner)
    return done.metrics, jax.tree.map(np.asarray, done.state.params), config


def test_a_run_leaves_its_files_and_metrics(whole):
    metrics, _, config = whole
    assert [m["step"] for m in metrics] == [1, 2, 3]
    assert {m["n_traces"] for m in metrics} == {1}
    assert {m["nonfinite"] for m in metrics} == {0}
    assert set(NAMES) <= set(metrics[0])
    assert "entropy" not in metrics[0]  # on request only
    assert max(m["rollout_logp_diff"] for m in metrics) < 1e-4
    assert max(m["grad_norm"] for m in metrics) > 0
    folder = Path(config.run_dir)
    assert json.loads((folder / "config.json").read_text())["group"] == 4
    recorded = json.loads((folder / "versions.json").read_text())
    assert {"python", "jax", "flax", "optax", "device", "policy"} <= set(recorded)
    assert checkpoint.steps(folder / "checkpoints") == [3]
    score = checkpoint.newest_meta(folder / "checkpoints")["score"]
    np.testing.assert_allclose(score, np.mean([m["reward"] for m in metrics]))


def test_the_first_update_is_recorded_with_what_its_tokens_were_exposed_to(whole, shared):
    metrics, _, config = whole
    (path,) = record_paths(Path(config.run_dir))
    record = read_record(path)
    assert record.step == 1 and record.group == (0,) * 4 + (1,) * 4
    assert record.micro == record.group  # microbatches of four rows, as groups
    assert sum(record.tokens) == metrics[0]["n_tokens"]
    np.testing.assert_allclose(sum(record.exposure), metrics[0]["exposure"], rtol=1e-4)
    by_micro = [sum(record.exposure[:4]), sum(record.exposure[4:])]
    np.testing.assert_allclose(by_micro, metrics[0]["micro_exposure"], rtol=1e-4)
    np.testing.assert_allclose(np.mean(record.reward), metrics[0]["reward"], rtol=1e-6)
    tokenizer = shared[1].tokenizer
    for one in record.sequences:
        assert len(one.tokens) == len(one.omega) == record.tokens[one.row]
        assert one.prompt.startswith("a") and len(one.prompt) <= config.prompt_length
        assert tuple(tokenizer.decode([t]) for t in one.tokens) == one.pieces
        own = np.abs(one.omega).sum()
        np.testing.assert_allclose(own, record.exposure[one.row], rtol=1e-4, atol=1e-9)
        # On policy and before the reference differs, omega is -A / N.
        expected = -record.advantage[one.row] / sum(record.tokens)
        np.testing.assert_allclose(one.omega, expected, rtol=1e-3, atol=1e-6)


def test_records_follow_their_setting_and_those_after_the_checkpoint_go(run, config):
    every = dataclasses.replace(config, log_exposure_every=1)
    run(dataclasses.replace(every, save_every=1), on_update=interrupt(signal.SIGINT, 2))
    folder = Path(config.run_dir)
    steps = lambda: [int(path.stem) for path in record_paths(folder)]  # noqa: E731
    assert steps() == [1, 2]
    (record_paths(folder)[-1]).rename(folder / "exposure" / "00000003.json")
    run(dataclasses.replace(config, resume=True, log_exposure_every=0))
    assert steps() == [1]


def test_measured_errors_are_metrics_and_change_nothing_else(run, whole, config):
    metrics, params, _ = whole
    done = run(dataclasses.replace(config, measure_error_every=2))
    assert ["gradient_error" in line for line in done.metrics] == [True, False, True]
    assert all(1e-4 < done.metrics[i]["gradient_error"] < 0.1 for i in (0, 2))
    assert "predicted_error" not in done.metrics[0]  # a policy that was spelled has no risk
    plain = [{k: v for k, v in m.items() if k != "gradient_error"} for m in done.metrics]
    assert untimed(plain) == untimed(metrics)
    jax.tree.map(np.testing.assert_array_equal, done.state.params, params)


def test_kept_bytes_are_those_of_all_blocks_by_action(whole, shared):
    metrics, _, config = whole
    shape = shared[1].model.config
    tokens = config.micro_rows * (config.prompt_length + config.completion_length)
    # int8: a byte an element and a bfloat16 scale a token, since d_ff is less than a tile.
    expected = {
        "bytes_H": shape.n_layers * tokens * shape.n_heads * shape.head_dim * 4,
        "bytes_L": shape.n_layers * tokens * (shape.d_ff + 2),
        "bytes_R": 0,
        "bytes_O": 0,
    }
    assert {name: metrics[0][name] for name in expected} == expected
    # Policies that differ by block are added up.
    policies = (config.parsed_policy, dataclasses.replace(config, policy="gc").parsed_policy)
    half = {name: value // 2 for name, value in expected.items()}
    assert kept_bytes(shape, policies, config.micro_rows, tokens // config.micro_rows) == half


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_resumes_bit_for_bit(run, whole, config, number):
    metrics, params, reference = whole
    handlers = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    stopped = run(config, on_update=interrupt(number, 2))
    assert stopped.stopped_by == number
    assert len(lines(config)) == 2
    assert {n: signal.getsignal(n) for n in handlers} == handlers
    with (Path(config.run_dir) / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "rew')  # as if the process had died while writing
    resumed = run(dataclasses.replace(config, resume=True))
    assert resumed.stopped_by is None
    assert [m["step"] for m in resumed.metrics] == [3]
    assert lines(config) == lines(reference)
    jax.tree.map(np.testing.assert_array_equal, resumed.state.params, params)
    # Witness that the run was not simply done from its start: the updates differ.
    assert untimed(resumed.metrics) != untimed(metrics[:1])


def test_a_second_interruption_stops_at_once_and_keeps_what_was_written(run, config):
    # A test run in the background inherits an ignored SIGINT.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def twice(metrics, batch):
        if metrics["step"] == 2:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            raise AssertionError("the second signal must not return")

    with pytest.raises(KeyboardInterrupt):
        run(dataclasses.replace(config, save_every=1), on_update=twice)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)
    assert [line["step"] for line in lines(config)] == [1, 2]
    # The checkpoint of update 1 was written; that of update 2 was not yet.
    resumed = run(dataclasses.replace(config, resume=True, updates=2))
    assert [m["step"] for m in resumed.metrics] == [2]


def test_nothing_is_lost_when_a_later_reward_fails(run, shared, config):
    built = shared[1]

    def draw(index):
        if index >= 2 * config.prompts:
            raise ValueError(f"item {index} is damaged")
        return built.task.draw(index)

    broken = dataclasses.replace(built, task=dataclasses.replace(built.task, draw=draw))
    with pytest.raises(ValueError, match="item 4 is damaged"):
        run(config, broken)
    assert [line["step"] for line in lines(config)] == [1, 2]
    resumed = run(dataclasses.replace(config, resume=True))
    assert [m["step"] for m in resumed.metrics] == [3]


def test_a_non_finite_update_names_the_row_and_can_be_gone_on_from(run, shared, config):
    learner = shared[0]
    original = learner.batch

    def poisoned(experience):
        batch, metrics = original(experience)
        if int(learner.state.step) == 1:
            old = batch.logp_old.at[1, 2, 0].set(jnp.nan)
            batch = dataclasses.replace(batch, logp_old=old)
        return batch, metrics

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(learner, "batch", poisoned)
        with pytest.raises(FloatingPointError, match=r"row 6 \(microbatch 1, row 2\)"):
            run(config)
    assert [line["step"] for line in lines(config)] == [1]
    resumed = run(dataclasses.replace(config, resume=True, updates=2))
    assert [m["step"] for m in resumed.metrics] == [2]


def test_other_settings_are_not_resumed(run, config):
    run(dataclasses.replace(config, updates=1))
    other = dataclasses.replace(config, resume=True, learning_rate=2e-2, updates=4)
    with pytest.raises(ValueError, match=r"learning_rate: checkpoint 0\.01, this run 0\.02"):
        run(other)


def test_nothing_to_resume_says_what_to_do(run, config):
    Path(config.run_dir).mkdir()
    with pytest.raises(ValueError, match="holds no checkpoint; leave --resume out"):
        run(dataclasses.replace(config, resume=True))


def test_lora_reference_is_the_base_model(config, parts, tiny, quick):
    # Adapters start away from zero here, so that policy and reference differ.
    learner = Learner(dataclasses.replace(config, lora_rank=2), parts(lora=True).model)
    tokens = np.full((1, 2, 5), 7, np.int32)
    mask = np.ones((1, 2, 5), bool)
    base = parts().model
    nnx.update(base, learner.state.frozen)
    assert learner.reference is not None
    with_adapters = learner.score(learner.state.params, tokens, mask)
    without = learner.score(learner.reference, tokens, mask)
    logp = jax.nn.log_softmax(quick(base.logits)(jnp.asarray(tokens[0])))
    np.testing.assert_allclose(without[0], logp[:, 1:4, 7], atol=1e-5)
    assert float(jnp.max(jnp.abs(with_adapters - without))) > 1e-3


def test_no_reference_without_beta(config, parts):
    learner = Learner(dataclasses.replace(config, beta=0.0), parts().model)
    assert learner.reference is None


def test_a_long_prompt_names_the_item_and_the_remedy(run, config):
    with pytest.raises(ValueError, match=r"item \d+ .*'count'.*prompt_length to at least"):
        run(dataclasses.replace(config, prompt_length=1))


def test_a_sequence_beyond_the_model_is_refused(run, config):
    with pytest.raises(ValueError, match="= 103 tokens exceeds the model's 64"):
        run(dataclasses.replace(config, prompt_length=100))


def test_a_misspelt_activation_is_refused_before_anything_is_sampled_or_written(
    config, parts, monkeypatch
):
    def sampled(*_, **__):
        raise AssertionError("sampled before the policy was checked")

    monkeypatch.setattr("hilore_jax.training.one_update.collect", sampled)
    wrong = dataclasses.replace(config, policy="mlp_gat=int8")
    with pytest.raises(ValueError, match=r"\['mlp_gat'\] not found .*'mlp_gate'"):
        train(wrong, parts())
    assert not Path(wrong.run_dir).exists()


def test_a_failing_reward_names_the_item(run, shared, config):
    def broken(answer, item):
        raise RuntimeError("no verifier")

    built = shared[1]
    # The answer is a word, so that every completion counts as one and reaches the scorer.
    draw = lambda i: dataclasses.replace(built.task.draw(i), answer="x")  # noqa: E731
    task = Task("broken", draw, broken, instruction="")
    with pytest.raises(ValueError, match="'broken' raised RuntimeError on item"):
        run(config, dataclasses.replace(built, task=task))


def test_a_missing_extra_is_named_before_weights_are_loaded(config, monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)
    with pytest.raises(ImportError, match=r"hilore_jax\[tasks\]"):
        train(dataclasses.replace(config, task="chain_sum", model="no such model"))
    assert not Path(config.run_dir).exists()


def test_weights_that_train_are_float32_and_a_frozen_base_is_not(config, parts, monkeypatch):
    seen = {}
    built = parts()

    def load(name, **options):
        seen.update(options)
        return built.model

    opened = (built.model.config, None)
    monkeypatch.setattr("hilore_jax.models.weights.open_source", lambda name: opened)
    monkeypatch.setattr("hilore_jax.models.weights.load", load)
    monkeypatch.setattr("hilore_jax.models.tokenizer.load", lambda name: built.tokenizer)
    for rank, dtype in ((0, "float32"), (4, "bfloat16")):
        trainer.load_parts(dataclasses.replace(config, lora_rank=rank, dtype="bfloat16"))
        assert seen["param_dtype"] == dtype


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("mlp_gat=int8", r"\['mlp_gat'\] not found in the block; names seen.*'mlp_gate'"),
        ("mlp_gate=int8:axis=5", "axis"),
    ],
)
def test_a_policy_the_block_cannot_honour_is_refused_before_anything_is_loaded(
    config, parts, monkeypatch, policy, message
):
    built = parts()

    def never(*args, **kwargs):
        raise AssertionError("loaded, sampled or written before the policy was checked")

    monkeypatch.setattr(
        "hilore_jax.models.weights.open_source", lambda name: (built.model.config, None)
    )
    for late in ("models.weights.load", "models.tokenizer.load", "training.trainer.Learner"):
        monkeypatch.setattr(f"hilore_jax.{late}", never)
    wrong = dataclasses.replace(config, policy=policy)
    for given in (None, built):
        with pytest.raises(ValueError, match=message):
            train(wrong, given)
    assert not Path(config.run_dir).exists()


def test_what_takes_long_is_announced(run, config, capsys):
    run(dataclasses.replace(config, quiet=False, updates=1))
    first, second, *_ = capsys.readouterr().err.splitlines()
    assert first == f"loading {config.model} and the task count"
    assert second.startswith("compiling")


def ladder_file(path, blocks=2):
    """A ladder as `hl.plan_ladder` writes it, for the tiny model."""
    gc = hl.Policy({})
    low = hl.Policy({"mlp_gate": hl.Compress("int8"), "mlp_up": hl.Compress("int8")})
    menu = (
        Entry(gc, 0, 2.0, 1, 8, risk=0.0),
        Entry(low, 100, 1.0, 0, 0, risk=0.001),
    )
    fields = {"block_risks": ((0.0, 0.001),) * blocks, "exposure": 0.5, "norm": 0.3}
    made = [bare_plan((policy,) * blocks, menu, **fields) for policy in (low, gc)]
    Ladder((0.5, math.inf), tuple(made)).save(path)
    return str(path)


def test_a_ladder_and_skipped_rows_train_and_resume_bit_for_bit(
    config, parts, tmp_path, monkeypatch
):
    quick = hl.compiler_options() | {"xla_backend_optimization_level": 0}
    monkeypatch.setattr("hilore_jax.training.laddered.compiler_options", lambda: quick)
    changes = {"policy": "gc", "ladder": ladder_file(tmp_path / "ladder.json"), "beta": 0.0}
    config = dataclasses.replace(config, **changes, skip_rows=True, pack_by_exposure=True)
    built = parts()
    learner = Learner(config, built.model)
    start = jax.tree.map(jnp.copy, learner.state)
    done = train(config, built, learner=learner)
    assert [m["step"] for m in done.metrics] == [1, 2, 3]
    for line in lines(config):
        hits = [line[f"ladder_hits/{edge}"] for edge in ("0.5", "inf")]
        assert sum(hits) == len(line["micro_exposure"]) <= 2
        assert line["risk_used"] <= line["risk_budget"] <= 0.015 * (1 + 1e-9)
        assert line["n_traces"] == 2 and line["ladder_redo"] >= 0
        # Groups of equal reward are left out, whole.
        assert line["rows_skipped"] >= 4 * round(2 * line["frac_reward_zero_std"])
    again = dataclasses.replace(config, run_dir=f"{config.run_dir}-again")
    learner.state = jax.tree.map(jnp.copy, start)
    stopped = train(again, built, learner=learner, on_update=interrupt(signal.SIGINT, 1))
    assert stopped.stopped_by == signal.SIGINT
    learner.state = jax.tree.map(jnp.copy, start)
    resumed = train(dataclasses.replace(again, resume=True), built, learner=learner)
    jax.tree.map(np.testing.assert_array_equal, resumed.state.params, done.state.params)
    # So does the norm to which risks are relative: calibrated at first, then a moving average.
    used = [m["grad_norm_ema"] for m in done.metrics]
    after = [float(next_ghat(m["grad_norm_ema"], m["grad_norm"])) for m in done.metrics]
    assert used == [np.float32(0.3), *after[:2]] and after[0] != used[0]
    assert [m["grad_norm_ema"] for m in (*stopped.metrics, *resumed.metrics)] == used
    assert resumed.state.ghat == done.state.ghat == np.float32(after[2])
    learner.state = dataclasses.replace(jax.tree.map(jnp.copy, start), ghat=None)
    fixed = dataclasses.replace(again, resume=True, fixed_gradient_norm=True, updates=4)
    message = r"norm of risks: checkpoint 'a moving average \(--fixed-gradient-norm.*run None"
    with pytest.raises(ValueError, match=message):
        train(fixed, built, learner=learner)
    recorded = json.loads((Path(config.run_dir) / "versions.json").read_text())
    assert recorded["policy"] == "ladder"


def test_a_ladder_of_another_model_is_refused_before_sampling(config, parts, tmp_path):
    wrong = dataclasses.replace(
        config, policy="gc", ladder=ladder_file(tmp_path / "ladder.json", blocks=3)
    )
    with pytest.raises(ValueError, match="blocks: the ladder has 3, this run has 2"):
        train(wrong, parts())
    assert not Path(wrong.run_dir).exists()


def poisoned(learner, steps):
    """`learner.batch` with a number that is not finite in some of the batches."""
    original = learner.batch
    count = iter(range(100))

    def batch(experience):
        made, metrics = original(experience)
        if next(count) in steps:
            made = dataclasses.replace(made, logp_old=made.logp_old.at[1, 2, 0].set(jnp.nan))
        return made, metrics

    return batch


def test_updates_that_are_not_finite_are_passed_over_up_to_a_limit(run, shared, config, caplog):
    learner = shared[0]
    patient = dataclasses.replace(config, nonfinite_limit=1, updates=4, log_exposure_every=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(learner, "batch", poisoned(learner, {0, 2}))
        done = run(patient)
    assert [(m["step"], m["nonfinite"]) for m in done.metrics] == [(1, 1), (2, 0), (3, 1), (4, 0)]
    assert int(done.state.step) == 2 and "row 6 (microbatch 1, row 2)" in caplog.text
    assert [read_record(path).step for path in record_paths(Path(config.run_dir))] == [2, 4]
    # The run goes on where it was in the data, though two updates moved nothing.
    more = run(dataclasses.replace(patient, resume=True, updates=5))
    assert [m["step"] for m in more.metrics] == [5] and int(more.state.step) == 3
    folder = dataclasses.replace(patient, run_dir=config.run_dir + "2")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(learner, "batch", poisoned(learner, {1, 2}))
        with pytest.raises(FloatingPointError, match="row 6"):
            run(folder)
    assert [line["nonfinite"] for line in lines(folder)] == [0, 1]
    assert checkpoint.steps(Path(folder.run_dir) / "checkpoints") == [1]
    whole = run(dataclasses.replace(folder, resume=True, updates=3))
    assert [m["step"] for m in whole.metrics] == [3]


def test_a_prompt_whose_reward_fails_is_left_out_of_the_update(run, shared, config, caplog):
    built = shared[1]

    def score(answer, item):
        if item.index == 1:
            raise RuntimeError("no verifier")
        return float(len(answer) % 2)

    draw = lambda i: dataclasses.replace(built.task.draw(i), answer="x")  # noqa: E731
    parts = dataclasses.replace(built, task=Task("odd", draw, score, instruction=""))
    batches = []
    patient = dataclasses.replace(config, reward_failures="drop", updates=1)
    done = run(patient, parts, on_update=lambda metrics, batch: batches.append(batch))
    (metrics,), (batch,) = done.metrics, batches
    assert metrics["reward_failed"] == 1 and "left out the 4 completions" in caplog.text
    assert "no verifier" in caplog.text
    mask = np.asarray(batch.completion_mask).reshape(2, 4, -1)
    assert mask[0].any() and not mask[1].any()
    assert metrics["n_tokens"] == mask.sum() and not np.asarray(batch.advantages)[1].any()
    all_fail = lambda answer, item: math.nan  # noqa: E731
    parts = dataclasses.replace(built, task=Task("none", draw, all_fail, instruction=""))
    other = dataclasses.replace(patient, run_dir=config.run_dir + "2")
    with pytest.raises(ValueError, match="a reward of each of the update's 2 prompts failed; the"):
        run(other, parts)


def test_evaluation_after_every_second_update_and_the_last(run, config):
    often = dataclasses.replace(config, eval_every=2, eval_prompts=3)
    done = run(often)
    assert [("eval/reward" in m) for m in done.metrics] == [False, True, True]
    plain = run(dataclasses.replace(config, run_dir=config.run_dir + "2"))
    for one, other in zip(done.metrics, plain.metrics, strict=True):  # it changes nothing else
        assert one["loss"] == other["loss"] and one["reward"] == other["reward"]
