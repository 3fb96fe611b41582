"""Measured plans: equal starts, turns, and claims checked against the compiled program."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

import hilore_jax as hl
from blocks import mlp, params
from hilore_jax.planning.claims import PLAIN, check_claims
from hilore_jax.planning.executed import Executed, executed_matmuls
from hilore_jax.planning.menu import Entry
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
    return executed_matmuls(program.lower(*arguments(policies)).compile().as_text()).matmuls


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
    assert executed_matmuls(text) == (2, 2 * 2 * 64**3)
    with pytest.raises(ValueError, match="no ENTRY"):
        executed_matmuls("HloModule nothing")


def test_flops_of_library_calls_and_unreadable_products():
    dimensions = '{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}'
    text = """
ENTRY %main (a: bf16[4,8], b: bf16[8,6]) -> bf16[4,6] {
  %a = bf16[4,8]{1,0} parameter(0)
  %b = bf16[8,6]{1,0} parameter(1)
  %g = (bf16[4,6]{1,0}, s8[9]{0}) custom-call(%a, %b), custom_call_target="__cublas$gemm", CONFIG
  %f = (bf16[4,6]{1,0}, u8[0]{0}) custom-call(%a, %b), custom_call_target="__cudnn$fmhaSoftmax"
  ROOT %d = bf16[4,6]{1,0} dot(bf16[4,8]{1,0} %a, bf16[8,6]{1,0} %b), lhs_contracting_dims={1}
}
""".replace("CONFIG", f'backend_config={{"dot_dimension_numbers":{dimensions}}}')
    assert executed_matmuls(text) == (2, 2 * 2 * 4 * 6 * 8)
    assert executed_matmuls(text.replace("lhs_contracting_dims={1}", "")) == (2, None)


def test_profiles_are_paired_and_start_from_the_same_state():
    made = []

    def counted(policies):
        made.append(policies)
        return arguments(policies)

    found = profile_plan(update, counted, {"gc": GC, "kept": KEPT}, repeats=2)
    assert [p.matmuls for p in found.values()] == [N * 11, N * 9]
    assert all(len(p.seconds) == 2 for p in found.values())
    assert found["gc"].to_first == (1, 1, 1) and found["kept"].to_first.median > 0
    for each in found.values():
        low, high = each.spread
        assert min(each.seconds) <= low <= each.median <= high <= max(each.seconds)
    # One to compile, then anew before the warm-up and before every turn.
    assert made.count(GC) == made.count(KEPT) == 1 + 1 + 2
    with pytest.raises(ValueError, match="two or more"):
        profile_plan(update, counted, {"gc": GC})


def test_every_turn_starts_from_copies_of_the_same_arrays(monkeypatch):
    starts = []

    def timer(runs, repeats, prepare):
        for name in [*runs] * 2:
            given = prepare[name]()
            starts.append(jax.tree.map(lambda a: a + 0, given))
            runs[name](given)
            assert all(leaf.is_deleted() for leaf in jax.tree.leaves(given[0]))  # donated
        return {name: [1.0] * repeats for name in runs}

    monkeypatch.setattr("hilore_jax.planning.profile.interleaved", timer)
    args = arguments(GC)
    found = profile_plan(update, args, {"gc": GC, "kept": KEPT}, repeats=3)
    assert len(starts) == 4 and found["kept"].to_first == (1, 1, 1)
    for start in starts:
        same = jax.tree.map(lambda a, b: bool((a == b).all()), start, args)
        assert all(jax.tree.leaves(same))


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
    with pytest.raises(ValueError, match=r"'liar' is not .*recompute 0 FLOPs .*runs \d+ more"):
        profile_plan(update, arguments, {"gc": gc, "liar": liar}, repeats=1)


def test_an_update_that_ignores_a_plan_is_found_out_beside_plain_policies():
    def ignores(policies, stack, x):
        return update(GC, stack, x)

    best = make_plan("9x gc")
    with pytest.raises(ValueError, match=r"'gc' is not .*recompute \d+ FLOPs .*runs 0 more"):
        profile_plan(ignores, arguments, {"gc": GC, "best": best}, repeats=1)


def test_claims_are_compared_in_flops_and_in_matmuls_where_these_are_unknown():
    menu = (Entry(hl.Policy({}), 0, 1.0, 2, 100, 0.0), Entry(KEPT[0], 9, 0.5, 1, 40, 0.0))
    plan = dataclasses.replace(make_plan("1x gc"), policies=KEPT, menu=menu)
    plans = {"gc": GC, "plan": plan, "store": (PLAIN,) * N}
    plain, gc = Executed(80, 600), Executed(80 + 2 * N, 600 + 100 * N)

    def check(found, store=plain):
        check_claims(plans, {"gc": gc, "plan": found, "store": store}, plain)

    check(Executed(80 + N, 600 + 40 * N))
    check(Executed(99, 600 + 40 * N))  # some were joined in the plain program
    check(Executed(80 + N, None))
    check(Executed(80 + 1, 600 + 40))  # most were merged with others
    for found in [
        Executed(80 + N, 600 + 40 * N + 1),
        Executed(80 + N + 1, None),
        plain,
        Executed(80, None),
    ]:
        with pytest.raises(ValueError, match="'plan' is not what it claims"):
            check(found)
    with pytest.raises(ValueError, match="'store' is not what it claims"):
        check(Executed(80 + N, 600 + 40 * N), store=gc)
    many = {name: Executed(80, 600 + 3 * flops) for name, flops in [("gc", 400), ("plan", 160)]}
    check_claims({"gc": GC, "plan": plan}, many, plain, microbatches=3)
    # What no plan says anything about is not held to anything, nor is a first block alone.
    other = {"other": (hl.parse_policy("norm=store"),) * N, "plan": plan}
    check_claims(other, {"other": Executed(1, 1), "plan": Executed(84, 760)}, plain)
    check_claims({"gc": GC, "kept": KEPT}, {"gc": Executed(1, 1), "kept": gc}, plain)
    alone = dataclasses.replace(plan, policies=(GC[0], *KEPT[1:]))
    check_claims({"alone": alone}, {"alone": Executed(70, 500)}, plain)
