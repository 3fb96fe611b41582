"""The planned block is held to what the update names, whatever runs around its blocks."""

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import hilore_jax as hl
from blocks import mlp, params
from hilore_jax.planning import memory
from hilore_jax.planning.menu import Entry
from hilore_jax.planning.named import same_block

N = 3
ONE, X = jax.eval_shape(params), jax.ShapeDtypeStruct((2, 5, 8), jnp.float32)
STACK = jax.tree.map(lambda s: s.update(shape=(N, *s.shape)), ONE)
GC = (hl.Policy({}),) * N
MENU = tuple(Entry(hl.Policy({name: hl.Store()}), 1, 1.0, 0, 0, 0.0) for name in ("gate", "up"))
BLOCKS = hl.Blocks(mlp, (ONE, X), N)


def many(x, count):
    return x.update(shape=(count, *x.shape))


def update(stack, x, block=mlp, policies=GC):
    loss = lambda stack: jnp.sum(jnp.sin(hl.scan_blocks(block, stack, x, policies)))  # noqa: E731
    return jax.grad(loss)(stack)


def microbatches(stack, xs):
    return jax.lax.scan(lambda total, x: (update(stack, x), None), stack, xs)[0]


def counted(stack, xs):
    """As many as there are in `xs`; a loop that jax makes a `while` of."""

    def one(state):
        i, total = state
        return i + 1, jax.tree.map(jnp.add, total, update(stack, xs[i]))

    return jax.lax.while_loop(lambda state: state[0] < len(xs), one, (0, stack))[1]


def sharded(stack, x):
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    cut = lambda stack, x: jax.lax.psum(update(stack, x), "data")  # noqa: E731
    return jax.shard_map(cut, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())(stack, x)


def one_by_one(stack, x):
    """Blocks without a scan, under `hl.remat`."""

    def loss(stack):
        y = x
        for i in range(N):
            y = hl.remat(GC[i])(mlp)(jax.tree.map(lambda w, i=i: w[i], stack), y)
        return jnp.sum(y)

    return jax.grad(loss)(stack)


def check(fn, *args, blocks=BLOCKS, menu=MENU):
    same_block(blocks, menu)(jax.make_jaxpr(fn)(*args).jaxpr)


SAME = {
    "a scan": (update, X),
    "no scan": (one_by_one, X),
    "vmapped first": (jax.vmap(update, (None, 0)), many(X, 4)),
    "vmapped in the middle": (jax.vmap(update, (None, 2)), X.update(shape=(2, 5, 4, 8))),
    "vmapped twice": (jax.vmap(jax.vmap(update, (None, 0)), (None, 0)), many(many(X, 4), 3)),
    "microbatches scanned": (microbatches, many(X, 4)),
    "microbatches in a loop": (counted, many(X, 4)),
    "microbatches mapped": (lambda s, xs: jax.lax.map(lambda x: update(s, x), xs), many(X, 4)),
    "jitted inside": (jax.jit(update), X),
    "cut by shard_map": (sharded, X),
    "recomputed once more": (jax.checkpoint(update), X),
}


@pytest.mark.parametrize("case", SAME)
def test_what_runs_around_the_blocks_is_no_difference(case):
    fn, x = SAME[case]
    check(fn, STACK, x)


def test_what_cuts_for_devices_may_not_cut_at_will():
    with pytest.raises(ValueError, match="are not what the update's blocks are given"):
        check(sharded, STACK, X.update(shape=(6, 5, 8)))


HALF, THIN = X.update(dtype=jnp.bfloat16), jax.eval_shape(lambda: params(f=6))
OTHER = {
    "a larger batch": (
        X.update(shape=(8, 5, 8)),
        ONE,
        r"gate is float32\[8,5,12\].*float32\[2,5,12",
    ),
    "a shorter sequence": (X.update(shape=(2, 4, 8)), ONE, r"gate is float32\[2,4,12\] in the pl"),
    "another dtype": (
        HALF,
        jax.tree.map(lambda s: s.update(dtype=HALF.dtype), ONE),
        r"is bfloat16\[",
    ),
    "another width": (
        X,
        THIN,
        r"gate is float32\[2,5,6\] in the planned block, float32\[2,5,12\] in",
    ),
}


@pytest.mark.parametrize("case", OTHER)
def test_other_shapes_and_dtypes_are_named(case):
    x, weights, message = OTHER[case]
    remedy = r".*; up is .*Give the block the shapes and dtypes of one microbatch"
    with pytest.raises(ValueError, match=message + remedy):
        check(update, STACK, X, blocks=hl.Blocks(mlp, (weights, x), N))
    # All microbatches at once are not one, though the update has the bytes of all.
    if case == "a larger batch":
        with pytest.raises(ValueError, match=message):
            check(microbatches, STACK, many(X, 4), blocks=hl.Blocks(mlp, (weights, x), N))


def test_names_that_the_update_lacks_are_listed():
    def renamed(p, x):
        return x + checkpoint_name(x @ p["gate"], "h") @ p["down"]

    with pytest.raises(ValueError, match=r"names gate, up, the update's program names h\. Does"):
        check(functools.partial(update, block=renamed), STACK, X)
    with pytest.raises(ValueError, match="the update's program names nothing"):
        check(lambda stack, x: stack, STACK, X)


def test_names_that_no_entry_acts_on_are_not_looked_for():
    def half(p, x):  # without the names norm and act
        h = checkpoint_name(x @ p["gate"], "gate") * checkpoint_name(x @ p["up"], "up")
        return x + h @ p["down"]

    check(functools.partial(update, block=half), STACK, X)
    more = (*MENU, dataclasses.replace(MENU[0], policy=hl.Policy({"act": hl.Store()})))
    with pytest.raises(ValueError, match="that names act, the update's program names gate, up"):
        check(functools.partial(update, block=half), STACK, X, menu=more)


def test_a_dead_activation_is_not_looked_for():
    def dead(p, x):
        checkpoint_name(x @ p["up"], "up")
        return mlp(p, x)

    with pytest.raises(ValueError, match="up is"):  # it is there, of another shape
        check(update, STACK, X, blocks=hl.Blocks(lambda p, x: mlp(p, x[:1]), (ONE, X), N))
    check(update, STACK, X, blocks=hl.Blocks(dead, (ONE, X), N))


@pytest.mark.parametrize("rows", [1, 4])
def test_a_plan_for_another_batch_is_refused_before_anything_is_compiled(rows, monkeypatch):
    def never(*args):
        raise AssertionError("compiled")

    monkeypatch.setattr(memory, "compile_for", never)
    planned: Any = lambda policies, stack, x: (update(stack, x, policies=policies), {})  # noqa: E731
    block = hl.Blocks(mlp, (ONE, X.update(shape=(rows, 5, 8))), N)
    with pytest.raises(ValueError, match=re.escape(f"float32[{rows},5,12] in the planned block")):
        hl.plan(planned, (STACK, X), blocks=block, budget=hl.Budget("2x gc"), target="cpu")
