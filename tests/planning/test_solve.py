"""`hl.plan` on a small update, on CPU: what it returns fits, is fastest, and is what it says."""

import dataclasses
import functools
import itertools
import json
import pathlib
import re

import jax
import jax.numpy as jnp
import pytest

import hilore_jax as hl
from blocks import mlp, params
from hilore_jax.planning.memory import compiled_memory
from hilore_jax.planning.target import parse_target
from hilore_jax.work import live_work

D, F, N = 32, 96, 6
X = jax.ShapeDtypeStruct((8, 128, D), jnp.float32)
ONE = jax.eval_shape(lambda: params(d=D, f=F))
STACK = jax.tree.map(lambda s: jax.ShapeDtypeStruct((N, *s.shape), s.dtype), ONE)


def arguments(policies):
    """Weights in the segments of the policies, so that no scan copies a slice of them."""
    lengths = [len(list(run)) for _, run in itertools.groupby(policies)]
    stacks = (
        jax.tree.map(lambda s, n=n: jax.ShapeDtypeStruct((n, *s.shape), s.dtype), ONE)
        for n in lengths
    )
    return tuple(stacks), X


BLOCKS = hl.Blocks(mlp, (ONE, X), N)
# Fixed figures instead of measured ones, so that every run finds the same menu.
CPU = dataclasses.replace(parse_target("cpu"), flops=(("float32", 1e10),), bandwidth=2e10)
CODECS = (hl.Compress("int8"), hl.Compress("int4"))


def risks(name, compress):
    return {"int8": 0.002, "int4": 0.03}[compress.codec]


def update(policies, stack, x):
    def loss(stack):
        return jnp.sum(jnp.sin(hl.scan_blocks(mlp, stack, x, policies)))

    return jax.tree.map(lambda a, g: a - 0.1 * g, stack, jax.grad(loss)(stack)), {}


def plan(memory, risk=0.015, fn=update, blocks=BLOCKS, **options):
    budget = hl.Budget(memory, risk, **options)
    return hl.plan(
        fn,
        arguments,
        blocks=blocks,
        budget=budget,
        target=CPU,
        codecs=CODECS,
        risks=risks,
    )


@functools.cache
def made(memory, risk=0.015):
    return plan(memory, risk)


LADDER = ("1.0x gc", "1.2x gc", "2x gc", "4x gc")


@pytest.mark.newest
def test_a_budget_for_everything_recomputes_nothing():
    found = made(LADDER[-1])
    assert found.removed_flops == 1 and found.memory.peak <= found.budget


@pytest.mark.parametrize("memory", LADDER)
def test_the_compiled_peak_fits_and_is_what_another_compilation_says(memory):
    found = made(memory)
    bound = functools.partial(update, found.policies)
    again = compiled_memory(
        bound, *arguments(found.policies), target=parse_target("cpu"), donate=(0,), cache=None
    )
    assert again == found.memory
    assert again.peak <= found.budget == int(float(memory.split("x")[0]) * found.gc.peak)
    assert found.risk <= found.risk_budget
    assert len(found.trials) <= 8


def test_predicted_peaks_are_close_to_compiled_ones():
    # Of many blocks: six keep less than one's transients, which no sum over entries predicts.
    for memory in ("1.1x gc", "2x gc"):
        deep = plan(memory, blocks=dataclasses.replace(BLOCKS, count=4 * N))
        assert deep.predicted == pytest.approx(deep.memory.peak, rel=0.03)
        assert deep.gc.peak < deep.memory.peak <= deep.budget
    assert made("4x gc").predicted == pytest.approx(made("4x gc").memory.peak, rel=0.03)


def test_a_larger_budget_is_never_slower_and_the_ends_are_known():
    seconds = [made(memory).recompute_seconds for memory in LADDER]
    assert seconds == sorted(seconds, reverse=True)
    least = made("1.0x gc")  # what needs no more than GC may still recompute less
    assert least.memory.peak <= least.gc.peak == least.budget
    assert made("4x gc").removed_flops == 1
    assert seconds[0] > seconds[1] > seconds[-1]
    for memory in LADDER:
        assert made(memory).recompute_seconds >= made(memory).bound_seconds * (1 - 1e-9)


def test_what_the_plan_says_is_removed_is_gone_from_the_program():
    def matmuls(policies):
        return live_work(functools.partial(update, policies), *arguments(policies))

    gc, none = matmuls((hl.Policy({}),) * N), matmuls((hl.Policy(default=hl.Store()),) * N)
    for memory in LADDER:
        recomputed = matmuls(made(memory).policies) - none
        assert recomputed.flops == sum(entry.flops for entry in made(memory).entries)
        share = 1 - recomputed.flops / (gc - none).flops
        assert share == pytest.approx(made(memory).removed_flops)


def test_risk_budgets_decide_what_is_compressed():
    def compressed(plan):
        return {p[name].codec for p in plan.policies for name in p.names(hl.Compress)}

    assert compressed(made("1.2x gc", 0.0)) == set()
    assert compressed(made("1.2x gc")) == {"int8"}
    assert "int4" in compressed(made("1.2x gc", 1.0))
    assert made("1.2x gc").recompute_seconds < made("1.2x gc", 0.0).recompute_seconds


def test_absolute_budgets_and_baselines():
    gc = made("1.0x gc").gc.peak
    assert plan(gc).budget == gc and plan(gc).policies == made("1.0x gc").policies

    def wasteful(policies, stack, x):
        state, _ = update(policies, stack, x)
        return state, {"scores": jnp.ones((2 * gc // 4,)) * x.sum()}

    found = plan("1x gc", baseline=wasteful)
    assert found.baseline is not None and found.baseline > 2 * gc
    assert found.budget == found.baseline
    assert found.recompute_seconds < made("1.2x gc").recompute_seconds


def test_a_budget_below_the_least_says_the_least_and_what_it_is_made_of():
    least = made("1.0x gc").gc
    with pytest.raises(ValueError, match=f"needs {least.peak}: ") as caught:
        plan(least.peak - 1)
    rest = least.outputs - least.aliased
    parts = {"arguments": least.arguments, "temporaries": least.temporaries}
    parts["outputs that are not donated"] = rest
    largest = sorted(parts.items(), key=lambda part: -part[1])
    assert ", ".join(f"{name} {size}" for name, size in largest) in str(caught.value)
    assert f"budget is {least.peak - 1} bytes" in str(caught.value)


def test_an_update_that_ignores_its_policies_is_found_out():
    def ignores(policies, stack, x):
        return update((hl.Policy({}),) * N, stack, x)

    with pytest.raises(ValueError, match=r"does not depend on the policies: .*6 x gc both have"):
        plan("2x gc", fn=ignores)


def test_counts_that_differ_and_updates_that_do_not_trace():
    with pytest.raises(ValueError, match="policies for 6 blocks"):
        hl.plan(
            update,
            (STACK, X),
            blocks=dataclasses.replace(BLOCKS, count=7),
            budget=hl.Budget("2x gc"),
            target="cpu",
        )
    with pytest.raises(ValueError, match=r"count=0"):
        dataclasses.replace(BLOCKS, count=0)

    def steers(policies, stack, x):
        return update(policies, stack, x) if x.sum() > 0 else (stack, {})

    with pytest.raises(jax.errors.TracerBoolConversionError) as caught:
        plan("2x gc", fn=steers)
    assert re.search(r"hl\.plan traces .*steers.*functools\.partial", caught.value.__notes__[-1])

    def words(policies, stack, x):
        return stack, {"loss": "small"}

    with pytest.raises(TypeError, match=r"valid JAX type|returned a value of type") as caught:
        plan("2x gc", fn=words)
    assert "it returns arrays" in caught.value.__notes__[-1]


def test_plans_are_saved_and_loaded(tmp_path):
    path = tmp_path / "plan.json"
    made("1.2x gc").save(path)
    assert hl.Plan.load(path) == made("1.2x gc")
    assert hl.Plan.load(path, made("4x gc").fingerprint) == made("1.2x gc")
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


def test_a_plan_for_another_situation_is_refused(tmp_path):
    path = tmp_path / "plan.json"
    made("1.2x gc").save(path)
    with pytest.raises(ValueError, match="target: planned for cpu; found cuda:h200"):
        hl.Plan.load(path, {"target": "cuda:h200"})
    fields = json.loads(path.read_text())
    fields["fingerprint"]["jax"] = "0.4.1"
    path.write_text(json.dumps(fields))
    with pytest.raises(ValueError, match=r"jax: planned for 0\.4\.1; found"):
        hl.Plan.load(path)


def test_an_interrupted_save_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "plan.json"
    made("1.2x gc").save(path)

    whole = pathlib.Path.write_text

    def interrupted(self, text):
        whole(self, text[:100])
        raise KeyboardInterrupt

    monkeypatch.setattr(pathlib.Path, "write_text", interrupted)
    for each in (path, tmp_path / "new.json"):
        with pytest.raises(KeyboardInterrupt):
            made("4x gc").save(each)
    monkeypatch.undo()
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]
    assert hl.Plan.load(path) == made("1.2x gc")


def test_the_table_says_what_is_done_and_why_not_more():
    text = made("1.2x gc").explain()
    head = text.splitlines()[1].split()
    assert head[:1] == ["blocks"] and {"gate", "up"} <= set(head)
    assert "seconds are modelled" in text and "peak: compiled" in text
    assert "more are needed" in text or "the risk would be" in text
    ranges = [line.split()[0] for line in text.splitlines()[2:] if line[0].isdigit()]
    assert len(ranges) > 1 and all(f"\n  {blocks}: " in text for blocks in ranges)
    assert "no block can be faster" in made("4x gc").explain()


def test_pareto_peaks_rise_as_the_search_found_them_to():
    """A mesh of eight divides what blocks keep: eight times the peak is no negative one."""
    found = made("1.2x gc")
    assert found.share is not None and 0.25 <= found.share <= 1
    kept, gc = sum(e.nbytes for e in found.entries), found.gc.peak
    menu = tuple(dataclasses.replace(e, nbytes=100 * e.nbytes) for e in found.menu)
    mesh = dataclasses.replace(found, menu=menu, share=found.share / 100)
    for each, share in ((found, found.share), (mesh, found.share / 100)):
        rows = each.pareto()
        peaks = [row["peak"] for row in rows]
        assert peaks[0] == gc and min(peaks) > 0 and peaks == sorted(peaks)
        most = N * max(e.nbytes for e in each.menu)
        beyond = most - sum(e.nbytes for e in each.entries)
        assert peaks[-1] == pytest.approx(found.memory.peak + share * beyond)
    # Of an older file, that does not know the slope: no negative peak either.
    older = dataclasses.replace(mesh, share=None).pareto()
    assert min(row["peak"] for row in older) == gc and kept > 0


def test_pareto_rows_fall_and_start_at_gc(tmp_path):
    rows = made("1.2x gc").pareto()
    assert rows[0]["peak"] == made("1.2x gc").gc.peak and rows[0]["removed_flops"] == 0
    seconds = [row["seconds"] for row in rows]
    assert len(rows) > 5 and all(b < a for a, b in itertools.pairwise(seconds))
    assert all(row["risk"] <= 0.015 for row in rows)
    made("1.2x gc").plot(tmp_path / "pareto.png")
    assert (tmp_path / "pareto.png").stat().st_size > 10_000
