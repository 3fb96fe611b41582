"""Arguments of wrong kinds: refused by name, with the remedy, before anything is traced."""

import dataclasses
import functools
import inspect
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hilore_jax as hl
from blocks import mlp, params
from hilore_jax.planning import expect, request
from hilore_jax.planning.budget import parse_bytes
from hilore_jax.planning.measure import Measurement, parse_cost
from hilore_jax.planning.options import _checked_risk
from hilore_jax.planning.profile import profile_plan
from hilore_jax.planning.target import parse_target

# As a user's process has them: under the suite's type checker, that would speak first.
plan, plan_ladder = inspect.unwrap(hl.plan), inspect.unwrap(hl.plan_ladder)
calibrate, profile = inspect.unwrap(hl.calibrate), inspect.unwrap(profile_plan)

N = 3
ONE, X = params(), jnp.ones((2, 5, 8)) / 3
STACK = jax.tree.map(lambda w: jnp.stack([w] * N), ONE)
INT8 = hl.Compress("int8")
UP = hl.Policy({"up": INT8})


def never(*args, **options):
    raise AssertionError("traced")


def update(policies, stack, x):
    never()


def risky(name, compress):
    return never()


BLOCKS = hl.Blocks(never, (ONE, X), N)
CALIBRATION = hl.Calibration((), 1.0, 1.0, (0.5,), {}, 1, 1.0, 1, {})
# argument -> a wrong value, and what the error says
PLAN = {
    "update is no function": (
        "update",
        (1, 2),
        r"update=\(1, 2\)\): found a tuple, expected a func",
    ),
    "update is a policy": ("update", UP, r"update=Policy.*found a Policy, expected a function"),
    "args is a list": ("args", [STACK, X], r"args=.*found a list, expected the tuple"),
    "args is an array": ("args", X, r"args=float32\[2, 5, 8\]\): found an? .*expected the tuple"),
    "args make a list": ("args", lambda policies: [X], r"what hl.plan\(args\) makes.*found a list"),
    "args hold text": ("args", (STACK, "fast"), r"args\[1\]='fast'\): found a str, .*functools"),
    "args are too many": ("args", (STACK, X, X), r"update\(policies, stack, x\) cannot be called"),
    "blocks is text": ("blocks", "mlp", r"blocks='mlp'\): found a str, expected an hl.Blocks\("),
    "blocks is the function": ("blocks", mlp, r"blocks=.*found a function, expected an hl.Blocks"),
    "block has a policy": (
        "blocks",
        hl.Blocks(hl.remat(UP)(mlp), (ONE, X), N),
        r"mlp is decorated with hl.remat\(up=int8.*undecorated block",
    ),
    "budget is text": ("budget", "46GiB", r"budget='46GiB'\): found a str, expected an hl.Budget"),
    "target is a number": ("target", 3, r"target=3\): found an int, expected a name"),
    "donate is a bool": ("donate", True, r"donate=True\): found a bool, expected a tuple of pos"),
    "donate is a number": ("donate", 0, r"donate=0\): found an int, expected a tuple"),
    "donate holds a bool": ("donate", (True,), r"donate=\(True,\)\): found a tuple, expected"),
    "donate is out of range": ("donate", (2,), r"donate=\(2,\)\): expected .*among 2 arguments"),
    "donate is given twice": ("donate", (0, -2), r"donate=\(0, -2\)\): expected .*2 arguments"),
    "codecs hold text": (
        "codecs",
        ("int9",),
        r"codecs\[0\]='int9'\): found a str, expected an hl.C",
    ),
    "codecs is text": ("codecs", "int8", r"codecs='int8'\): found a str, expected a sequence"),
    "codecs is one": ("codecs", INT8, r"codecs=Compress.*found a Compress, expected a sequence"),
    "codecs hold the class": ("codecs", (hl.Compress,), r"codecs\[0\].*the class Compress itself"),
    "risks is a number": (
        "risks",
        0.01,
        r"risks=0.01\): found a float, expected a function of a n",
    ),
    "risks is nothing": ("risks", None, r"risks=None\): found None, expected a function of a name"),
    "risks is a table": ("risks", {"up": 0.1}, r"risks=.*found a dict, expected a function of a n"),
    "offload is text": ("offload", "yes", r"offload='yes'\): found a str, expected True or False"),
    "calibration is a path": ("calibration", "c.json", r"calibration='c.json'.*Calibration.load"),
    "exposure is text": ("exposure", "low", r"exposure='low'\): found a str, expected a number"),
    "exposure is alone": ("exposure", 0.5, r"exposure=0.5\) needs calibration=\.\.\."),
    "progress is a number": ("progress", 1, r"progress=1\): found an int, expected True, False or"),
    "cost is unknown": ("cost", "guessed", r"cost='guessed': expected \"modelled\""),
}


@pytest.fixture(autouse=True)
def nothing_runs(monkeypatch):
    for name in ("compiled_memory", "block_menu", "fingerprint", "measure"):
        monkeypatch.setattr(f"hilore_jax.planning.solve.{name}", never)
    monkeypatch.setattr("hilore_jax.planning.calibrate._Probe", never)


@pytest.mark.parametrize("case", PLAN)
def test_plan_says_what_is_wrong(case):
    name, value, message = PLAN[case]
    asked: dict[str, Any] = {"update": update, "args": (STACK, X), "blocks": BLOCKS}
    asked |= {"budget": hl.Budget("2x gc"), "target": "cpu", "risks": risky, name: value}
    with pytest.raises((TypeError, ValueError), match=message):
        plan(asked.pop("update"), asked.pop("args"), **asked)


def test_what_is_right_goes_through_to_the_block():
    with pytest.raises(AssertionError, match="traced"):
        plan(update, (STACK, X), blocks=BLOCKS, budget=hl.Budget("2x gc"), target="cpu")


def untyped(kind):
    """Makes one of a kind as a user's process does."""

    def make(*args, **options):
        made = object.__new__(kind)
        inspect.unwrap(kind.__init__)(made, *args, **options)

    return make


blocks, budget, measurement = map(untyped, (hl.Blocks, hl.Budget, Measurement))
DATACLASSES = {
    "a block's name": (lambda: blocks("mlp", (X,), 1), r"fn='mlp'\): found a str, expected a f"),
    "a block's policy": (
        lambda: blocks(UP, (X,), 1),
        r"fn=Policy.*found a Policy, expected a f",
    ),
    "a block's class": (
        lambda: blocks(dict, (X,), 1),
        r"fn=dict\): found the class dict itself",
    ),
    "one argument": (lambda: blocks(mlp, X, 1), r"args=float32\[2, 5, 8\]\): found an? "),
    "text among them": (lambda: blocks(mlp, (X, "a"), 1), r"args\[1\]='a'\): found a str"),
    "a count in text": (
        lambda: blocks(mlp, (X,), "3"),
        r"count='3'\): found a str, expected a w",
    ),
    "a real count": (
        lambda: blocks(mlp, (X,), 3.0),
        r"count=3.0\): found a float, expected a w",
    ),
    "no block": (lambda: blocks(mlp, (X,), 0), r"count=0\): expected a whole number, 1 or more"),
    "argnums in text": (
        lambda: blocks(mlp, (X,), 1, ("x",)),
        r"argnums=\('x',\)\): expected a t",
    ),
    "argnums as bools": (
        lambda: blocks(mlp, (X,), 1, (False,)),
        r"argnums=\(False,\)\): expect",
    ),
    "risk in text": (
        lambda: budget("1GiB", "0.1"),
        r"risk='0.1'\): found a str, expected a rel",
    ),
    "risk none": (lambda: budget("1GiB", None), r"risk=None\): found None, expected a relative"),
    "risk as a bool": (
        lambda: budget("1GiB", True),
        r"risk=True\): found a bool, expected a rel",
    ),
    "baseline's name": (lambda: budget("2x gc", baseline="gc"), r"baseline='gc'\): found a str"),
    "memory of nothing": (
        lambda: inspect.unwrap(parse_bytes)(None),
        "memory budget None is not a size",
    ),
    "memory as a list": (
        lambda: inspect.unwrap(parse_bytes)([1]),
        r"memory budget \[1\] is not a size",
    ),
    "turns in text": (
        lambda: measurement(turns="5"),
        r"turns='5'\): found a str, expected a whole",
    ),
    "turns as a bool": (
        lambda: measurement(turns=True),
        r"turns=True\): found a bool, expected a w",
    ),
    "half of most": (lambda: measurement(most=0.5), r"most=0.5\): found a float, expected a whole"),
    "no microbatch": (lambda: measurement(microbatches=0), r"microbatches=0\): expected a whole n"),
    "timer's name": (lambda: measurement(timer="clock"), r"timer='clock'\): found a str, expected"),
    "a cost of 3": (lambda: inspect.unwrap(parse_cost)(3), r"cost=3: found an int, expected \"mod"),
    "a target of 3": (lambda: inspect.unwrap(parse_target)(3), r"target=3: found an int, expected"),
}


@pytest.mark.parametrize("case", DATACLASSES)
def test_its_parts_say_what_is_wrong(case):
    make, message = DATACLASSES[case]
    with pytest.raises((TypeError, ValueError), match=message):
        make()


@pytest.mark.parametrize("risk", [None, "0.1", [0.1], True, {"up": 1}])
def test_a_risk_that_is_no_number_is_named(risk):
    with pytest.raises(
        TypeError, match=r"the risk of up=int8.* is .*: found .*, expected a number"
    ):
        _checked_risk(lambda name, compress: risk, "up", INT8)


@pytest.mark.parametrize("risk", [1, np.float32(0.5), jnp.array(0.5), math.inf])
def test_a_risk_may_be_any_number(risk):
    assert _checked_risk(lambda name, compress: risk, "up", INT8) == risk


LADDER = {
    "exposures is a number": ("exposures", 0.5, r"exposures=0.5\): found a float, expected a seq"),
    "exposures is text": ("exposures", "0.5", r"exposures='0.5'\): found a str, expected a seq"),
    "exposures hold text": ("exposures", (1.0, "a"), r"exposures\[1\]='a'\): found a str, expec"),
    "exposures is empty": ("exposures", (), "none of 0 exposures is above 0"),
    "share is text": ("share", "1/4", r"share='1/4'\): found a str, expected tokens / update tok"),
    "most is real": ("most", 2.5, r"most=2.5\): found a float, expected a whole number"),
    "most is none": ("most", 0, r"most=0\): expected a whole number, 1 or more"),
    "plan_at is a plan": (
        "plan_at",
        3,
        r"plan_at=3\): found an int, expected a function of an exp",
    ),
    "plan_at makes none": (
        "plan_at",
        lambda exposure: None,
        "at exposure 1, : found None, expected",
    ),
    "exposure is one": ("exposure", 0.5, "no argument exposure: .*It plans at each of exposures="),
    "an option is unknown": ("dtype", "int8", "no argument dtype: .*codecs, cost, donate"),
    "blocks is text": ("blocks", "mlp", r"hl.plan_ladder\(blocks='mlp'\): found a str"),
    "budget is a number": ("budget", 3, r"hl.plan_ladder\(budget=3\): found an int"),
    "target is a number": ("target", 3, r"hl.plan_ladder\(target=3\): found an int"),
    "calibration is a path": ("calibration", "c.json", r"calibration='c.json'.*Calibration.load"),
}


@pytest.mark.parametrize("case", LADDER)
def test_ladders_say_what_is_wrong(case):
    name, value, message = LADDER[case]
    asked: dict[str, Any] = {"blocks": BLOCKS, "budget": hl.Budget("2x gc"), "target": "cpu"}
    asked |= {"exposures": (1.0,), "calibration": CALIBRATION, name: value}
    with pytest.raises((TypeError, ValueError), match=message):
        plan_ladder(update, (STACK, X), **asked)


def test_a_ladder_hands_on_what_it_does_not_take_itself():
    own, plans = (inspect.signature(fn).parameters for fn in (plan_ladder, plan))
    assert sorted({*plans} - {*own} - {"exposure"}) == [*request.PLAN_OPTIONS]


CALIBRATE = {
    "loss is a policy": ("loss", UP, r"loss=Policy.*found a Policy, expected a function loss\("),
    "blocks is text": (
        "blocks",
        "mlp",
        r"hl.calibrate\(blocks='mlp'\): found a str, expected an hl",
    ),
    "policies is one": ("policies", UP, r"policies=Policy.*found a Policy, .*\[policy\]"),
    "policies hold text": ("policies", ["up=int8"], r"policies\[0\]='up=int8'\): .*parse_policy"),
    "microbatches is one": ("microbatches", {"x": X}, r"found a dict, .*one alone: \[microbatch\]"),
    "microbatches is a number": (
        "microbatches",
        4,
        r"microbatches=4\): found an int, expected a s",
    ),
    "microbatches hold text": ("microbatches", [X, "a"], r"microbatches\[1\]='a'\): found a str"),
    "microbatches are shapes": (
        "microbatches",
        [jax.ShapeDtypeStruct((2,), "float32")] * 2,
        r"2 of its 2 arguments are shapes .*first microbatches\[0\]: float32\[2\]. Pass arrays",
    ),
    "microbatches differ": (
        "microbatches",
        [X, X[:1]],
        r"number 1 is float32\[1,5,8\].*number 0 is float32\[2,5,8\].*Pad them",
    ),
    "microbatches have other parts": (
        "microbatches",
        [{"x": X}, {"y": X}],
        r"number 1 is float32\[2,5,8\] in PyTreeDef\(\{'y'",
    ),
    "params are shapes": (
        "params",
        jax.eval_shape(params),
        r"3 of its 3 arguments are shapes .*params\['down'\]",
    ),
    "args is an array": ("args", X, r"args=float32\[2, 5, 8\]\): found an? "),
    "args hold text": ("args", ("a",), r"args\[0\]='a'\): found a str, expected arrays"),
    "count is text": (
        "count",
        "2",
        r"count='2'\): found a str, expected a whole number, 1 or more",
    ),
    "count is nothing": ("count", 0, r"count=0\): expected a whole number, 1 or more"),
    "passes is real": ("passes", 8.0, r"passes=8.0\): found a float, expected a whole number"),
    "per_update is a bool": ("per_update", True, r"per_update=True\): found a bool, expected a w"),
    "seed is a key": ("seed", jax.random.key(0), r"seed=key<fry>\[\]\): found an? .*whole number"),
    "resume is a bool": ("resume", True, r"resume=True\): found a bool, expected the path"),
    "risk is unknown": ("risk", "cubed", r"risk='cubed'\): expected one of"),
    "progress is text": ("progress", "yes", r"progress='yes'\): found a str, expected True"),
}


@pytest.mark.parametrize("case", CALIBRATE)
def test_calibrate_says_what_is_wrong(case):
    name, value, message = CALIBRATE[case]
    asked: dict[str, Any] = {"loss": never, "params": ONE, "microbatches": [X, X], name: value}
    options = {"blocks": BLOCKS, "policies": [UP], "count": 2, "passes": 9, **asked}
    given = [options.pop(name) for name in ("loss", "params", "microbatches")]
    with pytest.raises((TypeError, ValueError), match=message):
        calibrate(*given, **options)


GC = (hl.Policy({}),) * N
PROFILE = {
    "update is a number": ("update", 3, r"update=3\): found an int, expected a function"),
    "plans is a list": ("plans", [GC, GC], r"plans=.*found a list, expected two or more"),
    "plans is one": ("plans", {"gc": GC}, r"found \['gc'\], expected two or more"),
    "a plan is a policy": (
        "plans",
        {"gc": GC, "up": UP},
        r"plans\['up'\]=Policy.*\(policy,\) \* n",
    ),
    "a plan is text": (
        "plans",
        {"gc": GC, "up": "up=int8"},
        r"plans\['up'\]='up=int8'\): found a s",
    ),
    "a plan holds text": (
        "plans",
        {"gc": GC, "up": ["a"] * N},
        r"plans\['up'\]\[0\]='a'\): found a",
    ),
    "counts differ": (
        "plans",
        {"gc": GC, "up": (UP,)},
        r"of one number of blocks, found \{'gc': 3",
    ),
    "repeats is nothing": ("repeats", 0, r"repeats=0\): expected a whole number, 1 or more"),
    "repeats is text": ("repeats", "5", r"repeats='5'\): found a str, expected a whole number"),
    "microbatches is real": ("microbatches", 1.0, r"microbatches=1.0\): found a float, expected a"),
    "donate is a bool": ("donate", True, r"donate=True\): found a bool, expected a tuple"),
    "args is a list": ("args", [STACK, X], r"profile_plan\(args=.*found a list, expected the tu"),
    "args are too few": ("args", (STACK,), r"\(policies, stack, x\) cannot be called with the pol"),
    "args are shapes": (
        "args",
        (STACK, jax.ShapeDtypeStruct(X.shape, X.dtype)),
        r"1 of its 4 arguments are shapes without values, first args\[1\]: float32\[2, 5, 8\]",
    ),
    "args make shapes": (
        "args",
        lambda policies: jax.eval_shape(lambda: (STACK, X)),
        r"4 of its 4 arguments are shapes without values, first args\[0\]\['down'\]",
    ),
}


@pytest.mark.parametrize("case", PROFILE)
def test_profiles_say_what_is_wrong_before_anything_is_traced(case):
    name, value, message = PROFILE[case]
    asked: dict[str, Any] = {
        "update": update,
        "args": (STACK, X),
        "plans": {"gc": GC, "up": (UP,) * N},
    }
    asked[name] = value
    with pytest.raises((TypeError, ValueError), match=message):
        profile(asked.pop("update"), asked.pop("args"), asked.pop("plans"), **asked)


def test_an_update_that_is_a_partial_or_takes_any_arguments_is_not_counted_wrong():
    def anything(*args):
        return args

    for fn in (anything, functools.partial(update), jnp.sin.__call__):
        request.check_arguments("hl.plan", fn, GC, (STACK, X), (0, 1))


def test_values_are_shown_in_a_few_words():
    assert expect.shown("x" * 99) == repr("x" * 99)[:28] + "..." + repr("x" * 99)[-29:]
    assert len(expect.shown(dataclasses.make_dataclass("A", ["x"])("y" * 200))) <= 80
    with pytest.raises(TypeError, match=r"^a is 3: found an int, expected b\.$"):
        expect.refuse("a is ...", 3, "b")
