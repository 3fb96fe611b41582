"""Menus priced by updates that were timed: with invented clocks, so that the figures are known."""

import dataclasses
import functools
import json
import logging
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

import hilore_jax as hl
from hilore_jax.planning import measure as measuring
from hilore_jax.planning.measure import Measurement, check_measurable, parse_cost, shortlist
from hilore_jax.planning.measured import Measured, Timing, paired
from hilore_jax.planning.menu import Entry
from hilore_jax.planning.room import fitting, room
from hilore_jax.planning.target import parse_target

N = 2


def two(p, x):
    """Two branches of unequal width, so that nothing, either and both are worth keeping."""
    gate = checkpoint_name(x @ p["gate"], "gate")
    up = checkpoint_name(x @ p["up"], "up")
    return x + jnp.sin(gate) @ p["gate_down"] + jnp.sin(up) @ p["up_down"]


SHAPES = {"gate": (32, 96), "up": (32, 64), "gate_down": (96, 32), "up_down": (64, 32)}
ONE = {name: jnp.full(shape, 0.01) for name, shape in SHAPES.items()}
X = jnp.ones((8, 128, 32)) / 3
STACK = jax.tree.map(lambda w: jnp.stack([w] * N), ONE)
CPU = dataclasses.replace(parse_target("cpu"), flops=(("float32", 1e10),), bandwidth=2e10)
BLOCKS = hl.Blocks(two, (ONE, X), N)
GC = hl.Policy({})
GATE, UP = hl.parse_policy("gate=store"), hl.parse_policy("up=store")
BOTH = hl.parse_policy("gate=store,up=store")


def update(policies, stack, x):
    def loss(stack):
        return jnp.sum(jnp.sin(hl.scan_blocks(two, stack, x, policies)))

    return jax.tree.map(lambda a, g: a - 0.1 * g, stack, jax.grad(loss)(stack)), {}


COMPILED = {}


@pytest.fixture(autouse=True)
def compile_once(monkeypatch):
    """Programs of equal updates and policies are compiled once for all tests."""
    lower_for, compile_for = measuring.lower_for, measuring.compile_for

    def lower(bound, *args, **options):
        return (bound.func, bound.args[0]), functools.partial(lower_for, bound, *args, **options)

    def compiled(lowered, target):
        key, lower = lowered
        if key not in COMPILED:
            COMPILED[key] = compile_for(lower(), target)
        return COMPILED[key]

    monkeypatch.setattr(measuring, "lower_for", lower)
    monkeypatch.setattr(measuring, "compile_for", compiled)


def ignores(policies, stack, x):
    return update((GC,) * N, stack, x)


def thrice(policies, stack, x):
    return jax.lax.fori_loop(0, 3, lambda _, w: update(policies, w, x)[0], stack), {}


class Clock:
    """Invented seconds of an update by policy, instead of measured ones; turn n is n longer."""

    def __init__(self, seconds, other=9.0, drift=1.0):
        self.seconds, self.other, self.drift = seconds, other, drift
        self.asked = []

    def __call__(self, runs, turns, prepare):
        assert list(runs) == list(prepare)
        self.asked.append(tuple(runs))
        return {
            name: [self.seconds.get(name, self.other) + self.drift * turn for turn in range(turns)]
            for name in runs
        }


def plan(
    memory: Any = "9x gc",
    cost: Any = "modelled",
    args: Any = (STACK, X),
    target: Any = CPU,
    fn=update,
    **options,
) -> Any:
    budget = hl.Budget(memory, risk=0.0)
    return hl.plan(fn, args, blocks=BLOCKS, budget=budget, target=target, cost=cost, **options)


@functools.cache
def priced(memory, gate=1.0, up=5.0, both=4.0) -> Any:
    seconds = {"gc": 6.0, "gate=store": gate, "up=store": up, "gate=store,up=store": both}
    return plan(memory, Measurement(timer=Clock(seconds)))


def test_measured_seconds_make_another_plan_than_modelled_ones():
    modelled = plan()
    assert modelled.cost == "modelled" and modelled.measured is None
    assert modelled.policies == (BOTH,) * N
    found = priced("9x gc")
    assert found.cost == "measured" and found.policies == (GATE,) * N
    # What saves less than a smaller entry is gone, and seconds are a block's.
    assert {e.policy: e.seconds for e in found.menu} == {GC: 2.5, UP: 2.0, GATE: 0.0}
    assert {t.policy: t.saved for t in found.measured.timings}[UP] == 0.5
    assert priced("9x gc", gate=6.5, up=5.5, both=5.0).policies == (BOTH,) * N


def test_slower_than_gc_is_not_admitted():
    found = priced("9x gc", gate=6.1, up=7.0, both=8.0)
    assert [e.policy for e in found.menu] == [GC] and found.policies == (GC,) * N
    assert found.recompute_seconds == found.bound_seconds == 0


def test_a_larger_budget_is_never_slower_at_the_prices_of_one_measurement():
    first = priced("9x gc", both=0.5)
    clock = Clock({})
    seconds = [
        plan(memory, cost).recompute_seconds
        for cost in [first.measured]
        for memory in ("1x gc", "1.1x gc", "1.3x gc", "9x gc")
    ]
    assert not clock.asked and seconds == sorted(seconds, reverse=True)
    assert seconds[0] > seconds[-1] == first.recompute_seconds == 0


def test_what_is_measured_is_the_update_with_all_blocks_under_an_entry(monkeypatch):
    compiled, copies = [], []
    wanted, _ = jax.jit(functools.partial(update, (GC,) * N))(STACK, X)

    def lower(bound, *args, **options):
        compiled.append(bound.args[0])
        return measuring_lower(bound, *args, **options)

    def timer(runs, turns, prepare):
        for name, make in prepare.items():
            first, second = make(), make()
            for leaf, again in zip(*map(jax.tree.leaves, (first, second)), strict=True):
                assert (leaf == again).all()
                assert leaf.unsafe_buffer_pointer() != again.unsafe_buffer_pointer()
            copies.append(name)
            state, _ = runs[name](first)
            assert all(map(jnp.allclose, jax.tree.leaves(state), jax.tree.leaves(wanted)))
            assert all(leaf.is_deleted() for leaf in jax.tree.leaves(first[0]))  # donated
        return Clock({})(runs, turns, prepare)

    measuring_lower = measuring.lower_for
    monkeypatch.setattr(measuring, "lower_for", lower)
    found = plan(cost=Measurement(timer=timer))
    assert compiled[:-1] == [(t.policy,) * N for t in found.measured.timings]
    assert compiled[-1] == (hl.Policy(default=hl.Store()),) * N  # not run
    assert set(copies) == {"gc", "gate=store", "up=store", "gate=store,up=store"}
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((STACK, X)))


def test_shapes_and_foreign_targets_are_refused_before_anything_is_compiled(monkeypatch):
    def unreachable(*_, **__):
        raise AssertionError("compiled")

    monkeypatch.setattr("hilore_jax.planning.solve.compiled_memory", unreachable)
    monkeypatch.setattr("hilore_jax.planning.solve.block_menu", unreachable)
    shapes = jax.eval_shape(lambda: (STACK, X))
    message = r"5 of its 5 arguments are shapes .* first args\[0\]\['gate'\]: .*Pass arrays"
    with pytest.raises(ValueError, match=message):
        plan(cost="measured", args=shapes)
    with pytest.raises(ValueError, match=r"1 of its 5 .*args\[1\]: float32\[8, 128, 32\]"):
        plan(cost="measured", args=lambda policies: (STACK, shapes[1]))
    with pytest.raises(ValueError, match=r'\(cpu\), but the target is cuda:h200.*target="device"'):
        plan(cost="measured", target="cuda:h200")
    with pytest.raises(ValueError, match="cost='timed': expected"):
        plan(cost="timed")
    check_measurable((STACK, X, 1), CPU)


def test_a_budget_that_cannot_be_met_is_refused_before_the_measurement():
    clock = Clock({})
    with pytest.raises(ValueError, match="recomputing every block"):
        plan("1 KiB", Measurement(timer=clock))
    assert not clock.asked


def test_an_update_that_spares_nothing_is_found_out():
    message = r"should recompute \d+ FLOPs of matmuls in an update, but .* runs 0 more than"
    with pytest.raises(ValueError, match=message):
        plan(cost=Measurement(timer=Clock({}), most=1), fn=ignores)

    with pytest.raises(ValueError, match=r"Is it Measurement\(microbatches=3\)"):
        plan(cost=Measurement(timer=Clock({}), most=1), fn=thrice)
    how = Measurement(timer=Clock({"gc": 12.0}), most=1, microbatches=3)
    found = plan(cost=how, fn=thrice)
    assert found.menu[0].seconds == 3 / (N * 3)


def test_one_policy_that_lies_is_left_out_with_a_warning(monkeypatch, caplog):
    executed = measuring.executed_matmuls
    more = iter([0, 0, 777])  # FLOPs of the plain text's, GC's and the next one's

    def lies(text):
        found = executed(text)
        return found._replace(flops=(found.flops or 0) + next(more, 0))

    monkeypatch.setattr(measuring, "executed_matmuls", lies)
    with caplog.at_level(logging.WARNING, "hilore_jax"):
        found = plan(cost=Measurement(timer=Clock({"gc": 12.0})))
    (left,) = found.measured.left_out
    assert re.search(r"should recompute \d+ FLOPs of matmuls in an update, but", left[1])
    assert "left out of the menu" in caplog.text
    assert left[0] not in {str(t.policy) for t in found.measured.timings}


def test_an_entry_that_does_not_fit_is_measured_in_fewer_blocks(monkeypatch):
    tried = []

    class Program:
        def __init__(self, policies):
            tried.append(sum(p == BOTH for p in policies))
            self.peak = 100 + 60 * tried[-1]

    monkeypatch.setattr("hilore_jax.planning.room.memory_of", lambda program: program)
    found: Any = fitting(Program, BOTH, 8, free=300, least=100)
    assert (found[0], found[1].peak, tried) == (3, 280, [8, 3])
    assert fitting(Program, BOTH, 8, free=120, least=100) is None and tried[-1] == 1
    assert fitting(Program, GC, 8, free=90) is None and tried[-2:] == [1, 0]
    assert room((X,), CPU) == int(0.95 * (CPU.memory - X.nbytes))


def entry(policy, nbytes, seconds, risk=0.0):
    return Entry(policy, nbytes, seconds, 1, 10, risk)


def test_the_shortlist_has_gc_what_allocations_use_and_no_more_than_was_asked():
    policies = [hl.parse_policy(f"h{i}=store") for i in range(30)]
    # On a convex curve all are used at some budget; the last two are too risky for any block.
    menu = (
        entry(GC, 0, 31.0),
        *(entry(p, 10 * i + 10, 30 / (i + 1)) for i, p in enumerate(policies)),
    )
    menu += (entry(hl.parse_policy("q=int8"), 5, 0.0, 0.5),)
    found = shortlist((menu,) * 4, risk=0.1, paper=False, most=6)
    assert len(found) == 7 and found[0].policy == GC and found[-1].policy == policies[-1]
    assert all(e.risk <= 0.1 for e in found) and len(set(found)) == 7
    whole = shortlist((menu,) * 4, risk=0.1, paper=False, most=40)
    assert set(whole) == set(menu[:-1])
    bad = menu[:1] + tuple(dataclasses.replace(e, seconds=40.0) for e in menu[1:-2]) + menu[-2:-1]
    assert policies[-1] in {e.policy for e in shortlist((bad,) * 4, 0.1, False, most=1)}


def test_columns_of_risks_follow_their_entries_and_what_is_unmeasured_is_left_out():
    menu = (
        entry(GC, 0, 9.0),
        entry(GATE, 10, 8.0, 0.3),
        entry(UP, 10, 7.0, 0.3),
        entry(BOTH, 20, 1.0),
    )
    times = [
        Timing(GC, 0.0, 0.0, 0.0, 2),
        Timing(GATE, 2.0, 1.0, 3.0, 2),
        Timing(UP, 1.0, 1.0, 1.0, 2),
    ]
    found = Measured(tuple(times), 3, 1.0, (), {})
    assert [e.policy for e in found.price(menu)[0]] == [GC, GATE]
    # UP is slower than GATE everywhere, and less risky in the second block only.
    menu, risks = found.price(menu, ((0.0, 0.2, 0.3, 0.0), (0.0, 0.3, 0.1, 0.0)))
    assert [e.policy for e in menu] == [GC, GATE, UP] and [e.seconds for e in menu] == [
        2.0,
        0.0,
        1.0,
    ]
    assert risks == ((0.0, 0.2, 0.3), (0.0, 0.3, 0.1))
    with pytest.raises(ValueError, match="recomputing everything"):
        found.price(menu[1:])


def test_paired_differences_do_not_see_what_all_have_in_common():
    assert paired([1.0, 11.0, 101.0], [0.5, 10.0, 100.5]) == (0.5, 0.5, 0.75)
    assert paired([3.0], [1.0]) == (2.0, 2.0, 2.0)
    drift = [plan(cost=Measurement(timer=Clock({"gc": 12.0}, drift=d))).measured for d in (0, 99)]
    assert drift[0].timings == drift[1].timings
    assert drift[0].update_seconds == 12 and drift[1].update_seconds == 12 + 2 * 99


def test_a_measured_plan_is_kept_told_and_used_again(tmp_path):
    found = priced("9x gc")
    text = str(found)
    assert "time: measured" in text and "updates under 4 policies in 5 turns, 8.00 s each" in text
    saves = re.search(r"quartiles .*\n.*\n +0-1 .* 2\.50 +2\.50 to 2\.50 ", text)
    assert saves and " 5.00 " in text.splitlines()[text[: saves.end()].count("\n") + 1]
    found.save(tmp_path / "plan.json")
    again = hl.Plan.load(tmp_path / "plan.json")
    assert again == found
    other = plan("1.1x gc", again.measured)
    assert other.measured == found.measured and other.cost == "measured"
    with pytest.raises(ValueError, match="blocks: measured with 2; found 3"):
        hl.plan(
            update,
            (jax.tree.map(lambda w: jnp.stack([w] * 3), ONE), X),
            blocks=dataclasses.replace(BLOCKS, count=3),
            budget=hl.Budget("9x gc"),
            target=CPU,
            cost=again.measured or "measured",
        )


def test_files_of_older_schemas_are_read(tmp_path):
    path, made = tmp_path / "plan.json", plan()
    made.save(path)
    fields = json.loads(path.read_text())
    for schema, added in ((3, "norm"), (2, "measured")):
        assert fields.pop(added) is None
        path.write_text(json.dumps(fields | {"schema": schema}))
        assert hl.Plan.load(path) == made


def test_bad_measurements_are_named():
    for name in ("turns", "most", "microbatches"):
        with pytest.raises(ValueError, match=f"{name}=0"):
            Measurement(**{name: 0})  # type: ignore
    assert parse_cost("measured") == Measurement() and parse_cost("modelled") is None


def test_a_real_clock_from_end_to_end():
    """What it says is not asserted: only that every figure is there and is used."""
    found = plan(cost=Measurement(turns=2, most=2), progress=True)
    assert found.cost == "measured" and len(found.measured.timings) == 3
    assert found.measured.update_seconds > 0
    for timing in found.measured.timings:
        assert timing.low <= timing.saved <= timing.high and math.isfinite(timing.saved)
    assert found.memory.peak <= found.budget
    assert min(e.seconds for e in found.menu) == 0


def test_recomputing_everything_stays_in_a_priced_menu():
    """An entry in host memory may beat it: no byte of the device, and less time."""
    moved = hl.Policy({"up": hl.Offload()})
    menu = Entry(GC, 0, 2.0, 1, 8, 0.0), Entry(moved, 0, 1.0, 0, 0, 0.0)
    times = Timing(GC, 0.0, 0.0, 0.0, 4), Timing(moved, 0.5, 0.4, 0.6, 4)
    priced, risks = Measured(times, 5, 20.0, (), {}).price(menu, ((0.0, 0.0),) * 2)
    assert [(e.policy, e.seconds) for e in priced] == [(moved, 0.0), (GC, 0.5)]
    assert risks == ((0.0, 0.0),) * 2
