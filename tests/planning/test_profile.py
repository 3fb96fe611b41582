"""Measured plans: equal starts, turns, and claims checked against the compiled program."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

import hilore_jax as hl
from blocks import mlp, params
from hilore_jax.planning.executed import executed_matmuls
from hilore_jax.planning.profile import profile_plan

N = 4
ONE = params()
X = jnp.ones((2, 5, 8)) / 3
GC = (hl.Policy({}),) * N
KEPT = (hl.parse_policy("gate=store,up=int8"),) * N


def update(policies, stack, x):
    def loss(stack):
        return jnp.sum(jnp.sin(hl.scan_blocks(mlp, stack, x, policies)))

    return jax.tree.map(lambda a, g: a - 0.1 * g, stack, jax.grad(loss)(stack)), {}


def arguments(policies):
    return jax.tree.map(lambda w: jnp.stack([w] * N), ONE), X


def matmuls(policies):
    program = jax.jit(functools.partial(update, policies), compiler_options=hl.compiler_options())
    return executed_matmuls(program.lower(*arguments(policies)).compile().as_text())


def test_executed_matmuls_are_those_of_forward_backward_and_recomputation():
    assert matmuls(GC) == N * (3 + 6 + 2)
    assert matmuls(KEPT) == N * (3 + 6)
    assert matmuls(GC[:2] + KEPT[2:]) == N * 9 + 4
    # A first block alone is inlined, and the gradient of its input, two matmuls, is never read.
    assert matmuls(GC[:1] + KEPT[1:]) == N * 9 + 2 - 2


def test_branches_count_at_their_most_and_text_without_an_entry_is_refused():
    def branch(x):
        return jax.lax.cond(x.sum() > 0, lambda x: x @ x @ x, lambda x: x @ x, x)

    text = jax.jit(branch).lower(jnp.ones((64, 64))).compile().as_text()
    assert executed_matmuls(text) == 2
    with pytest.raises(ValueError, match="no ENTRY"):
        executed_matmuls("HloModule nothing")


def test_profiles_are_paired_and_start_from_the_same_state():
    made = []

    def counted(policies):
        made.append(policies)
        return arguments(policies)

    found = profile_plan(update, counted, {"gc": GC, "kept": KEPT}, repeats=2)
    assert [p.matmuls for p in found.values()] == [N * 11, N * 9]
    assert all(len(p.seconds) == 2 for p in found.values())
    assert found["gc"].to_first == (1, 1, 1) and found["kept"].to_first.median > 0
    # One to compile, then anew before the warm-up and before every turn.
    assert made.count(GC) == made.count(KEPT) == 1 + 1 + 2
    with pytest.raises(ValueError, match="two or more"):
        profile_plan(update, counted, {"gc": GC})


def make_plan(memory):
    return hl.plan(
        update,
        (jax.eval_shape(lambda: arguments(GC)[0]), X),
        blocks=hl.Blocks(mlp, (ONE, X), N),
        budget=hl.Budget(memory, risk=0.0),
        target="cpu",
    )


def test_a_plan_that_lies_is_found_out():
    gc, best = make_plan("1x gc"), make_plan("9x gc")
    found = profile_plan(update, arguments, {"gc": gc, "best": best}, repeats=1)
    assert found["gc"].matmuls - found["best"].matmuls == 2 * N
    # It says that nothing is recomputed, and hands out policies that recompute everything.
    entry = dataclasses.replace(best.entries[0], policy=hl.Policy({}))
    liar = dataclasses.replace(best, policies=GC, menu=(entry,))
    with pytest.raises(ValueError, match=r"'liar' claims to recompute 8 matmuls fewer.*runs 0"):
        profile_plan(update, arguments, {"gc": gc, "liar": liar}, repeats=1)
