"""Leave-one-out by name: a name goes only where the risk of what is left is known."""

import functools
import math

import pytest

import hilore_jax as hl
from blocks import inputs, mlp, params
from hilore_jax import tracing
from hilore_jax.planning.frontier import distortion
from hilore_jax.planning.leave_names import BlockView, without_idle_names
from hilore_jax.planning.menu import Entry
from plans import bare_plan

INT8 = hl.Compress("int8", tile=None)
UP, BOTH = hl.Policy({"up": INT8}), hl.Policy({"up": INT8, "gate": INT8})
# `act` is stored: recomputed from a decoded `up` it would have an error of its own.
KEPT = hl.Policy({"up": INT8, "act": hl.Store()})
NORM = hl.Policy({"up": INT8, "norm": hl.Store()})
TRACED = tracing.trace(mlp, params(), inputs())
DISTORTION = functools.partial(distortion, traced=TRACED)


def as_fast(policy):
    """Nothing pays but `up`, without which backward is slower."""
    return Entry(policy, 4, 1.0 if "up" in policy else 9.0, 0, 0, math.nan)


VIEW = BlockView(as_fast, DISTORTION)


def plan(policy, risks=None, also=(), budget=0.015, **changes):
    """Two blocks of one policy; of the entries `also` has, the risks are calibrated."""
    menu = [Entry(p, 8, 1.0, 0, 0, 0.004) for p in (policy, *also)]
    calibrated = {} if risks is None else {"block_risks": risks, "exposure": 0.5}
    return bare_plan([policy] * 2, menu, risk_budget=budget, **calibrated, **changes)


def test_what_the_names_do_to_the_gradient():
    assert DISTORTION(KEPT) != DISTORTION(UP) == DISTORTION(NORM)  # witness


@pytest.mark.parametrize("risks", [None, ((0.004,), (0.002,))])
def test_a_name_beside_a_decoded_one_stays_where_its_risk_is_not_known(risks):
    before = plan(KEPT, risks)
    assert without_idle_names(before, VIEW) == (before, ())
    before = plan(BOTH, risks)  # fewer decoded names are another distortion too
    assert without_idle_names(before, VIEW) == (before, ())


def test_a_default_risk_in_the_menu_is_not_a_calibrated_one():
    before = plan(KEPT, also=(UP,))
    assert without_idle_names(before, VIEW) == (before, ())


def test_a_name_that_changes_nothing_goes_with_the_risks_as_they_are():
    made, removed = without_idle_names(plan(NORM, ((0.004,), (0.002,))), VIEW)
    assert made.policies == (UP, UP) and removed == (f"norm of [{NORM}]",)
    assert made.block_risks == ((0.004, 0.004), (0.002, 0.002))
    assert [entry.risk for entry in made.entries] == [0.004, 0.002]
    assert made.menu[-1] == Entry(UP, 4, 1.0, 0, 0, 0.004)
    made, _ = without_idle_names(plan(NORM), VIEW)  # by the table, for any block
    assert made.policies == (UP, UP) and made.block_risks is None
    assert [entry.risk for entry in made.entries] == [0.004, 0.004]


@pytest.mark.parametrize("measured", [UP, NORM])
def test_a_calibrated_entry_of_the_same_distortion_gives_its_own_risks(measured):
    made, removed = without_idle_names(plan(KEPT, ((1e-3, 9e-3), (2e-3, 8e-3)), (measured,)), VIEW)
    assert made.policies == (UP, UP) and removed == (f"act of [{KEPT}]",)
    assert [entry.risk for entry in made.entries] == [9e-3, 8e-3]
    assert made.risk == pytest.approx(math.hypot(9e-3, 8e-3))


@pytest.mark.parametrize("risk", [0.02, math.inf])
def test_no_name_goes_whose_absence_takes_the_plan_over_its_risk(risk):
    before = plan(KEPT, ((1e-3, risk), (2e-3, 8e-3)), (UP,))
    assert without_idle_names(before, VIEW) == (before, ())
    within = plan(KEPT, ((1e-3, 0.02), (2e-3, 8e-3)), (UP,), budget=0.03)
    assert without_idle_names(within, VIEW)[0].policies == (UP, UP)
    linear = plan(KEPT, ((1e-3, 0.01), (2e-3, 8e-3)), (UP,), paper=True)
    assert without_idle_names(linear, VIEW)[1] == ()  # 0.018 > 0.015 > 0.0128


def test_what_compresses_nothing_has_no_risk():
    idle = BlockView(lambda p: Entry(p, 0, 1.0, 0, 0, 0.0), DISTORTION)
    made, removed = without_idle_names(plan(KEPT, ((4e-3,), (2e-3,))), idle)
    act = hl.Policy({"act": hl.Store()})
    assert made.policies == (act, act) and removed == (f"up of [{KEPT}]",)
    assert made.risk == 0 and made.block_risks == ((4e-3, 0.0), (2e-3, 0.0))


@pytest.mark.parametrize("speed", [0.1, 10.0])
def test_both_seconds_are_by_the_same_measurement(speed):
    """The target's speed is measured at each start: it says nothing of a name."""
    idle = BlockView(lambda p: Entry(p, 4, speed * as_fast(p).seconds, 0, 0, 0.0), DISTORTION)
    made, _ = without_idle_names(plan(NORM), idle)
    assert made.policies == (UP, UP)
    # In the menu the seconds are as its others'.
    assert [entry.seconds for entry in made.menu] == [1.0, 1.0]
    pays = BlockView(lambda p: Entry(p, 4, speed / (1 + len(p.actions)), 0, 0, 0.0), DISTORTION)
    assert without_idle_names(plan(NORM), pays)[1] == ()
