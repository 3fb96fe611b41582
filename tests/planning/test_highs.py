"""HiGHS's own debug lines stay out of standard output; everybody else's come through."""

import ctypes
import os

import numpy as np
import pytest
from scipy import optimize

from hilore_jax.planning import highs, knapsack, menu_program
from hilore_jax.planning.menu import block_menu
from planner_blocks import CASES, Device, risk

LINE = b"HighsMipSolverData::transformNewIntegerFeasibleSolution tmpSolver.run();"


@pytest.fixture
def talkative(monkeypatch):
    """HiGHS as it sometimes is: it prints, into C's buffer, while it solves."""
    calls = []

    def solve(*args, **options):
        calls.append(options)
        ctypes.CDLL(None).puts(LINE)
        return real(*args, **options)

    real = optimize.milp
    monkeypatch.setattr(optimize, "milp", solve)
    return calls


def test_a_menu_prints_nothing(talkative, monkeypatch, capfd):
    monkeypatch.setattr("hilore_jax.planning.menu._EXACT", 0)  # by the program, not by enumeration
    block, args, argnums, codecs = CASES["mlp"]
    block_menu(block, *args, codecs=codecs, risks=risk, target=Device(), argnums=argnums)
    ctypes.CDLL(None).fflush(None)
    assert len(talkative) > 5 and capfd.readouterr() == ("", "")


def test_every_program_is_solved_that_way():
    assert knapsack.milp is menu_program.milp is highs.milp


def test_what_others_print_meanwhile_comes_through_in_order(capfd):
    print("before", flush=False)
    with highs.without_debug_lines():
        ctypes.CDLL(None).puts(LINE)
        ctypes.CDLL(None).puts(b"from C")
        ctypes.CDLL(None).fflush(None)
        os.write(1, b"from a thread, without an end")
    print("after")
    assert capfd.readouterr() == ("before\nfrom C\nfrom a thread, without an endafter\n", "")


def test_an_error_gives_standard_output_back(capfd):
    with pytest.raises(RuntimeError), highs.without_debug_lines():
        raise RuntimeError
    os.write(1, b"here")
    assert capfd.readouterr().out == "here"


def test_without_a_standard_output_there_is_still_a_solution():
    there = os.dup(1)
    try:
        os.close(1)
        found = highs.milp(np.array([1.0]), integrality=1, bounds=optimize.Bounds(2.5, 9))
    finally:
        os.dup2(there, 1)
        os.close(there)
    assert found.x.tolist() == [3.0]


def test_where_nothing_can_be_held_back_there_is_still_a_solution(monkeypatch):
    def full():
        raise OSError("No space left on device")

    monkeypatch.setattr("tempfile.TemporaryFile", full)
    assert highs.milp(np.array([1.0]), bounds=optimize.Bounds(2.5, 9)).x.tolist() == [2.5]
