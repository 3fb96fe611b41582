"""What acceptance refuses: errors that are no numbers, gradients of 0, plans without room."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hilore_jax as hl
from hilore_jax.planning.accept import accept
from hilore_jax.planning.leave_names import BlockView
from hilore_jax.planning.memory import Memory, TargetMemoryError
from hilore_jax.planning.menu import Entry
from hilore_jax.planning.out_of_memory import OutOfMemoryError, naming_out_of_memory
from hilore_jax.planning.plan import Plan
from plans import bare_plan

GC, UP = hl.Policy({}), hl.Policy({"up": hl.Compress("int8")})
BOTH = hl.Policy({"up": hl.Compress("int8"), "norm": hl.Store()})
MENU = tuple(Entry(policy, 8, 1.0, 1, 1, 0.0) for policy in (GC, UP, BOTH))
FULL = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 9 bytes more\nand a table")
ONE = Memory(1, 0, 0, 0, 0, 0)


def plan(policy=UP):
    return bare_plan([policy] * 2, MENU, budget=100)


def erring(error, policy=UP, norm=1.0):
    """Gradients of a norm, and with an error under one policy."""

    def gradients(policies, update):
        return {"w": jnp.array([norm, error if policies[0] == policy else 0.0])}, [1.0]

    return gradients


@pytest.mark.parametrize("error", [math.nan, math.inf, 0.02])
def test_an_error_that_is_not_within_the_limit_rejects(error, tmp_path):
    made = accept(plan(), erring(error), [0])
    assert made.accepted is False and made.acceptance is not None
    assert "its mean gradient error of" in made.acceptance["reason"]
    made.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").accepted is False


def test_an_exact_gradient_of_zero_is_refused():
    with pytest.raises(ValueError, match=r"gradient of update 0 is 0: hold out another"):
        accept(plan(), erring(0.5, norm=0.0), [0])


def test_what_is_left_is_held_to_the_limit_that_was_asked_for():
    seconds = {BOTH: 2.0, UP: 1.0}
    view = BlockView(lambda p: Entry(p, 8, seconds.get(p, 9.0), 0, 0, 0.0), lambda policy: ())
    for limit, left in ((0.015, UP), (0.005, BOTH)):
        found = accept(plan(BOTH), erring(0.01), [0], block=view, memory=lambda p: ONE, limit=limit)
        assert found.accepted and found.policies == (left,) * 2
        assert found.acceptance is not None and found.acceptance["limit"] == limit


def test_exact_gradients_wait_on_the_host():
    held = []

    def gradients(policies, update):
        made = erring(0.0)(policies, update)
        held.append(made[0]["w"])
        if policies[0] == UP:  # nothing but the argument's own reference is on the device
            held[0].delete()
        return made

    assert accept(plan(), gradients, [0]).accepted
    assert held[0].is_deleted() and not held[1].is_deleted()


def raising(error, policy=UP):
    def call(policies, *update):
        if policies[0] == policy:
            raise error
        return erring(0.0)(policies, update)

    return call


@pytest.mark.parametrize("error", [FULL, TargetMemoryError("the program does not fit")])
@pytest.mark.parametrize("where", ["gradients", "memory", "measured"])
def test_a_plan_without_room_is_rejected_and_says_so(where, error, tmp_path):
    options: dict[str, Any] = {} if where == "gradients" else {where: raising(error)}
    gradients = raising(error) if where == "gradients" else erring(0.0)
    made = accept(plan(), gradients, [0, 1], **options)
    assert made.accepted is False and made.acceptance is not None
    assert made.acceptance["reason"] == f"out of memory: {str(error).splitlines()[0]}"
    assert made.acceptance["errors"] == (math.inf,) * 2
    made.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == made


def test_other_faults_and_an_exact_gradient_without_room_are_raised():
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        accept(plan(), raising(jax.errors.JaxRuntimeError("INTERNAL: x")), [0])
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        accept(plan(), raising(FULL, GC), [0])
    with pytest.raises(OutOfMemoryError, match=r"9 bytes more$"), naming_out_of_memory():
        raise FULL


def test_a_leave_one_out_without_room_leaves_the_plan_as_it_is(caplog):
    def profile(plans):
        raise FULL

    made = accept(plan(), erring(0.001), [0], profile=profile, memory=lambda p: ONE)
    assert made.accepted and made.policies == (UP,) * 2
    assert "what does not pay is not known, and stays: out of memory" in caplog.text
    assert np.isfinite(made.acceptance["error"] if made.acceptance else math.nan)
