"""The search for a plan against an invented compiler: fits, few compilations, never slower."""

import functools
import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hilore_jax as hl
from hilore_jax.planning.allocate import allocate
from hilore_jax.planning.memory import Memory, TargetMemoryError
from hilore_jax.planning.menu import Entry
from hilore_jax.planning.search import Search, describe

GC_PEAK, BLOCKS = 2**30, 8


def memory(temporaries):
    return Memory(0, 0, 0, int(temporaries), 0, 0)


GC = memory(GC_PEAK)


def random_menu(rng, top=2**27):
    """A Pareto menu of exact entries: more bytes, fewer seconds."""
    nbytes = [0, *sorted(rng.sample(range(2**20, top), rng.randint(2, 12)))]
    seconds = sorted((rng.random() for _ in nbytes), reverse=True)
    policies = [hl.Policy({}), *(hl.Policy({f"n{i}": hl.Store()}) for i in range(1, len(nbytes)))]
    return tuple(Entry(*e, 0, 0, risk=0.0) for e in zip(policies, nbytes, seconds, strict=True))


class Compiler:
    """Peaks of GC and a share of kept bytes, and noise that hangs on the set of entries used."""

    def __init__(self, menu, seed, noise, share=1.0, most=float("inf")):
        self.sizes = {e.policy: e.nbytes for e in menu}
        self.seed, self.noise, self.share, self.most = seed, noise, share, most
        self.calls = 0

    def __call__(self, policies):
        self.calls += 1
        kept = sum(self.sizes[p] for p in policies)
        rng = random.Random(f"{self.seed} {sorted(map(str, set(policies)))}")
        offset = rng.uniform(-self.noise, self.noise) * GC_PEAK if kept else 0
        peak = GC_PEAK + self.share * kept + offset
        if peak > self.most:
            raise TargetMemoryError
        return memory(peak + 1)

    def search(self, menu, times, devices=1, compilations=7):
        limit = int(times * GC_PEAK)
        choose = functools.partial(allocate, [menu] * BLOCKS, risk=0.0)
        found = Search(menu, BLOCKS, limit, choose, GC, self, devices)
        before = self.calls
        policies, compiled, predicted = found.run(compilations)
        assert self.calls - before <= compilations
        assert compiled.peak <= limit
        tried = {(trial.policies, trial.predicted) for trial in found.trials[1:]}
        assert (describe(policies), predicted) in tried or policies == (hl.Policy({}),) * BLOCKS
        seconds = {e.policy: e.seconds for e in menu}
        return sum(seconds[p] for p in policies), compiled.peak, predicted


BUDGETS = [1.0, 1.03, 1.06, 1.1, 1.15, 1.2, 1.21, 1.3, 1.4, 1.6, 1.8, 2.2]


@settings(max_examples=8)
@given(seed=st.integers(0, 10**9), noise=st.sampled_from([0.0, 0.01, 0.03]))
def test_a_larger_budget_is_never_slower_however_peaks_jump_within_the_margin(seed, noise):
    menu = random_menu(random.Random(seed))
    compiler = Compiler(menu, seed, noise)
    seconds = [compiler.search(menu, times)[0] for times in BUDGETS]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] > seconds[-1]


@settings(max_examples=8)
@given(seed=st.integers(0, 10**9))
def test_what_is_found_fits_when_peaks_jump_far(seed):
    menu = random_menu(random.Random(seed))
    compiler = Compiler(menu, seed, 0.3)
    for times in BUDGETS[::4]:
        compiler.search(menu, times)


@pytest.mark.parametrize("share", [0.25, 1.0])
def test_the_budget_is_used_and_predicted_where_devices_divide_what_is_kept(share):
    menu = random_menu(random.Random(3))
    compiler = Compiler(menu, 3, 0.002, share)
    sizes = [e.nbytes for e in menu]
    gap = max(b - a for a, b in itertools.pairwise(sizes)) * share
    for times in (1.05, 1.1, 1.15):
        _, peak, predicted = compiler.search(menu, times, devices=4)
        assert predicted == pytest.approx(peak, rel=0.01)
        assert times * GC_PEAK - peak < gap + 0.02 * GC_PEAK


def test_candidates_that_the_compiler_refuses_are_passed_over():
    menu = random_menu(random.Random(5))
    compiler = Compiler(menu, 5, 0.01, most=1.3 * GC_PEAK)
    seconds = [compiler.search(menu, times)[0] for times in BUDGETS if times <= 1.3]
    assert seconds == sorted(seconds, reverse=True) and seconds[0] > seconds[-1]
