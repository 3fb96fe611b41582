"""What a file was made for is told in words, with the options that agree with it."""

import dataclasses
import re
from typing import Any

import jax
import pytest

import hilore_jax as hl
from hilore_jax import cli
from hilore_jax.planning.menu import Entry
from hilore_jax.training.accept_command import AcceptOptions
from hilore_jax.training.config import TrainConfig
from hilore_jax.training.facts import COMPLETION, MICRO, PROMPTS, ROWS, SEQ
from hilore_jax.training.plan_command import PlanConfig
from hilore_jax.training.recorded import taken
from hilore_jax.training.situation import check_situation, plan_settings, run_settings, update_facts
from plans import bare_plan

GC = hl.Policy({})
SIZES: dict[str, Any] = {"micro": 8, "rows": 4, "seq": 96, "completion": 32}


@pytest.fixture
def facts(tiny):
    found = update_facts(tiny(lora=True).config, **SIZES, beta=0.0)
    return {"jax": jax.__version__, "block": "1f", "model": "some/folder", **found}


@pytest.mark.parametrize(
    ("changes", "words", "options"),
    [
        ({"seq": 128}, "tokens of a sequence: the plan has 96, this run has 128",
         "--prompt-length 64 --completion-length 32"),
        ({"rows": 8, "micro": 4}, "sequences of a microbatch: the plan has 4, this run has 8",
         "--micro-rows 4 --prompts and --group of 32 rows in all"),
        ({"beta": 0.1}, "beta: the plan has 0, this run has 0.1", "--beta 0.0"),
    ],
)  # fmt: skip
def test_differences_are_named_with_their_options(tiny, facts, changes, words, options):
    shape = tiny(lora=True).config
    found = update_facts(shape, **{**SIZES, "beta": 0.0, **changes})
    shapes = {"block": "2e", "update arguments": "float32[3]"}
    with pytest.raises(ValueError, match="was made for another situation") as caught:
        check_situation({**facts, "update arguments": "float32[2]"}, {**found, **shapes}, "plan")
    message = str(caught.value)
    assert words in message and f"Give {options}, or make another plan." in message
    assert "2e" not in message and "float32" not in message


def test_model_adapters_and_dtype_are_named(tiny, facts):
    shape = dataclasses.replace(tiny(lora=False).config, d_ff=999, dtype="bfloat16")
    with pytest.raises(ValueError, match=r"LoRA rank: the plan has 2, this run has 0") as caught:
        check_situation(facts, update_facts(shape, **SIZES, beta=0.0), "plan")
    message = str(caught.value)
    assert (
        "model's shape: the plan has width of the MLP" in message
        and "has width of the MLP 999" in message
    )
    assert "dtype: the plan has float32, this run has bfloat16" in message
    assert "--model some/folder --lora-rank 2" in message and "--dtype float32" in message


def test_only_whether_there_is_a_reference_counts(facts):
    with_reference = {**facts, "beta": "0.001"}
    check_situation(with_reference, {**facts, "beta": "0.1"}, "plan")
    with pytest.raises(ValueError, match=r"beta: .* has 0\.001, this run has 0"):
        check_situation(with_reference, facts, "plan")


def test_hashes_and_other_versions_where_nothing_else_differs(facts):
    with pytest.raises(ValueError, match=r"block: the plan has 1f, this run has 2e \(hashes"):
        check_situation(facts, {**facts, "block": "2e"}, "plan")
    with pytest.raises(ValueError, match=r"jax: the plan has .*, this run has 0\.1\. Give the mod"):
        check_situation(facts, {**facts, "jax": "0.1", "block": "2e"}, "plan")


def test_settings_of_each_command(facts):
    assert run_settings(facts, group=8) == {
        "model": "some/folder",
        "lora_rank": 2,
        "lora_alpha": 32.0,
        "dtype": "float32",
        "beta": 0.0,
        "micro_rows": 4,
        "completion_length": 32,
        "prompt_length": 64,
        "prompts": 4,
    }
    assert "prompts" not in run_settings(facts, group=5)
    assert plan_settings(facts) == {
        "model": "some/folder",
        "lora_rank": 2,
        "dtype": "float32",
        "beta": 0.0,
        "batch": "4x96",
        "completion": 32,
        "micro": 8,
    }
    assert run_settings({"jax": "0.1"}) == plan_settings({}) == {}


def test_commands_take_from_their_file_what_is_not_given(facts, tmp_path, capsys):
    made = bare_plan([GC], [Entry(GC, 0, 0.0, 0, 0, 0.0)], fingerprint=facts)
    made.save(tmp_path / "plan.json")
    hl.Ladder((1.0, float("inf")), (made, made)).save(tmp_path / "ladder.json")
    hl.Calibration((), 1.0, 1.0, (0.5,), facts, 1, 1.0, 1, {}).save(tmp_path / "calibration.json")
    parse = cli._parse_with_file
    plan, ladder = str(tmp_path / "plan.json"), str(tmp_path / "ladder.json")

    given = ["--plan", plan, "--lora", "7", "--group", "16"]
    found = parse(TrainConfig, "train", given)
    assert (found.lora_rank, found.group, found.prompts, found.prompt_length) == (7, 16, 2, 64)
    assert (found.model, found.micro_rows, found.plan) == ("some/folder", 4, plan)
    said = capsys.readouterr().err
    assert f"taken from {plan}: " in said and "--prompts 2" in said and "lora-rank" not in said

    assert parse(TrainConfig, "train", ["--ladder", ladder]).micro_rows == 4
    assert parse(AcceptOptions, "accept", [plan]).lora_rank == 2
    for command in (["train", "--plan", plan], ["train", "--ladder", ladder], ["accept", plan]):
        assert cli.main([*command, "--group", "0", "--micro-rows", "0"]) == 2
        said = capsys.readouterr().err
        assert "group must be >= 2" in said and "micro_rows must be >= 1, found 0" in said
    from_calibration = ["--calibration", str(tmp_path / "calibration.json"), "--ladder", "new.json"]
    planned = parse(PlanConfig, "plan", [*from_calibration, "--micro", "2"])
    assert (planned.batch, planned.completion, planned.micro) == ("4x96", 32, 2)
    assert parse(TrainConfig, "train", []) == TrainConfig()


def test_a_file_without_facts_says_nothing(tmp_path):
    path = str(tmp_path / "plan.json")
    bare_plan([GC], [Entry(GC, 0, 0.0, 0, 0, 0.0)]).save(path)
    assert taken(TrainConfig(plan=path)) == (path, {})
    with pytest.raises(FileNotFoundError, match="--plan none: no such file"):
        taken(TrainConfig(plan="none"))


DAMAGED = {
    "LoRA rank": ("many", "-1", "1" * 5000, "2.0", ""),
    "LoGRA rank": ("?", "-8"),
    "LoRA alpha": ("nan", "0", "?"),
    "beta": ("?", "-0.1", "inf"),
    "dtype": ("float3",),
    "parameters without sketches": ("melted",),
    **dict.fromkeys((ROWS, SEQ, COMPLETION, MICRO), ("0", "-4", "1.5", "9" * 40)),
    PROMPTS: ("-1", "\u00b2", "some"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_fact_is_named_by_every_command_that_takes_the_file(facts, tmp_path, name):
    paths = {kind: str(tmp_path / f"{kind}.json") for kind in ("plan", "ladder", "calibration")}
    for value in DAMAGED[name]:
        wrong = {**facts, name: value}
        made = bare_plan([GC], [Entry(GC, 0, 0.0, 0, 0, 0.0)], fingerprint=wrong)
        made.save(paths["plan"])
        hl.Ladder((1.0, float("inf")), (made, made)).save(paths["ladder"])
        fits = hl.Calibration((), 1.0, 1.0, (0.5,), wrong, 1, 1.0, 1, {})
        fits.save(paths["calibration"])
        for kind, config in {
            "plan": TrainConfig(plan=paths["plan"]),
            "ladder": AcceptOptions(plan=paths["ladder"]),
            "calibration": PlanConfig(calibration=paths["calibration"]),
        }.items():
            said = f"is a damaged {kind} file: fingerprint.{name} must be .* again"
            with pytest.raises(ValueError, match=f"^{re.escape(paths[kind])} {said}"):
                taken(config)
        with pytest.raises(ValueError, match=f"the plan is damaged: fingerprint.{name} must be"):
            check_situation(wrong, facts, "plan")


def test_a_damaged_file_and_wrong_numbers_come_in_one_message(tmp_path, capsys):
    path = tmp_path / "plan.json"
    path.write_text('{"policies": [], "menu": [], "gc": {}, "schema": 5}')
    for command, option in (("train", "--plan"), ("accept", "--plan")):
        assert cli.main([command, option, str(path), "--group", "0", "--prompts", "-1"]) == 2
        said = capsys.readouterr().err
        assert "3 faults" in said and "plan.json is a damaged plan file: the field" in said
        assert "group must be >= 2" in said and "prompts must be >= 1, found -1" in said
