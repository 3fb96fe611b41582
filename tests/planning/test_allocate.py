"""Allocation against brute force over every choice, and what an error must say."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hilore_jax.actions import Compress, Policy, Store
from hilore_jax.planning import knapsack
from hilore_jax.planning.allocate import _assign, allocate, total_risk
from hilore_jax.planning.menu import Entry


def entry(nbytes, seconds, risk=0.0, label=None) -> Entry:
    policy = Policy({f"n{label}": Store()}) if label is not None else Policy({})
    return Entry(policy, nbytes, seconds, matmuls=0, flops=0, risk=risk)


def random_menus(rng, blocks=None, shared=None):
    """Small figures, so that ties occur; sometimes one menu for several blocks."""
    blocks = blocks or int(rng.integers(1, 6))
    kinds = []
    for _ in range(int(rng.integers(1, blocks + 1))):
        size = int(rng.integers(1, 5))
        figures = zip(
            rng.integers(0, 12, size).tolist(),
            (rng.integers(0, 8, size) * float(rng.choice([1.0, 1e-4, 0.37]))).tolist(),
            (rng.integers(0, 4, size) / 8).tolist(),
            strict=True,
        )
        kinds.append(tuple(entry(*f, label=i) for i, f in enumerate(figures)))
    return [kinds[int(rng.integers(len(kinds)))] for _ in range(blocks)]


def brute_force(menus, memory, risk, paper):
    """Best (seconds, risk, bytes) over every choice, or None."""
    best = None
    for chosen in itertools.product(*menus):
        nbytes = sum(e.nbytes for e in chosen)
        spent = total_risk([e.risk for e in chosen], paper=paper)
        if nbytes > memory or spent > risk:
            continue
        key = (round(math.fsum(e.seconds for e in chosen), 9), round(spent, 12), nbytes)
        best = key if best is None else min(best, key)
    return best


@pytest.mark.parametrize("search", ["enumeration", "branch and bound"])
@pytest.mark.parametrize("paper", [False, True])
def test_equals_brute_force(paper, search, monkeypatch):
    if search == "branch and bound":  # what large instances fall back to
        monkeypatch.setattr(knapsack, "candidates", lambda frame: None)
    rng = np.random.default_rng([paper, len(search)])
    feasible = 0
    for _ in range(250):
        menus = random_menus(rng)
        memory, risk = int(rng.integers(0, 40)), float(rng.integers(0, 9)) / 8
        expected = brute_force(menus, memory, risk, paper)
        if expected is None:
            with pytest.raises(ValueError, match="budget"):
                allocate(menus, memory, risk, paper=paper)
            continue
        feasible += 1
        found = allocate(menus, memory, risk, paper=paper)
        chosen = [menu[i] for menu, i in zip(menus, found.choices, strict=True)]
        assert found.nbytes == sum(e.nbytes for e in chosen) <= memory
        assert found.risk == total_risk([e.risk for e in chosen], paper=paper) <= risk
        assert found.policies == tuple(e.policy for e in chosen)
        assert (round(found.seconds, 9), round(found.risk, 12), found.nbytes) == expected
        assert found.bound_seconds <= found.seconds
    assert feasible > 100


@pytest.mark.parametrize("seed", range(6))
def test_enumeration_and_branch_and_bound_agree(seed, monkeypatch):
    rng = np.random.default_rng(seed)
    kinds = []
    for _ in range(1 + seed % 3):
        figures = rng.integers(0, 10**9, 15).tolist(), rng.random(15).tolist()
        risks = np.where(rng.random(15) < 0.4, 0.0, rng.random(15) / 100).tolist()
        kinds.append(tuple(entry(*f) for f in zip(*figures, risks, strict=True)))
    menus = [kinds[i % len(kinds)] for i in range(24)]
    memory = int(rng.uniform(0.2, 0.6) * sum(max(e.nbytes for e in menu) for menu in menus))
    found = allocate(menus, memory, 0.015)
    monkeypatch.setattr(knapsack, "candidates", lambda frame: None)
    other = allocate(menus, memory, 0.015)
    assert found.seconds == pytest.approx(other.seconds, rel=1e-9)
    assert (found.nbytes, found.risk) == (other.nbytes, pytest.approx(other.risk, rel=1e-9))
    assert found.bound_seconds == pytest.approx(other.bound_seconds)


def test_squares_and_sums_differ():
    menu = (entry(10, 4.0), entry(1, 0.0, risk=0.1))
    assert allocate([menu] * 4, 40, 0.2).seconds == 0.0
    found = allocate([menu] * 4, 40, 0.2, paper=True)
    assert (found.seconds, found.risk) == (8.0, 0.2)


def test_exact_in_huge_bytes():
    """One byte over is over, where a float's relative error of 1e-9 would let it pass."""
    large = 40 * 2**30
    menu = (entry(0, 1.0), entry(large + 1, 0.0))
    assert allocate([menu] * 8, 8 * (large + 1), 0.0).seconds == 0.0
    assert allocate([menu] * 8, 8 * (large + 1) - 1, 0.0).seconds == 1.0
    assert allocate([menu] * 8, 8 * (large + 1) - 1, 0.0).nbytes == 7 * (large + 1)


def test_exact_in_risk():
    e = 0.015 / 3
    menu = (entry(0, 1.0), entry(0, 0.0, risk=e))
    budget = total_risk([e] * 9)
    assert allocate([menu] * 9, 0, budget).seconds == 0.0
    assert allocate([menu] * 9, 0, math.nextafter(budget, 0)).seconds == 1.0


def test_risk_zero_compresses_nothing_and_unmeasured_is_never_taken():
    menu = (entry(5, 3.0), entry(1, 1.0, risk=1e-9), entry(0, 0.0, risk=math.inf))
    assert allocate([menu] * 2, 100, 0.0).choices == (0, 0)
    assert allocate([menu] * 2, 100, math.inf).choices == (1, 1)
    # A measured risk may be 0. Menus of equal figures are not alike where one of them compresses.
    without = Entry(Policy({"h": Compress()}), 1, 1.0, 0, 0, risk=0.0)
    exact = entry(5, 3.0)
    menus = [(exact, without), (exact, entry(1, 1.0, label=0)), (exact, without)]
    assert allocate(menus, 100, 0.0).choices == (0, 1, 0)
    assert allocate(menus, 100, 1e-300).choices == (1, 1, 1)
    with pytest.raises(ValueError, match="block 0's menu has more risk or compresses"):
        allocate([(without,)], 100, 0.0)


@st.composite
def problems(draw):
    figures = st.tuples(
        st.integers(0, 50), st.integers(0, 30).map(float), st.sampled_from([0.0, 0.1, 0.2, 0.3])
    )
    kinds = draw(st.lists(st.lists(figures, min_size=1, max_size=4), min_size=1, max_size=3))
    kinds = [(entry(50, 60.0), *(entry(*f) for f in kind)) for kind in kinds]
    menus = draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=7))
    floor = 50 * len(menus)
    memory = draw(st.lists(st.integers(floor // 2, floor), min_size=2, max_size=2).map(sorted))
    risk = draw(st.lists(st.sampled_from([0.0, 0.2, 0.35, 1.0]), min_size=2, max_size=2))
    return menus, memory, sorted(risk)


@settings(max_examples=60)
@given(problems(), st.booleans())
def test_monotone_in_both_budgets(problem, paper):
    menus, (less, more), (strict, loose) = problem
    try:
        base = allocate(menus, less, strict, paper=paper)
    except ValueError:
        return
    for memory, risk in ((more, strict), (less, loose), (more, loose)):
        found = allocate(menus, memory, risk, paper=paper)
        assert found.seconds <= base.seconds
        assert found.bound_seconds <= base.bound_seconds + 1e-6


def test_infeasible_says_the_least_bytes_and_the_largest_contributors():
    small = (entry(3, 1.0, label="a"), entry(2, 2.0, risk=0.5))
    large = (entry(1000, 1.0, label="b"),)
    with pytest.raises(ValueError, match="at least 1,009 bytes") as error:
        allocate([small, small, large, small], 10, 0.1)
    text = str(error.value)
    assert "Raise the budget by 999 bytes" in text and "1 x 1,000 bytes under 'nb=store'" in text
    assert text.index("nb=store") < text.index("3 x 3 bytes under 'na=store'")
    with pytest.raises(ValueError, match="at least 1,008 bytes"):
        allocate([small, small, large, small], 10, 0.5)


def test_infeasible_names_at_most_three():
    menus = [(entry(10 * i, 0.0, label=i),) for i in range(1, 6)]
    with pytest.raises(ValueError, match="at least 150 bytes") as error:
        allocate(menus, 0, 0.0)
    assert [f"'n{i}=store'" in str(error.value) for i in range(1, 6)] == [False] * 2 + [True] * 3


def test_infeasible_risk():
    with pytest.raises(ValueError, match="block 1's menu has more risk"):
        allocate([(entry(0, 0.0),), (entry(0, 0.0, risk=0.2),)], 10, 0.1)
    with pytest.raises(ValueError, match="the least risky entries of all 4 blocks exceed it"):
        allocate([(entry(0, 0.0, risk=0.1),)] * 4, 10, 0.1)


@pytest.mark.parametrize(
    ("menus", "memory", "risk", "error", "says"),
    [
        ([(entry(0, 0.0),)], 1.5, 0.0, TypeError, "memory"),
        ([(entry(0, 0.0),)], True, 0.0, TypeError, "memory"),
        ([(entry(0, 0.0),)], 1, -0.1, ValueError, "risk=-0.1"),
        ([(entry(0, 0.0),)], 1, math.nan, ValueError, "risk=nan"),
        ([], 1, 0.0, ValueError, "no menus"),
        ([(entry(0, 0.0),), ()], 1, 0.0, ValueError, "block 1's menu is empty"),
        ([(entry(0, math.nan),)], 1, 0.0, ValueError, "entry 0 of block 0"),
        ([(entry(-1, 0.0),)], 1, 0.0, ValueError, "nbytes=-1"),
        ([(entry(0, 0.0, risk=-1.0),)], 1, 0.0, ValueError, "risk=-1.0"),
    ],
)
def test_malformed(menus, memory, risk, error, says):
    with pytest.raises(error, match=says):
        allocate(menus, memory, risk)


def test_equal_policies_are_consecutive():
    menu = (entry(0, 3.0, label=0), entry(10, 1.0, label=1), entry(25, 0.0, label=2))
    found = allocate([menu] * 10, 63, 0.0)
    assert found.segments == len(set(found.policies)) > 1


def test_alternating_menus_with_the_same_policies_make_long_runs():
    less = (entry(0, 3.0, label=0), entry(10, 1.0, label=1))
    more = (entry(0, 5.0, risk=0.1, label=0), entry(10, 1.0, risk=0.3, label=1))
    found = allocate([less, more] * 5, 60, total_risk([0.1] * 4 + [0.3]))
    assert sorted(found.choices) == [0] * 4 + [1] * 6
    assert found.segments <= 9
    counts, items = np.array([2, 3, 2, 3]), np.array([0, 0, 1, 1])
    choices = _assign(
        [less, more] * 5, [0, 1] * 5, [[0, 2, 4, 6, 8], [1, 3, 5, 7, 9]], counts, items,
        np.array([0, 1, 0, 1]),
    )  # fmt: skip
    assert choices == (0,) * 4 + (1,) * 6


def test_large_instances_are_aggregated_and_keep_the_budgets(monkeypatch):
    """The witness of aggregation is the number of variables that HiGHS gets."""
    rng = np.random.default_rng(3)
    sizes = []
    relax = knapsack.linprog
    monkeypatch.setattr(
        knapsack, "linprog", lambda c, **k: (sizes.append(len(c)), relax(c, **k))[1]
    )
    nbytes = np.sort(rng.integers(2**20, 2**28, 40)).tolist()
    seconds = np.sort(rng.random(40))[::-1].tolist()
    risks = np.where(rng.random(40) < 0.3, 0.0, rng.random(40) / 100).tolist()
    menu = tuple(entry(*f, label=i) for i, f in enumerate(zip(nbytes, seconds, risks, strict=True)))
    found = allocate([menu] * 80, 80 * nbytes[15], 0.015)
    assert found.nbytes <= 80 * nbytes[15] and found.risk <= 0.015
    assert found.bound_seconds <= found.seconds <= 1.01 * found.bound_seconds
    assert sizes and max(sizes) <= 40
    assert found.segments <= 8
