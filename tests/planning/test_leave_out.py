"""Leave-one-out by measured updates: what pays stays, what does not goes, one at a time."""

import dataclasses
import types

import jax
import pytest

import hilore_jax as hl
from hilore_jax.planning.accept import accept
from hilore_jax.planning.leave_out import without_idle_entries
from hilore_jax.planning.memory import Memory
from hilore_jax.planning.menu import Entry
from plans import bare_plan

GC = hl.Policy({})
UP, GATE, Q = (hl.Policy({name: hl.Store()}) for name in ("up", "gate", "q"))
MEMORY = Memory(10, 0, 0, 10, 0, 0)
MENU = tuple(Entry(p, 0, 1.0, 0, 0, 0.0) for p in (GC, UP, GATE, Q))
PLAN = bare_plan(
    (UP, UP, GATE, Q), MENU, risk_budget=0.0, budget=100, gc=MEMORY, memory=MEMORY, predicted=20
)


def profiler(saves, asked):
    """Updates that take 10 seconds, less what the kept policies save: of UP and GATE the larger."""

    def seconds(policies):
        kept = set(policies)
        shared = max((saves[p] for p in (UP, GATE) if p in kept), default=0.0)
        return 10 - shared - (saves[Q] if Q in kept else 0.0)

    def profile(plans):
        asked.append(list(plans.values()))
        first = seconds(next(iter(plans.values())))
        return {
            name: types.SimpleNamespace(
                to_first=types.SimpleNamespace(median=seconds(policies) / first)
            )
            for name, policies in plans.items()
        }

    return profile


def test_entries_go_one_at_a_time_while_the_update_is_no_slower():
    asked = []
    made, removed = without_idle_entries(PLAN, profiler({UP: 2.0, GATE: 2.0, Q: -1.0}, asked))
    # Q costs time and goes first. UP and GATE save the same together as alone: one of them stays.
    assert made.policies == (GC, GC, GATE, GC)
    assert [text.split(":")[0] for text in removed] == [
        "q=store of 1 block",
        "up=store of 2 blocks",
    ]
    assert "takes 0.889 of the time" in removed[0]
    assert asked[0] == [PLAN.policies, (GC, GC, GATE, Q), (UP, UP, GC, Q), (UP, UP, GATE, GC)]
    assert len(asked) == 3 and asked[2] == [made.policies, (GC,) * 4]


def test_what_pays_stays_and_a_menu_without_recomputation_is_left():
    saves = {UP: 2.0, GATE: 0.0, Q: 0.5}
    pays = dataclasses.replace(PLAN, policies=(UP, UP, Q, Q))
    assert without_idle_entries(pays, profiler(saves, [])) == (pays, ())
    without = dataclasses.replace(PLAN, menu=PLAN.menu[1:])
    assert without_idle_entries(without, profiler({UP: 0, GATE: 0, Q: 0}, []))[0] == without


def test_acceptance_leaves_out_what_measures_idle():
    gradients = lambda policies, x: ({"w": x}, [1.0])  # noqa: E731
    profile = profiler({UP: 2.0, GATE: 0.0, Q: 1.0}, [])
    own = lambda policies: Memory(5 if GC in policies else 10, 0, 0, 10, 0, 0)  # noqa: E731
    made = accept(PLAN, gradients, [jax.numpy.ones(2)], profile=profile, memory=own)
    assert made.policies == (UP, UP, GC, Q) and made.acceptance is not None
    assert made.accepted and made.acceptance["removed"][0].startswith("gate=store of 1 block")
    assert made.memory == own(made.policies) != PLAN.memory
    assert made.predicted == 20 and len(made.trials) == 1
    over = Memory(101, 0, 0, 0, 0, 0)
    high = accept(PLAN, gradients, [jax.numpy.ones(2)], profile=profile, memory=lambda p: over)
    assert not high.accepted and high.policies == PLAN.policies
    worse = lambda policies: over if GC in policies else MEMORY  # noqa: E731
    stays = accept(PLAN, gradients, [jax.numpy.ones(2)], profile=profile, memory=worse)
    assert stays.accepted and stays.policies == PLAN.policies
    assert stays.acceptance is not None and stays.acceptance["removed"] == ()
    with pytest.raises(ValueError, match="held out"):
        accept(PLAN, gradients, [], profile=profile)
