"""`hl.scan_blocks`: equal to a Python loop, in as few scans as policies allow."""

import functools
import itertools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hilore_jax as hl
from blocks import ROUNDING, D, inputs, mlp, params, relative, temp_bytes, wide
from hilore_jax import tracing
from hilore_jax.segments import segments
from hilore_jax.work import live_work

GC = hl.Policy({})
STORE = hl.Policy({"gate": hl.Store(), "up": hl.Store()})
INT8 = hl.Policy({"gate": hl.Compress("int8"), "up": hl.Compress("int8")})
NONE = hl.Policy(default=hl.Store())
BLOCKS = [params(i) for i in range(5)]
STACK = jax.tree.map(lambda *a: jnp.stack(a), *BLOCKS)


def cut(stack, lengths):
    bounds = itertools.pairwise(np.cumsum([0, *lengths]))
    return tuple(jax.tree.map(operator.itemgetter(slice(i, j)), stack) for i, j in bounds)


def loop_loss(stack, x, policies):
    for i, policy in enumerate(policies):
        x = hl.remat(policy)(mlp)(jax.tree.map(lambda a: a[i], stack), x)  # noqa: B023
    return jnp.sum(jnp.sin(x))


def scan_loss(stack, x, policies):
    return jnp.sum(jnp.sin(hl.scan_blocks(mlp, stack, x, policies)))


def scans(fn, *args):
    return sum(e.primitive.name == "scan" for e in jax.make_jaxpr(fn)(*args).jaxpr.eqns)


@pytest.mark.newest
@pytest.mark.parametrize(
    ("policies", "count"),
    [
        ([GC] * 5, 1),
        ([INT8] * 5, 1),
        ([GC, GC, INT8, INT8, STORE], 3),
        ([STORE, GC, STORE, INT8, NONE], 5),
    ],
)
@pytest.mark.usefixtures("float64")
def test_equals_a_loop_in_one_scan_a_segment(policies, count):
    x = inputs()
    stack = wide(STACK)
    assert scans(lambda s: scan_loss(s, x, policies), stack) == count
    got = jax.grad(scan_loss, (0, 1))(stack, x, policies)
    want = jax.grad(loop_loss, (0, 1))(stack, x, policies)
    assert relative(got, want) < ROUNDING
    exact = jax.grad(loop_loss, (0, 1))(stack, x, [NONE] * 5)
    if INT8 in policies:
        assert 1e-4 < relative(got, exact) < 0.02
    else:
        assert relative(got, exact) < ROUNDING


@pytest.mark.newest
@pytest.mark.parametrize("lengths", [(5,), (2, 3), (1, 1, 3), (1, 1, 1, 1, 1)])
@pytest.mark.usefixtures("float64")
def test_stacks_by_segment_are_neither_cut_nor_joined(lengths):
    x = inputs()
    policies = [INT8] * lengths[0] + [GC] * (5 - lengths[0])
    stack = wide(STACK)
    stacks = cut(stack, lengths)
    jaxpr = jax.make_jaxpr(lambda s: scan_loss(s, x, policies))(stacks).jaxpr
    assert {e.primitive.name for e in jaxpr.eqns} == {"scan", "sin", "reduce_sum"}
    assert scans(lambda s: scan_loss(s, x, policies), stacks) == len(lengths)
    got = jax.grad(scan_loss, 1)(stacks, x, policies)
    assert relative(got, jax.grad(scan_loss, 1)(stack, x, policies)) < ROUNDING


@pytest.mark.usefixtures("float64")
def test_a_stack_that_spans_policies_is_cut_and_still_right():
    x, stack = inputs(), wide(STACK)
    policies = [GC, INT8, INT8, STORE, STORE]
    got = jax.grad(scan_loss, 1)(cut(stack, (2, 3)), x, policies)
    assert relative(got, jax.grad(loop_loss, 1)(stack, x, policies)) < ROUNDING


@pytest.mark.usefixtures("float64")
def test_aux_is_stacked_over_blocks_and_x_may_be_any_pytree():
    def block(p, carry, scale):
        y = mlp(p, carry["h"]) * scale
        return {"h": y, "n": carry["n"] + 1}, {"mean": y.mean(), "shape": (y[0],)}

    x, stack = {"h": inputs(), "n": jnp.array(0)}, wide(STACK)
    policies = [GC, GC, INT8, INT8, NONE]
    out, aux = hl.scan_blocks(block, stack, x, policies, 0.5)
    assert int(out["n"]) == 5 and aux["mean"].shape == (5,) and aux["shape"][0].shape == (5, 5, D)
    y, means = x["h"], []
    for p in wide(BLOCKS):
        y = mlp(p, y) * 0.5
        means.append(y.mean())
    assert relative(out["h"], y) < ROUNDING
    assert relative(aux["mean"], jnp.stack(means)) < ROUNDING


@pytest.mark.usefixtures("float64")
def test_shared_arguments_are_differentiated():
    def block(p, x, scale):
        return mlp(p, x) * scale

    x, stack = inputs(), wide(STACK)
    f = lambda s, policies: hl.scan_blocks(block, stack, x, policies, s).sum()  # noqa: E731
    want = jax.grad(f)(0.7, [NONE] * 5)
    assert relative(jax.grad(f)(0.7, [GC, GC, STORE, STORE, STORE]), want) < ROUNDING
    assert abs(jax.grad(f)(0.7, [INT8] * 5) / want - 1) < 0.02


@pytest.mark.newest
def test_scanned_residuals_are_encoded_and_recomputation_disappears():
    x = inputs()
    gradient = lambda policy: live_work(  # noqa: E731
        jax.value_and_grad(lambda s: scan_loss(s, x, [policy] * 5)), STACK
    )
    none, gc, int8 = (gradient(p).matmuls for p in (NONE, GC, INT8))
    assert (gc - none, int8 - none) == (2 * 5, 0)
    kept = tracing.saved_residuals(lambda s: scan_loss(s, x, [INT8] * 5), STACK)
    encoded = [r for r in kept if r.dtype == "int8"]
    assert [r.shape for r in encoded] == [(5, 3, 5, 12)] * 2
    full = [r.shape for r in kept if r.dtype == "float32" and "argument" not in r.origin]
    assert (5, 3, 5, 12) not in full


@pytest.mark.usefixtures("float64")
def test_disabled_scans_the_plain_block():
    x, stack = inputs(), wide(STACK)
    with hl.disabled():
        _, tangent = jax.jvp(lambda x: scan_loss(stack, x, [INT8, GC, GC, GC, GC]), (x,), (x,))
    want = jax.jvp(lambda x: loop_loss(stack, x, [NONE] * 5), (x,), (x,))[1]
    assert relative(tangent, want) < ROUNDING


def _temp(stack, x, policies, argnums):
    options = hl.compiler_options()
    lowered = jax.jit(jax.grad(lambda s, x: scan_loss(s, x, policies), argnums)).lower(stack, x)
    return temp_bytes(lowered.compile(compiler_options=options))


@pytest.mark.parametrize("argnums", [0, 1], ids=["trained", "frozen"])
def test_segments_of_equal_policy_do_not_copy_the_weights(argnums):
    blocks = [params(i, 64, 256) for i in range(6)]
    stack = jax.tree.map(lambda *a: jnp.stack(a), *blocks)
    weights = sum(a.nbytes for a in jax.tree.leaves(stack))
    x = inputs(shape=(2, 16, 64))
    one = _temp(stack, x, [STORE] * 6, argnums)
    for lengths in ((3, 3), (2, 2, 2), (1, 1, 1, 1, 2)):
        parts = cut(stack, lengths)
        assert _temp(parts, x, [STORE] * 6, argnums) - one <= 0.02 * weights, lengths


def test_scanned_memory_of_compression():
    blocks = [params(i, 64, 256) for i in range(6)]
    stack = jax.tree.map(lambda *a: jnp.stack(a), *blocks)
    x = inputs(shape=(4, 64, 64))
    exact = _temp(stack, x, [STORE] * 6, 0)
    for codec in ("int8", "int4", "fp8_e4m3", "fp8_e5m2"):
        policy = hl.Policy({n: hl.Compress(codec, tile=64) for n in ("gate", "up")})
        spared = 6 * hl.explain(policy, mlp, blocks[0], x).compression_savings
        assert _temp(stack, x, [policy] * 6, 0) <= exact - 0.9 * spared, codec


@pytest.mark.parametrize(
    ("policies", "message"),
    [
        (GC, "a Policy: expected a sequence"),
        ([GC] * 4, "4 policies for 5 blocks"),
        ([], "0 policies for 5 blocks"),
        (
            ["gc"] * 5,
            r"scan_blocks takes an hl\.Policy, found the text 'gc': write hl\.parse_policy",
        ),
        ([hl.Policy({"gaet": hl.Store()})] * 5, r"\['gaet'\] not found"),
    ],
)
def test_bad_policies(policies, message):
    with pytest.raises((TypeError, ValueError), match=message):
        hl.scan_blocks(mlp, STACK, inputs(), policies)


def test_bad_stacks_and_blocks():
    x = inputs()
    uneven = {**STACK, "up": STACK["up"][:3]}
    with pytest.raises(ValueError, match=r"leading axes.*'down'.*: 5.*'up'.*: 3"):
        hl.scan_blocks(mlp, uneven, x, [GC] * 5)
    with pytest.raises(ValueError, match=r"'scale'.*is a scalar.*\*shared"):
        hl.scan_blocks(mlp, {**STACK, "scale": jnp.array(1.0)}, x, [GC] * 5)
    with pytest.raises(ValueError, match=r"tuple of stacks is read as one stack for each segment"):
        hl.scan_blocks(lambda p, x: x, (STACK["gate"], STACK["up"]), x, [GC] * 5)
    with pytest.raises(ValueError, match=r"bfloat16\[3, 5, 8\] for an input of float32"):
        hl.scan_blocks(lambda p, x: mlp(p, x).astype(jnp.bfloat16), STACK, x, [GC] * 5)
    with pytest.raises(ValueError, match="expected its input's structure"):
        hl.scan_blocks(lambda p, x: {"h": x}, STACK, x, [GC] * 5)
    with pytest.raises(ValueError, match="no arrays to scan over"):
        hl.scan_blocks(mlp, {}, x, [GC] * 5)


def test_segments_are_maximal_runs():
    runs = segments([GC, hl.Policy({}), STORE, GC])
    assert [(r.start, r.stop) for r in runs] == [(0, 2), (2, 3), (3, 4)]


def test_blocks_that_are_not_stacked_say_how_to_stack():
    blocks = [params() for _ in range(5)]
    for given in (blocks, tuple(blocks)):
        with pytest.raises(ValueError, match=r"jax\.tree\.map\(lambda \*leaves: jnp\.stack"):
            hl.scan_blocks(mlp, given, inputs(), [GC] * 5)
    # A list of stacked arrays is a tree like any other.
    w = jnp.ones((2, 4, 4))
    out = hl.scan_blocks(lambda p, x: x @ p[0] @ p[1], [w, w], jnp.ones((1, 4)), [GC] * 2)
    assert out.shape == (1, 4)


def test_a_shared_argument_that_cannot_be_traced_is_closed_over():
    def block(p, x, mode):
        return mlp(p, x) if mode == "a" else x

    message = r"'mode' holds 'a'.*functools\.partial\(block, mode="
    with pytest.raises(TypeError, match=message) as error:
        hl.scan_blocks(block, STACK, inputs(), [GC] * 5, "a")
    assert "static_argnames" not in str(error.value)
    closed = functools.partial(block, mode="a")
    assert hl.scan_blocks(closed, STACK, inputs(), [GC] * 5).shape == inputs().shape
    with pytest.raises(jax.errors.ConcretizationTypeError) as error:
        hl.scan_blocks(lambda p, x, on: x if on else -x, STACK, inputs(), [GC] * 5, True)
    notes = "".join(error.value.__notes__)
    assert "functools.partial" in notes and "static_argnames" not in notes
