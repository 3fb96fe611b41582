"""What a plan's table says: which figure is which, its units, and why blocks are not faster."""

import math

import pytest

import hilore_jax as hl
from hilore_jax.planning.cells import legend, letter
from hilore_jax.planning.measured import Measured, Timing
from hilore_jax.planning.memory import Memory
from hilore_jax.planning.menu import Entry
from hilore_jax.planning.plan import Blocks
from plans import bare_plan

GC, LOW = hl.Policy({}), hl.Policy({"up": hl.Compress("int8")})
KEPT = hl.Policy({"up": hl.Store(), "gate": hl.Compress("int8", axis=1, tile=32)})
MIB, GIB = 2**20, 2**30


def menu(risk):
    return Entry(GC, 0, 2.0, 1, 8, 0.0), Entry(LOW, 0, 1.0, 0, 0, risk)


def typical(**changes):
    """A plan of three blocks with figures of the usual sizes."""
    entries = (
        Entry(GC, 0, 800e-6, 7, 480 * 10**9, 0.0),
        Entry(LOW, 100 * MIB, 300e-6, 1, 35 * 10**9, 0.002),
        Entry(KEPT, 300 * MIB, 100e-6, 0, 0, 0.001),
    )
    fields = {
        "target": "cuda:h200",
        "budget": 12 * GIB,
        "baseline": 10 * GIB,
        "gc": Memory(6 * GIB, GIB, GIB, 2 * GIB, 0, 8 * GIB),
        "memory": Memory(6 * GIB, GIB, GIB, 5 * GIB, 0, 10 * GIB),
        "predicted": int(11.11 * GIB),
        "bound_seconds": 500e-6,
    }
    return bare_plan((LOW, LOW, KEPT), entries, **{**fields, **changes})


def line(text, start):
    return next(line for line in text.splitlines() if line.strip().startswith(start)).strip()


def test_peaks_say_what_they_are_and_times_have_prefixes():
    text = typical().explain()
    assert line(text, "plan, compiled").split()[2:8] == [
        "11.00",
        "GiB",
        "6.00",
        "GiB",
        "5.00",
        "GiB",
    ]
    assert "(XLA's own: 10.00 GiB)" in line(text, "plan, compiled")
    assert line(text, "plan, predicted").split()[2:5] == ["11.11", "GiB", "+1.00"]
    assert line(text, "GC, compiled").split()[2] == "8.00"
    assert line(text, "baseline, compiled").split()[2] == "10.00"
    assert line(text, "budget").split()[1:] == ["12.00", "GiB", "1.2", "x", "baseline"]
    assert line(text, "device").split()[1] == "141.00"
    assert "  device  " not in typical(target="cpu").explain()
    assert "1.5 x GC" in typical(baseline=8 * GIB).explain()
    # 3 x 0.8 ms with GC, 0.7 ms as planned, 0.5 ms at best.
    assert "time: 1.70 ms saved a microbatch, 89.5 % of the possible 1.90 ms" in text
    assert "modelled" in text.splitlines()[1] and len(text.splitlines()[1]) < 120


def test_columns_have_units_and_add_up():
    text = typical().explain()
    costs = text[text.index("What one block") :]
    units = "MiB GFLOP ms ms possible risk why not faster"
    assert line(costs, "blocks").split() == ["blocks", *units.split()]
    rows = {start: line(costs, start + " ").split()[1:8] for start in ("0-1", "2", "all")}
    assert rows["0-1"] == ["100.0", "35.0", "0.300", "0.500", "52.6", "%", "0.0020"]
    assert rows["2"] == ["300.0", "0", "0.100", "0.700", "36.8", "%", "0.0010"]
    assert rows["all"] == ["500.0", "70.0", "0.700", "1.700", "89.5", "%", "0.0030"]
    assert "nothing in the menu is faster" in line(costs, "2 ")
    assert "95.1 % of the matmul FLOPs" in line(costs, "all")


def test_actions_are_letters_that_the_legend_explains():
    text = typical().explain()
    actions = text[text.index("What the backward") : text.index("What one block")]
    assert line(actions, "blocks").split() == ["blocks", "gate", "up"]
    assert line(actions, "0-1").split() == ["0-1", "R", "i8"]
    assert line(actions, "2").split() == ["2", "i8/32@1", "H"]
    assert "i8/32@1 kept as int8 with a scale for 32 values of axis 1" in " ".join(actions.split())
    assert "O kept in host memory" not in actions
    assert "R in every block: gate, up" in bare_plan((GC,), typical().menu).explain()
    cast, whole = hl.Compress("fp8_e4m3", tile=0), hl.Compress("int4", tile=None)
    assert (letter(cast), letter(whole), letter(hl.Offload())) == ("f8/0", "i4/all", "O")
    assert legend([hl.Policy({"q": cast, "k": whole, "v": hl.Offload()})]) == [
        "R recomputed",
        "O kept in host memory",
        "f8/0 kept as fp8_e4m3 without a scale",
        "i4/all kept as int4 with a scale for all values of the last axis",
    ]


def test_nothing_is_wider_than_a_terminal():
    names = {f"quite_a_long_name_{i}": hl.Store() for i in range(12)}
    wide = Entry(hl.Policy(names), 10 * GIB, 1e-6, 0, 0, 0.0)
    fits = Entry(GC, 0, 800e-6, 7, 480 * 10**9, 0.0)
    for policies in [(GC, wide.policy), (GC, GC)]:
        text = bare_plan(policies, (fits, wide)).explain()
        assert max(map(len, text.splitlines())) <= 120
        assert all(name in text for name in names)
    assert max(map(len, typical().explain().splitlines())) <= 120


def test_what_is_missing_to_the_next_faster_policy():
    risky = typical(risk_budget=0.0031)  # as it is: the root of 2 x 0.002^2 + 0.001^2
    assert "gate R->i8/32@1, up i8->H: 0.400 ms less, fits by these" in " ".join(
        risky.explain().split()
    )
    low = typical(budget=int(11.3 * GIB))
    words = " ".join(low.explain().split())
    assert "up i8->H: 0.400 ms less, needs 400.00 MiB more, 307.20 MiB left" in words
    better = Entry(KEPT, 0, 100e-6, 0, 0, 0.01)
    tight = bare_plan((GC,), (typical().menu[0], better), risk_budget=0.00999)
    words = " ".join(tight.explain().split())
    assert "gate R->i8/32@1, up R->H: 0.700 ms less, risk 0.0100 > 0.00999" in words


@pytest.mark.parametrize(
    ("paper", "said"), [(True, "risk 0.2000 > 0.15"), (False, "fits by these")]
)
def test_risks_of_the_next_entry_add_as_the_plans_do(paper, said):
    made = bare_plan((LOW, GC), menu(0.1), risk_budget=0.15, paper=paper)
    assert said in " ".join(line(made.explain(), "1 ").split()) or said in made.explain()
    assert "up R->i8: 1.00 s less" in made.explain()


def test_blocks_of_a_range_that_may_not_have_the_next_entry_are_left_out():
    # The second block was not measured; the first may take the entry.
    risks = ((0.0, 0.1), (0.0, math.inf))
    options = {"block_risks": risks, "exposure": 1.0}
    made = bare_plan((GC, GC), menu(math.inf), risk_budget=0.15, **options)
    assert "fits by these figures" in made.explain()
    tight = bare_plan((GC, GC), menu(math.inf), risk_budget=0.05, **options)
    assert "0-1 " in tight.explain() and "risk 0.1000 > 0.05" in tight.explain()
    options["block_risks"] = ((0.0, math.inf),) * 2
    none = bare_plan((GC, GC), menu(math.inf), **options)
    assert "nothing faster was measured by the calibration" in none.explain()


def test_measured_times_have_quartiles():
    times = (
        Timing(GC, 0.0, 0.0, 0.0, 3),
        Timing(LOW, 500e-6, 450e-6, 520e-6, 3),
        Timing(KEPT, 700e-6, 650e-6, 720e-6, 2),
    )
    measured = Measured(times, 5, 1.5, (("x", "y"),), {})
    text = typical(cost="measured", measured=measured).explain()
    assert "time: measured" in text and "0.45 to 0.52" in text and "0.65 to 0.72" in text
    assert "under 3 policies in 5 turns, 1.50 s each under GC" in text
    words = " ".join(text.split())
    assert "some in only 2 blocks" in words and "not measured: 1 of the menu" in words


@pytest.mark.parametrize("wrong", [(5,), (-1,), (0, 2), ()])
def test_positions_that_the_block_does_not_have_are_refused(wrong):
    with pytest.raises(ValueError, match="positions among the block's 2 arguments"):
        Blocks(lambda w, x: x, (1.0, 2.0), 3, argnums=wrong)
