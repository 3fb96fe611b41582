"""`hilore plan` and `hilore explain plan.json`, for a model folder without weights."""

import dataclasses
import json
from typing import NamedTuple

import jax
import pytest

import hilore_jax as hl
from hilore_jax.cli import main
from hilore_jax.models.config import DecoderConfig
from hilore_jax.models.shapes import to_hf
from hilore_jax.planning.measure import Measurement, check_measurable
from hilore_jax.planning.measured import Measured, Timing
from hilore_jax.planning.target import parse_target
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


def test_the_cost_that_was_asked_for_is_handed_on_with_arrays_to_measure_on(run, monkeypatch):
    seen = []

    def fake(update, args, **options):
        seen.append((args, options["cost"]))
        raise ValueError("seen")

    monkeypatch.setattr(plan_command, "plan", fake)
    options = ["--target", "cpu", "--micro", "2"]
    assert run(*options) == run(*options, "--cost", "measured", "--turns", "3") == 2
    (shapes, modelled), (arrays, measured) = seen
    assert modelled == "modelled"
    assert measured == Measurement(turns=3, microbatches=2)
    gc = (hl.Policy({}),) * CONFIG.n_layers
    kinds = [{type(leaf) for leaf in jax.tree.leaves(make(gc))} for make in (shapes, arrays)]
    assert kinds[0] == {jax.ShapeDtypeStruct} and jax.ShapeDtypeStruct not in kinds[1]
    check_measurable(arrays(gc), parse_target("cpu"))


def test_seconds_of_a_measured_plan_are_used_again(monkeypatch):
    timing = Timing(hl.Policy({}), 0.0, 0.0, 0.0, 3)
    measured = Measured((timing,), 5, 1.0, (), {"target": "cpu"})
    plans = {"measured": measured, "modelled": None}
    for name, found in plans.items():
        monkeypatch.setattr(hl.Plan, "load", lambda path, found=found: Loaded(found))
        config = PlanConfig(cost=f"{name}.json", target="cpu")
        if found is None:
            with pytest.raises(ValueError, match="the seconds of that plan are modelled"):
                plan_command.planning_cost(config)
        else:
            assert plan_command.planning_cost(config) is measured


class Loaded(NamedTuple):
    """What the command reads of a plan."""

    measured: Measured | None


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
