"""Modelled seconds: hand-computed rooflines, fusion, and the real backward program's equations."""

import math

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

import hilore_jax as hl
from blocks import D, F
from hilore_jax import codecs, tracing
from hilore_jax.planning import cost
from hilore_jax.planning.backward import Figures
from hilore_jax.planning.cost import Roofline, recompute_seconds
from hilore_jax.work import Work
from planner_blocks import CASES, INT8, MLP, Device, X, evaluated, mlp, policy_risk, shape

ROWS = 3 * 5
FAST = Device(bandwidth=1e30)  # only FLOPs count
SLOW = Device(bandwidth=1.0, peak=1e30)  # only bytes count


def program(fn, *args, device):
    return Roofline(device).program(tracing.trace(fn, *args).jaxpr)


def test_a_matmul_takes_the_longer_of_its_flops_and_its_bytes():
    a, b = shape(2, 3, 4), shape(2, 4, 5)
    flops, nbytes = 2 * 2 * 3 * 4 * 5, 4 * (24 + 40 + 30)
    for device in (FAST, SLOW, Device()):
        expected = max(flops / device.peak, nbytes / device.bandwidth)
        assert program(jnp.matmul, a, b, device=device) == pytest.approx(expected)


def test_the_peak_is_that_of_the_operands_dtype():
    class Two(Device):
        def flops_of(self, dtype):
            return {"bfloat16": 8.0, "float32": 1.0}[dtype]

    def seconds(dtype):
        x = shape(4, 4, dtype=dtype)
        return program(jnp.matmul, x, x, device=Two(bandwidth=1e30))

    assert seconds(jnp.float32) == 128.0 and seconds(jnp.bfloat16) == 16.0


@pytest.mark.newest
def test_elementwise_chains_read_and_write_once():
    x = shape(10)
    assert program(lambda x: jnp.exp(jnp.sin(x) * 2 + 1), x, device=SLOW) == 80
    assert program(lambda x, y: jnp.sin(x) * y, x, x, device=SLOW) == 120
    # A reduction takes its chain along: it reads x and writes a scalar.
    assert program(lambda x: jnp.sum(x * x), x, device=SLOW) == 44
    # A matmul does not: the chain before it is written, and read again.
    w = shape(10, 3)
    chain = program(lambda x, w: jnp.sin(x * 2) @ w, x, w, device=SLOW)
    assert chain == 80 + program(jnp.matmul, x, w, device=SLOW)
    # Another view of the same numbers is free.
    assert program(lambda x: x.reshape(2, 5).T, x, device=SLOW) == 0
    # A named value is written, since a policy may keep it.
    named = program(lambda x: jnp.sin(checkpoint_name(jnp.cos(x), "h")), x, device=SLOW)
    assert named == 160


@pytest.mark.newest
def test_loops_count_their_length_branches_their_most_and_calls_their_inside():
    w = shape(4, 4)
    one = program(jnp.matmul, w, w, device=FAST)
    scan = program(
        lambda w: jax.lax.scan(lambda c, _: (c @ w, None), w, length=7)[0], w, device=FAST
    )
    assert scan == pytest.approx(7 * one)
    branch = program(
        lambda w: jax.lax.cond(w[0, 0] > 0, lambda: w @ w @ w, lambda: w), w, device=FAST
    )
    assert branch == pytest.approx(2 * one)
    call = jax.custom_vjp(lambda a: a @ a)
    call.defvjp(lambda a: (a @ a, a), lambda a, g: (g,))
    assert program(call, w, device=FAST) == pytest.approx(one)
    assert program(jax.jit(lambda a: a @ a), w, device=FAST) == pytest.approx(one)


def test_an_opaque_kernel_takes_its_bytes():
    from jax.experimental import pallas as pl

    def double(x_ref, o_ref):
        o_ref[...] = x_ref[...] * 2

    x = shape(8, 16)
    kernel = pl.pallas_call(double, out_shape=x, interpret=True)
    assert program(kernel, x, device=SLOW) == 2 * 4 * 128


@pytest.mark.newest
def test_codecs_and_transfers_take_their_traffic():
    aval = tracing.trace(lambda x: x, X).jaxpr.invars[0].aval
    exact, encoded = 4 * ROWS * D, codecs.nbytes((3, 5, D), "int8", tile=None)
    roofline = Roofline(Device())
    assert roofline.keeping(INT8, aval) == pytest.approx(2 * (exact + encoded) / 1e9)
    assert roofline.keeping(hl.Offload(), aval) == pytest.approx(2 * exact / 1e8)
    assert roofline.keeping(hl.Store(), aval) == roofline.keeping(hl.Recompute(), aval) == 0
    assert Roofline(Device(host_link=0.0)).keeping(hl.Offload(), aval) == math.inf
    assert roofline.source == "modelled"


@pytest.mark.newest
def test_recompute_seconds_by_hand():
    def seconds(policy, device, argnums=None):
        return recompute_seconds(
            hl.parse_policy(policy), mlp, MLP, X, argnums=argnums, target=device
        )

    product = 2 * ROWS * D * F / FAST.peak
    assert seconds("gc", FAST) == pytest.approx(2 * product)  # gate and up; down is the end
    assert seconds("gate=store", FAST) == pytest.approx(product)
    assert seconds("gate=store,up=int8:axis=-1:tile=128", FAST) == pytest.approx(0, abs=1e-20)
    assert seconds("store", SLOW) == 0
    # Bytes: the weight gradients read norm (reads x and the mean's root, writes itself; the mean
    # reads x) and act (reads gate and up, writes itself).
    x, wide, row = 4 * ROWS * D, 4 * ROWS * F, 4 * ROWS
    norm, act = (x + row) + (x + row + x), 3 * wide
    assert seconds("gate=store,up=store", SLOW) == pytest.approx(norm + act)
    assert seconds("gate=store,up=store,norm=store", SLOW) == pytest.approx(x + row + act)
    assert seconds("gate=store,up=store,norm=store,act=store", SLOW) == pytest.approx(x + row)
    decoded = 2 * (wide + ROWS * F + 2 * ROWS)
    compressed = "gate=store,up=int8:axis=-1:tile=128,norm=store,act=store"
    assert seconds(compressed, SLOW) == pytest.approx(x + row + decoded)
    # With frozen weights neither norm nor act is read.
    assert seconds("gate=store,up=store", SLOW, argnums=(1,)) == pytest.approx(x + row)


@pytest.mark.parametrize("case", ["attention", "twice", "residual"])
def test_keeping_exactly_more_is_never_slower(case):
    program, found = evaluated(case)
    roofline = Roofline(Device())
    seconds = {p: roofline.backward(program, p, f) for p, f in found if not policy_risk(p)}
    assert min(seconds.values()) >= 0
    for policy, mine in seconds.items():
        for name in policy.names(hl.Recompute):
            more = hl.Policy({**dict(policy.actions), name: hl.Store()})
            assert seconds[more] <= mine * (1 + 1e-9), (str(policy), name)
    assert len(set(seconds.values())) > 2


def test_where_graph_and_program_differ_the_program_counts_and_it_is_logged(caplog):
    program, found = evaluated("mlp")
    policy, figures = next((p, f) for p, f in found if not p.names(hl.Store))
    honest = Roofline(FAST).backward(program, policy, figures)
    key = next(key for key in figures.equations if key[0] == "dot_general")
    more = Figures(
        figures.nbytes, 0, Work(0, 0), figures.equations + type(figures.equations)([key])
    )
    cost._log_once.cache_clear()
    with caplog.at_level("WARNING", "hilore_jax"):
        found = Roofline(FAST).backward(program, policy, more)
    assert found == pytest.approx(honest + 2 * ROWS * D * F / FAST.peak)
    assert "other equations again than its graph says" in caplog.text
    cost._log_once.cache_clear()


def test_figures_refuse_the_policy_without_backward_of_its_own():
    program, _ = evaluated("twice")
    with pytest.raises(ValueError, match="no backward program of its own"):
        program.figures(hl.Policy(default=hl.Store()))
    assert set(CASES) > {"twice"}
