"""Files of plans, ladders and calibrations: what is wrong with one is named, with the remedy."""

import copy
import dataclasses
import functools
import itertools
import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import hilore_jax as hl
from hilore_jax.planning import plan_file
from hilore_jax.planning.calibration import Measured as Fit
from hilore_jax.planning.fields import Field, checked_schema
from hilore_jax.planning.fits import Row
from hilore_jax.planning.measured import Measured, Timing
from hilore_jax.planning.measurements import Record, subject

N = 3
W, X = jnp.ones((N, 4, 4)) / 4, jnp.ones((64, 4))
WRONG = {"null": None, "text": "?", "nothing": [], "negative": -1, "half": 0.5, "true": True}
WRONG |= {"long": 10**400, "huge": 10**18}
OURS = (
    "is a damaged",
    "is not a",
    "schema",
    "made for another situation",
    "another model shape",
    "another calibration",
    "holds measurements of other",
    "holds measurements of another loss",
)


def block(w, x):
    return x + jnp.tanh(checkpoint_name(x @ w, "h"))


def update(policies, w, x):
    loss = lambda w: jnp.sum(hl.scan_blocks(block, w, x, policies))  # noqa: E731
    return w - jax.grad(loss)(w), {}


@functools.cache
def real():
    blocks = hl.Blocks(block, (W[0], X), N)
    return hl.plan(update, (W, X), blocks=blocks, budget=hl.Budget("4x gc"), target="cpu")


@functools.cache
def whole():
    """A plan with everything that one can have: calibrated, measured, accepted."""
    found, gc = real(), hl.Policy({})
    others = len(found.menu) - 1
    timings = (Timing(gc, 0.0, 0.0, 0.0, N), Timing(found.policies[0], -1e-3, -2e-3, 0.0, 1))
    return dataclasses.replace(
        found,
        baseline=found.gc.peak,
        block_risks=tuple((0.0, *[risk] * others) for risk in (0.001, 0.002, math.inf)),
        exposure=0.5,
        paper=True,
        measured=Measured(timings, 5, 0.25, (("h=int4", "too large"),), dict(found.fingerprint)),
        cost="measured",
        accepted=False,
        acceptance={
            "accepted": False,
            "reason": "its mean gradient error exceeds",
            "peak": found.memory.peak,
            "errors": (0.01, math.inf),
            "predicted": 0.01,
            "removed": ("h of [h=store]",),
            "error": math.inf,
            "limit": 0.015,
            "measured": 3,
        },
    )


def as_json(plan):
    """A plan's file, parsed; it is JSON as everybody reads it."""
    return json.loads(
        json.dumps(plan_file.plan_fields(plan)), parse_constant=lambda name: pytest.fail(name)
    )


def read(fields):
    file = Field(fields, "plan.json", "plan", "Plan again.")
    return plan_file.read_plan(*checked_schema(file, plan_file.FORMAT))


def places(value, path=()):
    """Every field of JSON values, containers included."""
    parts = value.items() if isinstance(value, dict) else enumerate(value)
    for key, part in parts:
        yield (*path, key)
        if isinstance(part, dict | list):
            yield from places(part, (*path, key))


def changed(fields, path, wrong):
    found = copy.deepcopy(fields)
    inner = functools.reduce(lambda value, key: value[key], path[:-1], found)
    inner[path[-1]] = wrong
    return found


def outcome(load):
    """What is loaded, and None; or None, and our error. Any other error is the test's."""
    try:
        return load(), None
    except ValueError as error:
        found = str(error)
    assert any(words in found for words in OURS), found
    return None, found


@pytest.mark.parametrize("make", [real, whole])
def test_what_is_saved_is_loaded(make, tmp_path):
    make().save(tmp_path / "plan.json")
    assert hl.Plan.load(tmp_path / "plan.json") == make() == read(as_json(make()))


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("make", [real, whole])
def test_any_wrong_field_is_named_or_means_what_it_says(make, wrong):
    fields = as_json(make())
    refused = 0
    for path in places(fields):
        damaged = changed(fields, path, wrong)
        found, error = outcome(lambda: read(damaged))  # noqa: B023
        assert error or as_json(found) == damaged, path
        assert not error or error.startswith(("plan.json ", "the plan was made for another")), path
        refused += error is not None
    assert refused > 20


@pytest.mark.parametrize("make", [real, whole])
def test_any_missing_or_unknown_field_is_named(make):
    fields = as_json(make())
    objects = [(), *(p for p in places(fields) if isinstance(_at(fields, p), dict))]
    for path in objects:
        if {*path} & {"fingerprint", "actions"}:  # whose names are their own
            continue
        in_policy = path[:1] == ("policies",) or "policy" in path  # which has defaults
        for name in () if in_policy else _at(fields, path):
            less = copy.deepcopy(fields)
            del _at(less, path)[name]
            with pytest.raises(ValueError, match=f"plan file: the field {name}.* is missing"):
                read(less)
        more = copy.deepcopy(fields)
        _at(more, path)["surprise"] = 1
        with pytest.raises(ValueError, match=r"damaged plan file: .*surprise"):
            read(more)


def _at(value, path):
    return functools.reduce(lambda value, key: value[key], path, value)


def edited(**changes):
    return lambda fields: fields | changes


CASES = {
    "schema null": (edited(schema=None), r"schema null, this hilore_jax reads 1, .*5: plan again"),
    "schema true": (edited(schema=True), r"schema true, this hilore_jax reads .*plan again"),
    "schema newer": (edited(schema=99), r"schema 99, this hilore_jax reads .*install a newer"),
    "schema older": (edited(schema=0), r"schema 0, this hilore_jax reads .*plan again"),
    "schema missing": (
        lambda f: {"menu": f["menu"]},
        "is not a plan file: the field schema is mis",
    ),
    "a list": (lambda f: [f], r"is not a plan file: expected an object, found \[\{"),
    "menu empty": (edited(menu=[]), r"menu is \[\], expected a list of 1 or more. Plan again"),
    "menu missing": (
        lambda f: {k: v for k, v in f.items() if k != "menu"},
        "field menu is missing",
    ),
    "menu in words": (edited(menu="gc"), 'menu is "gc", expected a list'),
    "policies empty": (edited(policies=[]), r"policies is \[\], expected a list of 1 or more"),
    "policies unknown": (
        lambda f: f | {"policies": [[N, {"schema": 1, "actions": {"other": "store"}}]]},
        "policies has 'other=store', which is not in the menu",
    ),
    "policies of another count": (
        lambda f: f | {"policies": [[N + 1, f["policies"][0][1]]], "block_risks": None},
        r"policies are for 4 blocks, but fingerprint\.blocks is 3",
    ),
    "no policies": (
        lambda f: f | {"policies": [[0, f["policies"][0][1]]]},
        r"policies\[0\]\[0\] is 0, expected a whole number, 1 or more",
    ),
    "an action unknown": (
        lambda f: f | {"policies": [[N, {"schema": 1, "actions": {"h": "forget"}}]]},
        r"policies\[0\]\[1\] is .*unknown action 'forget'",
    ),
    "block_risks short": (
        lambda f: f | {"block_risks": f["block_risks"][:-1]},
        "block_risks has 2 rows, expected one for each of 3 blocks",
    ),
    "block_risks narrow": (
        lambda f: f | {"block_risks": [row[:1] for row in f["block_risks"]]},
        r"block_risks\[0\] has 1 risks, expected one for each of the \d entries of the menu",
    ),
    "block_risks without exposure": (edited(exposure=None), "exposure is null, but block_risks"),
    "peak above the budget": (
        edited(budget=1000),
        r"memory has a peak of \d+ bytes .* of 1000. Pla",
    ),
    "bytes negative": (
        lambda f: f | {"memory": f["memory"] | {"aliased": -8}},
        r"memory\.aliased is -8, expected a whole number, 0 or more",
    ),
    "seconds not finite": (
        edited(bound_seconds=math.inf),
        "bound_seconds is Infinity, expected a f",
    ),
    "share of nothing": (
        edited(share=0),
        "share is 0, expected a finite number above 0 and of at",
    ),
    "cost unknown": (
        edited(cost="guessed"),
        'cost is "guessed", expected one of modelled, measured',
    ),
    "cost without times": (edited(measured=None), "measured is null, but cost is measured"),
    "times without cost": (edited(cost="modelled"), "measured is there, but cost is modelled"),
    "acceptance lost": (edited(acceptance=None), "acceptance is null, but accepted is False"),
    "fingerprint in numbers": (
        lambda f: f | {"fingerprint": f["fingerprint"] | {"blocks": 3}},
        r"fingerprint\.blocks is 3, expected a text",
    ),
    "flag in words": (edited(paper="no"), 'paper is "no", expected true or false'),
    "a field unknown": (edited(surprise=1), "the field surprise is unknown"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_damaged_plan_says_which_field_and_what_to_do(case, tmp_path):
    change, message = CASES[case]
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(change(as_json(whole()))))
    with pytest.raises(ValueError, match=message) as caught:
        hl.Plan.load(path)
    assert str(caught.value).startswith(str(path))


@pytest.mark.parametrize("part", [0, 1, 0.3, 0.9])
def test_a_file_that_was_cut_off_is_said_to_be(part, tmp_path):
    path = tmp_path / "plan.json"
    real().save(path)
    text = path.read_text()
    path.write_text(text[: int(part * len(text)) if part != 1 else -2])
    for kind in (hl.Plan, hl.Ladder, hl.Calibration):
        with pytest.raises(ValueError, match=r"plan\.json is not a .* file: it is no JSON, or was"):
            kind.load(path)


def test_bytes_that_are_no_text_and_files_that_are_not_there(tmp_path):
    (tmp_path / "plan.json").write_bytes(b"\xff\xfe{")
    with pytest.raises(ValueError, match="is not a plan file: it is no text"):
        hl.Plan.load(tmp_path / "plan.json")
    with pytest.raises(FileNotFoundError, match=r"other\.json"):
        hl.Plan.load(tmp_path / "other.json")


def test_each_kind_of_file_is_told_from_the_others(tmp_path):
    path, kinds = tmp_path / "file.json", {"plan": real(), "ladder": ladder()}
    for kind, made in (kinds | {"calibration": calibration()}).items():
        made.save(path)
        for other in {"Plan", "Ladder", "Calibration"} - {kind.capitalize()}:
            with pytest.raises(
                ValueError, match=f"is not a {other.lower()} file: it holds a {kind}"
            ):
                getattr(hl, other).load(path)


def test_older_files_lack_what_came_later():
    fields = as_json(real())
    for schema, lost in ((3, {"share"}), (2, {"share", "measured"})):
        older = {k: v for k, v in fields.items() if k not in lost} | {"schema": schema}
        assert read(older) == dataclasses.replace(real(), share=None)
    with pytest.raises(ValueError, match="the field measured is missing"):
        read(older | {"schema": 3})
    fields = as_json(whole())
    before = {name: value for name, value in fields["acceptance"].items() if name != "measured"}
    found = read(fields | {"acceptance": before, "schema": 4})
    assert found.acceptance == {**(whole().acceptance or {}), "measured": None}


# Ladders and calibrations


@functools.cache
def ladder():
    exact = dataclasses.replace(real(), policies=(hl.Policy({}),) * N, risk_budget=0.0)
    return hl.Ladder((1.0, math.inf), (real(), exact), 0.015, 0.5)


def test_a_damaged_ladder_says_which_field(tmp_path):
    path = tmp_path / "ladder.json"
    ladder().save(path)
    fields = json.loads(path.read_text())
    assert hl.Ladder.load(path) == ladder()
    for place, wrong in itertools.product(places(fields), WRONG.values()):
        if len(place) > 2:
            continue  # a plan's own
        path.write_text(json.dumps(damaged := changed(fields, place, wrong)))
        found, _ = outcome(lambda: hl.Ladder.load(path))
        if found is not None:
            found.save(path)
            assert json.loads(path.read_text()) == damaged, place
    for change, message in (
        ({"plans": []}, r"damaged ladder file: plans is \[\], expected a list of 1 or more. Plan"),
        ({"edges": []}, r"edges is \[\], expected a list of 1 or more"),
        ({"plans": [fields["plans"][0], {"menu": []}]}, r"field schema is missing in plans\[1\]"),
        ({"plans": [{}]}, r"it has none of the fields menu, trials in plans\[0\]"),
        ({"share": "half"}, 'share is "half", expected a finite number'),
        ({"extra": 1}, "the field extra is unknown"),
    ):
        path.write_text(json.dumps(fields | change))
        with pytest.raises(ValueError, match=message):
            hl.Ladder.load(path)
    fields["plans"][1]["menu"][0]["flops"] = None
    path.write_text(json.dumps(fields))
    with pytest.raises(
        ValueError, match=r"damaged ladder file: plans\[1\]\.menu\[0\]\.flops is nul"
    ):
        hl.Ladder.load(path)


def calibration():
    policy = hl.Policy({"h": hl.Compress("int8")})
    fits = Fit(policy, 0, 1.0, 0.1, 0.01, 2), Fit(policy, 1, 2.0, math.inf, 0.01, 1)
    versions, situation = {"jax": "1"}, {"blocks": "2"}
    figures = (3.0, 1.1, (0.5, 0.25), situation, 9, 1.5, 2, versions, "paper")
    return hl.Calibration(fits, *figures, ((0.1, 0.2),), (1.0, 0.9))


def test_a_damaged_calibration_says_which_field(tmp_path):
    path = tmp_path / "calibration.json"
    calibration().save(path)
    fields = json.loads(path.read_text())
    assert hl.Calibration.load(path) == calibration()
    for place, wrong in itertools.product(places(fields), WRONG.values()):
        path.write_text(json.dumps(damaged := changed(fields, place, wrong)))
        found, _ = outcome(lambda: hl.Calibration.load(path))
        if found is not None:
            found.save(path)
            again = json.loads(path.read_text())
            assert {**again, "policies": damaged["policies"]} == damaged, place
    for change, message in (
        ({"schema": None}, "calibration schema null, .*calibrate again"),
        ({"schema": 2}, "calibration schema 2, .*install a newer"),
        ({"exposures": []}, r"exposures is \[\], expected a list of 1 or more. Calibrate again"),
        ({"norm": 0}, "norm is 0, expected a finite number above 0"),
        ({"form": "cubed"}, 'form is "cubed", expected one of squared, paper'),
        ({"measured": [[9, 0, 1, 1, 1, 1]]}, r"measured\[0\]\[0\] is 9, expected the number of o"),
        ({"measured": [[0, 0]]}, r"measured\[0\] is \[0, 0\], expected \[policy, block"),
        ({"joint": [[1]]}, r"joint\[0\] is \[1\], expected \[predicted, measured\]"),
        ({"extra": 1}, "the field extra is unknown"),
    ):
        path.write_text(json.dumps(fields | change))
        with pytest.raises(ValueError, match=message):
            hl.Calibration.load(path)


def test_the_shipped_calibration_is_read():
    where = Path(__file__).parents[2] / "experiments" / "results" / "calibration_smollm2.json"
    assert hl.Calibration.load(where).measured


def test_damaged_measurements_of_a_calibration_are_named(tmp_path):
    path, micro = tmp_path / "part.json", {"x": np.arange(3.0), "tokens": np.arange(3)}
    about = subject("this", "traced", (), (), [micro, micro])
    record = Record(path, about, 0.0)
    record.norms["0"] = 1.0
    record.add(Row(0, (), 0.5, 0.0, 1.0, ()))
    record.add(Row(0, ((1, 2),), 0.5, math.inf, 1.0, ((0.1, math.nan),)))
    again = Record(path, about, 0.0)
    assert repr(again.rows) == repr(record.rows) and again.norms == record.norms
    fields = json.loads(path.read_text())
    for place, wrong in itertools.product(places(fields), WRONG.values()):
        path.write_text(json.dumps(changed(fields, place, wrong)))
        outcome(lambda: Record(path, about, 0.0))
    path.write_text(json.dumps(fields | {"identity": None}))
    with pytest.raises(ValueError, match="identity is null, expected"):
        Record(path, about, 0.0)
    path.write_text(json.dumps(fields)[:-9])
    with pytest.raises(ValueError, match=r"is not a measurements file: .*cut off.* remove it"):
        Record(path, about, 0.0)
