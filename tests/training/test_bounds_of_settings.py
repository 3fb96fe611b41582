"""Every number of every command's settings has bounds, which one message says of all at once."""

import copy
import dataclasses
import math
import re

import pytest

from hilore_jax.planning.bounds import REAL, Whole, number_faults
from hilore_jax.report.bench import BenchConfig
from hilore_jax.report.exposure_command import ExposureConfig
from hilore_jax.training import logra_config
from hilore_jax.training.accept_command import AcceptOptions
from hilore_jax.training.calibrate_command import CalibrateConfig
from hilore_jax.training.config import TrainConfig, check, faults
from hilore_jax.training.explain_command import ExplainConfig
from hilore_jax.training.plan_config import PlanConfig, plan_faults

LOGRA = logra_config._BOUNDS
CONFIGS = {
    "train": TrainConfig(),
    "calibrate": CalibrateConfig(),
    "accept": AcceptOptions(plan=""),
    "plan": PlanConfig(),
    "explain": ExplainConfig(),
    "bench": BenchConfig(),
    "exposure": ExposureConfig(run_dir=""),
}
NEVER = (-1, -0.5, True, "3", math.nan, -math.inf, 10**400, [], 1e300)


def changed(config, **values):
    """A copy with values that a type checker would not let in; a user has none."""
    found = copy.copy(config)
    for name, value in values.items():
        object.__setattr__(found, name, value)
    return found


@pytest.mark.parametrize("command", CONFIGS)
def test_every_number_is_bounded(command):
    config = CONFIGS[command]
    numbers = {
        field.name
        for field in dataclasses.fields(config)
        if re.search(r"\b(int|float|Rank|ChosenRank)\b", str(field.type))
    }
    bounds = {**type(config).BOUNDS, **{n: LOGRA[n] for n in LOGRA if n in numbers}}
    assert bounds.keys() == numbers
    assert number_faults(config) == {}
    for name, bound in bounds.items():
        zero = (
            () if (bound.least == 0 if isinstance(bound, Whole) else not bound.positive) else (0,)
        )
        half = (0.5, bound.most + 1) if isinstance(bound, Whole) else (REAL * 2,)
        for wrong in (*NEVER, *zero, *half):
            (said,) = number_faults(changed(config, **{name: wrong}), bounds).values()
            assert said.startswith(f"{name} must be ") and "found " in said and len(said) < 200


@pytest.mark.parametrize("value", [0, -1, True, math.nan, 10**30, "many"])
def test_all_of_training_are_listed_together(value, tmp_path):
    names = ("group", "prompts", "micro_rows", "completion_length", "prompt_length")
    wrong = changed(CONFIGS["train"], run_dir=str(tmp_path), **dict.fromkeys(names, value))
    found = faults(wrong)
    assert [fault.partition(" ")[0] for fault in found] == [
        n for n in TrainConfig.BOUNDS if n in names
    ]
    with pytest.raises(ValueError, match=r"^5 faults in the settings:"):
        check(wrong)
    if isinstance(value, int):  # a type checker does not let others into the training's
        with pytest.raises(ValueError, match=r"^5 faults in the settings:"):
            changed(CONFIGS["calibrate"], **dict.fromkeys(names, value)).training()


def test_large_products_are_refused_without_going_through_them():
    most = 2**31 - 1
    (said,) = faults(TrainConfig(prompts=most, group=most))
    assert said.startswith(f"prompts x group = {most} x {most} = ") and "must be <= " in said
    (said,) = faults(TrainConfig(prompts=2**20, group=2**10, micro_rows=3))
    assert "found 3; legal values are [1, 2, 4, 8, " in said


def test_the_others_list_all_of_theirs_too():
    wrong = PlanConfig(
        micro=0, turns=-1, risk=math.nan, memory="1e999GiB", batch="0x9", baseline="?"
    )
    assert [fault.split()[0] for fault in plan_faults(wrong)] == [
        *("micro", "turns", "risk", "--baseline", "--batch", "memory"),
    ]
    assert plan_faults(PlanConfig(batch="2147483647x2147483647"))[0].startswith(
        "--batch 2147483647x"
    )
    (said,) = plan_faults(PlanConfig(ladder="l.json", risk=math.inf))
    assert said.startswith("risk must be finite for a ladder")
    with pytest.raises(
        ValueError, match=r"(?s)^3 faults.*updates must .*first must .*measure must"
    ):
        AcceptOptions(plan="", updates=0, first=-1, measure=-1).training()
