"""`hilore plan` and `hilore explain plan.json`, for a model folder without weights."""

import dataclasses
import json
import math

import jax
import optax
import pytest
from flax import nnx

import hilore_jax as hl
from hilore_jax.cli import main
from hilore_jax.models.config import DecoderConfig
from hilore_jax.models.decoder import Decoder
from hilore_jax.models.shapes import to_hf
from hilore_jax.planning.calibration import Measured as MeasuredRisk
from hilore_jax.planning.calibration import model_fingerprint
from hilore_jax.planning.measure import Measurement, check_measurable
from hilore_jax.planning.measured import Measured, Timing
from hilore_jax.planning.memory import Memory
from hilore_jax.planning.menu import Entry
from hilore_jax.planning.target import parse_target
from hilore_jax.training import plan_command
from hilore_jax.training.config import TrainConfig, check
from hilore_jax.training.laddered import LadderedUpdate
from hilore_jax.training.plan_command import PlanConfig, abstract_update
from hilore_jax.training.strategy import make_strategy, plans, segment_lengths
from plans import bare_plan

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
    assert "plan for cpu, 3 blocks" in printed and "plan, compiled" in printed
    plan = hl.Plan.load(out)
    assert len(plan.policies) == 3 and plan.memory.peak <= plan.budget
    assert picture.stat().st_size > 10_000
    assert main(["explain", str(out)]) == 0
    assert capsys.readouterr().out.strip() in printed


GC, UP = hl.Policy({}), hl.Policy({"mlp_up": hl.Compress("int8", tile=32)})


@pytest.fixture
def calibration(folder, tmp_path):
    """Risk 0.01 E for each block, which were measured at exposures 0.4 and 0.9."""
    config = PlanConfig(model=folder, batch="2x64", lora_rank=2, target="cpu")
    fingerprint = model_fingerprint(abstract_update(config).blocks())
    measured = tuple(MeasuredRisk(UP, block, 2.0, 0.1, 0.01, 1) for block in range(3))
    made = hl.Calibration(measured, 2.0, 1.0, (0.4, 0.9), fingerprint, 9, 1.0, 2, {})
    made.save(tmp_path / "calibration.json")
    return str(tmp_path / "calibration.json")


def test_a_ladder_is_written_and_read_by_train(run, calibration, tmp_path, capsys, monkeypatch):
    out = tmp_path / "ladder.json"
    asked = []

    def counted(update, args, *, budget, calibration, exposure, **options):
        """What `hl.plan` returns, without compiling anything."""
        asked.append((exposure, budget.risk))
        entry = lambda p, risk: Entry(p, 100, 1e-3, 0, 0, risk)  # noqa: E731
        risk = calibration.risk(UP, 0, exposure)
        memory, fits = Memory(50, 0, 0, 50, 0, 0), risk * 3**0.5 <= budget.risk
        return hl.Plan(
            policies=(UP if fits else GC,) * 3,
            menu=(entry(GC, 0.0), entry(UP, risk)),
            **dict.fromkeys(("gc", "memory"), memory),
            **dict.fromkeys(("budget", "predicted"), 100),
            risk_budget=budget.risk,
            exposure=exposure,
            baseline=None,
            bound_seconds=0.0,
            cost="modelled",
            target="cpu",
            trials=(),
            fingerprint={"jax": jax.__version__},
        )

    monkeypatch.setattr("hilore_jax.planning.rungs.plan", counted)
    options = ["--target", "cpu", "--memory", "9x-gc", "--calibration", calibration]
    assert run(*options, "--micro", "4", "--risk", "0.02", "--ladder", str(out)) == 0
    said = capsys.readouterr()
    assert "ladder of 3 plans" in said.out
    assert "the ladder's buckets: the calibration does not say of which batch" in said.err
    # A quarter of the tokens has half of R.
    assert asked == [(0.5, 0.01), (1.0, 0.01), (1.0, 0.0)]
    ladder = hl.Ladder.load(out)
    assert (ladder.edges, ladder.risk, ladder.share) == ((0.5, 1.0, math.inf), 0.02, 0.25)
    assert [plan.policies[0] for plan in ladder.plans] == [UP, GC, GC]
    config = TrainConfig(ladder=str(out), run_dir=str(tmp_path / "run"))
    check(config)
    assert plans(config, CONFIG) == tuple(plan.policies for plan in ladder.plans)
    model = nnx.eval_shape(
        lambda: Decoder(CONFIG, segments=segment_lengths(config, CONFIG), rngs=nnx.Rngs(0))
    )
    strategy = make_strategy(config, CONFIG, nnx.split(model)[0], optax.sgd(1.0))
    assert isinstance(strategy, LadderedUpdate) and strategy.buckets == ladder.buckets


def with_batch(calibration):
    """The calibration, as of 4 microbatches of 2 sequences of 64 tokens."""
    made = hl.Calibration.load(calibration)
    facts = {
        "microbatches of an update": "4",
        "sequences of a microbatch": "2",
        "tokens of a sequence": "64",
        "scored tokens of a sequence": "63",
    }
    dataclasses.replace(made, fingerprint={**made.fingerprint, **facts}).save(calibration)
    return calibration


@pytest.fixture
def exposures(monkeypatch):
    """What plans are asked for, none of which is made."""
    asked = []

    def plan(update, args, *, exposure, budget, **options):
        asked.append((exposure, budget.risk))
        return bare_plan([GC], [Entry(GC, 0, 0.0, 0, 0, 0.0)])

    monkeypatch.setattr(plan_command, "plan", plan)
    return asked


@pytest.mark.parametrize(
    ("options", "words", "guess"),
    [
        (["--micro", "1"], "1 microbatches of 2 sequences of 64 tokens, 63", "about 2.6 where"),
        (["--micro", "8"], "8 microbatches of 2 sequences of 64 tokens, 63", "about 0.325 where"),
        (["--batch", "4x64"], "4 microbatches of 4 sequences of 64 tokens, 63", "about 0.65 where"),
        (["--batch", "2x128"], "4 microbatches of 2 sequences of 128 tokens", "about 0.65 where"),
        (["--completion", "9"], "4 microbatches of 2 sequences of 64 tokens, 9", "about 0.65"),
    ],
)
def test_the_exposure_of_another_batch_is_not_taken(
    run, calibration, exposures, capsys, options, words, guess
):
    how = ["--target", "cpu", "--calibration", with_batch(calibration)]
    assert run(*how) == 0
    # The batch is the calibration's where it is not given: a quarter of the tokens, half of R.
    assert exposures == [(None, 0.0075)]
    assert run(*how, *options) == 2
    err = capsys.readouterr().err
    assert f"this plan is for updates of {words}" in err and guess in err
    assert "(median 0.65) are of updates of 4 microbatches of 2 sequences of 64 tokens, 63" in err
    assert "--batch 2x64 --completion 63 --micro 4" in err
    assert run(*how, *options, "--exposure", "0.25") == 0
    assert [exposure for exposure, _ in exposures] == [None, 0.25]


def test_a_calibration_that_names_no_batch_needs_an_exposure(run, calibration, exposures, capsys):
    how = ["--target", "cpu", "--calibration", calibration]
    assert run(*how) == 2
    assert "does not say of which batch its exposures are (median 0.65)" in capsys.readouterr().err
    assert run(*how, "--exposure", "0") == 0 and exposures == [(0.0, 0.015)]


def test_a_ladder_needs_a_calibration_and_no_plan(run, calibration, capsys):
    assert run("--target", "cpu", "--ladder", "ladder.json") == 2
    assert "--ladder needs --calibration" in capsys.readouterr().err
    options = ["--target", "cpu", "--calibration", calibration, "--ladder", "ladder.json"]
    assert run(*options, "--out", "plan.json", "--exposure", "1") == 2
    assert "--out and --exposure belong to a single plan" in capsys.readouterr().err


def test_a_plan_says_what_it_is_for(run, folder, tmp_path, monkeypatch, capsys):
    made = bare_plan([GC], [Entry(GC, 0, 0.0, 0, 0, 0.0)])
    seen = []
    monkeypatch.setattr(plan_command, "plan", lambda *args, **how: (seen.append(how), made)[1])
    assert run("--target", "cpu", "--out", str(tmp_path / "plan.json")) == 0
    found = hl.Plan.load(tmp_path / "plan.json").fingerprint
    assert found["model"] == folder and found["LoRA rank"] == "2"
    assert found["tokens of a sequence"] == "64" and found["dtype"] == "bfloat16"
    assert seen[0]["progress"] is True  # lines where there is no terminal

    def interrupted(*args, **how):
        raise KeyboardInterrupt

    monkeypatch.setattr(plan_command, "plan", interrupted)
    assert run("--target", "cpu", "--out", str(tmp_path / "other.json")) == 130
    assert "no file was written; what was compiled is kept" in capsys.readouterr().err
    assert not (tmp_path / "other.json").exists()


def test_a_calibration_of_another_model_is_named_in_words(run, calibration, capsys):
    made = hl.Calibration.load(calibration)
    facts = {"model": "there", "LoRA rank": "4", "batch": "2x64"}
    dataclasses.replace(made, fingerprint={**made.fingerprint, **facts}).save(calibration)
    assert run("--target", "cpu", "--calibration", calibration, "--lora-rank", "2") == 2
    err = capsys.readouterr().err
    assert "LoRA rank: the calibration has 4, this run has 2. Give --lora-rank 4" in err


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


def test_seconds_of_a_measured_plan_are_used_again(folder, tmp_path):
    timing = Timing(hl.Policy({}), 0.0, 0.0, 0.0, 3)
    measured = Measured((timing,), 5, 1.0, (), {"target": "cpu"})
    config = PlanConfig(model=folder, batch="2x64", cost=str(tmp_path / "p.json"), target="cpu")
    update = abstract_update(config)
    facts = {"jax": jax.__version__, **update.facts()}
    entry = Entry(hl.Policy({}), 0, 0.0, 0, 0, 0.0)
    made = bare_plan(
        (entry.policy,) * 3, [entry], cost="measured", measured=measured, fingerprint=facts
    )
    made.save(config.cost)
    assert plan_command.planning_cost(config, update) == measured
    other = dataclasses.replace(update, rows=4)
    with pytest.raises(ValueError, match=r"plan has 2, this run has 4\. Give --batch 2x64"):
        plan_command.planning_cost(config, other)
    dataclasses.replace(made, cost="modelled", measured=None).save(config.cost)
    with pytest.raises(ValueError, match="the seconds of that plan are modelled"):
        plan_command.planning_cost(config)


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
        (["--calibration", "none.json"], "--calibration none.json: no such file; hilore calibrate"),
        (["--cost", "none.json"], "--cost none.json: no such file; hilore plan --out"),
        (["--out", "no/such/plan.json"], "--out no/such/plan.json: the folder no/such does not"),
        (["--out", "."], "--out . is a folder"),
        (["--plot", "curve.txt"], "--plot curve.txt: expected a name ending in .png"),
        (["--model", "./none"], "no model './none': it is neither a folder"),
        (["--micro", "0"], "micro must be >= 1, found 0"),
        (["--cost", "guessed"], "--cost guessed: expected modelled, measured, or"),
        (["--cost", "measured", "--target", "cuda:h200"], "cuda:h200, which is only compiled for"),
        (["--cost", "measured", "--turns", "0"], "turns must be >= 1, found 0"),
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
