"""`hilore plan` and `hilore explain plan.json`, for a model folder without weights."""

import dataclasses
import json
from typing import Any

import pytest

import hilore_jax as hl
from hilore_jax.cli import main
from hilore_jax.models.config import DecoderConfig
from hilore_jax.models.shapes import to_hf
from hilore_jax.training import plan_command
from hilore_jax.training.plan_command import PlanConfig, abstract_update

CONFIG = DecoderConfig(
    vocab_size=2048, d_model=32, d_ff=96, n_layers=3, n_heads=2, n_kv_heads=1, head_dim=16
)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(to_hf(CONFIG)))
    return str(tmp_path)


@pytest.fixture
def run(folder):
    def run(*options):
        return main(["plan", "--model", folder, "--batch", "2x64", "--lora", "2", *options])

    return run


def test_a_plan_is_printed_written_and_explained_again(run, tmp_path, capsys):
    out, picture = tmp_path / "plan.json", tmp_path / "plan.png"
    options = ["--target", "cpu", "--memory", "9x-gc", "--out", str(out), "--plot", str(picture)]
    assert run(*options) == 0
    printed = capsys.readouterr().out
    assert "plan for cpu, 3 blocks" in printed and "peak: compiled" in printed
    plan = hl.Plan.load(out)
    assert len(plan.policies) == 3 and plan.memory.peak <= plan.budget
    assert picture.stat().st_size > 10_000
    assert main(["explain", str(out)]) == 0
    assert capsys.readouterr().out.strip() in printed


def test_seconds_are_measured_on_this_device_and_used_again(run, tmp_path, capsys, monkeypatch):
    asked = plan_command.planning_cost

    def few(config):
        found: Any = asked(config)
        return dataclasses.replace(found, most=1) if config.cost == "measured" else found

    monkeypatch.setattr(plan_command, "planning_cost", few)
    out, again = tmp_path / "plan.json", tmp_path / "again.json"
    options = ["--target", "cpu", "--memory", "9x-gc", "--risk", "0", "--micro", "2"]
    assert run(*options, "--cost", "measured", "--turns", "2", "--out", str(out)) == 0
    assert "updates under 2 policies in 2 turns" in capsys.readouterr().out
    first = hl.Plan.load(out)
    assert first.cost == "measured" and first.measured is not None
    assert run(*options, "--cost", str(out), "--out", str(again)) == 0
    second = hl.Plan.load(again)
    assert second.measured == first.measured and second.policies == first.policies
    first = dataclasses.replace(first, cost="modelled", measured=None)
    first.save(out)
    assert run(*options, "--cost", str(out)) == 2
    assert "the seconds of that plan are modelled" in capsys.readouterr().err


@pytest.mark.gpu_target
def test_a_plan_for_a_gpu_that_is_not_here(run, tmp_path):
    out = tmp_path / "plan.json"
    options = ["--target", "cuda:h200", "--memory", "9x-gc", "--baseline", "whole-logits"]
    assert run(*options, "--out", str(out)) == 0
    plan = hl.Plan.load(out)
    assert plan.target == "cuda:h200" and plan.baseline is not None
    assert plan.baseline > 1.2 * plan.gc.peak  # whole logits
    assert plan.memory.peak <= plan.budget == 9 * plan.baseline
    assert plan.removed_flops == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--batch", "2048"], "--batch 2048: expected sequences x tokens"),
        (["--completion", "64"], "--completion 64: expected 1 to 63 of 64 tokens"),
        (["--memory", "8"], '"8" has no unit'),
        (["--baseline", "none"], "--baseline none: expected chunked or whole-logits"),
        (["--target", "cuda:h999"], "h200"),
        (["--cost", "guessed"], "--cost guessed: expected modelled, measured, or"),
        (["--cost", "measured", "--target", "cuda:h200"], "cuda:h200, which is only compiled for"),
        (["--cost", "measured", "--turns", "0"], "Measurement(turns=0)"),
    ],
)
def test_wrong_options_are_named(run, capsys, options, message):
    assert run("--target", "cpu", *options) == 2
    assert message in capsys.readouterr().err


def test_attention_follows_the_target():
    asked = PlanConfig(model="qwen2.5-3b-instruct", target="cpu")
    assert abstract_update(asked).config.attention == "xla"

    there = dataclasses.replace(asked, target="cuda:h200")
    assert abstract_update(there).config.attention == "cudnn"
    assert abstract_update(dataclasses.replace(there, dtype="float32")).config.attention == "xla"
