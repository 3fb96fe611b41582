"""`hl.gated_blocks`: equal to the static plans that its flags spell, in one executable."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import hilore_jax as hl
from blocks import ROUNDING, inputs, mlp, params, relative, temp_bytes, wide
from hilore_jax import tracing
from hilore_jax.gated_scan import exact_part

GC = hl.Policy({})
INT8 = hl.Policy({"gate": hl.Compress("int8"), "up": hl.Compress("int8")})
MIXED = hl.Policy({"gate": hl.Compress("int4", tile=4), "up": hl.Store()})
NONE = hl.Policy(default=hl.Store())
N = 5
STACK = jax.tree.map(lambda *a: jnp.stack(a), *[params(i) for i in range(N)])
LAYOUTS = {
    "one": (INT8,) * N,
    "several": (INT8, MIXED, MIXED, GC, NONE),
    "apart": (INT8, GC, INT8, NONE, MIXED),
}


def compiled(function, **options) -> Any:
    return jax.jit(function, compiler_options=hl.compiler_options(), **options)


@functools.partial(compiled, static_argnums=3)
def by_flags(stack, x, flags, policies):
    run = lambda stack, x: hl.gated_blocks(mlp, stack, x, policies, jnp.zeros(len(policies)))  # noqa: E731
    (y, token), pull = jax.vjp(run, stack, x)
    return y, pull((jnp.cos(y), flags.astype(token.dtype)))


@functools.partial(compiled, static_argnums=2)
def by_plan(stack, x, policies):
    y, pull = jax.vjp(lambda s, x: hl.scan_blocks(mlp, s, x, policies), stack, x)
    return y, pull(jnp.cos(y))


def spelled(policies, flags):
    return tuple(p if f > 0 else exact_part(p) for p, f in zip(policies, flags, strict=True))


@pytest.mark.parametrize("policies", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.usefixtures("float64")
def test_flags_spell_static_plans(policies):
    stack = wide(STACK)
    x, traces = inputs(), by_flags._cache_size()
    exact, found = by_plan(stack, x, (GC,) * N)[1], []
    for flags in ([0, 0, 0, 0, 0], [1, 1, 1, 1, 1], [1, 0, 0, 1, 0]):
        y, grads = by_flags(stack, x, jnp.array(flags, jnp.float32), policies)
        want_y, want = by_plan(stack, x, spelled(policies, flags))
        assert relative(y, want_y) < ROUNDING
        assert relative(grads, want) < ROUNDING
        found.append(relative(grads, exact))
    assert found[0] < ROUNDING  # recompute
    assert 1e-4 < found[2] < found[1] < 0.2  # the flags really change what backward reads
    assert by_flags._cache_size() == traces + 1


@pytest.mark.usefixtures("float64")
def test_only_a_positive_number_decodes():
    stack = wide(STACK)
    x, exact = inputs(), by_plan(stack, inputs(), (GC,) * N)[1]
    flags = jnp.array([np.nan, -1.0, 0.0, -np.inf, -0.0])
    assert relative(by_flags(stack, x, flags, LAYOUTS["one"])[1], exact) < ROUNDING
    # Without any cotangent of the token nothing decodes, and no branch is compiled.
    loss = lambda s: jnp.sum(jnp.sin(hl.gated_blocks(mlp, s, x, [INT8] * N, jnp.zeros(N))[0]))  # noqa: E731
    assert relative(jax.grad(loss)(stack), exact[0]) < ROUNDING
    jaxpr = jax.make_jaxpr(jax.grad(loss))(stack).jaxpr
    assert "cond" not in {e.primitive.name for e in tracing.primitives(jaxpr)}


def test_the_token_is_an_identity():
    token = jnp.arange(float(N))
    run = lambda t: hl.gated_blocks(mlp, STACK, inputs(), LAYOUTS["several"], t)[1]  # noqa: E731
    out, pull = jax.vjp(run, token)
    np.testing.assert_array_equal(out, token)
    np.testing.assert_array_equal(pull(token)[0], token)


@pytest.mark.usefixtures("float64")
def test_aux_shared_trees_and_integers():
    stack = wide(STACK)

    def block(p, carry, scale):
        y = mlp(p, carry["h"]) * scale["by"]
        return {"h": y, "n": carry["n"] + 1}, {"mean": y.mean(), "count": carry["n"]}

    x = {"h": inputs(), "n": jnp.array(0)}
    captured = jnp.array(0.5)

    def run(scan, stack, h, by):
        outer = lambda p, c, s: block(p, c, {"by": s["by"] * captured * 2})  # noqa: E731
        return scan(outer, stack, {**x, "h": h}, {"by": by})

    def loss(scan, stack, h, by):
        out, aux = run(scan, stack, h, by)
        return jnp.sum(jnp.sin(out["h"])) + jnp.sum(aux["mean"] ** 2)

    def gated(flags, *args):
        def scan(b, s, x, shared):
            return hl.gated_blocks(b, s, x, LAYOUTS["several"], jnp.zeros(N), shared)

        def both(*args):
            (out, aux), token = run(scan, *args)
            return (out["h"], aux["mean"], token), (out["n"], aux["count"])

        (h, mean, _), pull, counted = jax.vjp(both, *args, has_aux=True)
        return counted, pull((jnp.cos(h), 2 * mean, flags))

    args = stack, x["h"], jnp.array(0.7)
    for flag in (0.0, 1.0):
        policies = LAYOUTS["several"] if flag else (GC,) * N
        plan = lambda b, s, x, shared: hl.scan_blocks(b, s, x, policies, shared)  # noqa: B023, E731
        want = jax.grad(functools.partial(loss, plan), (0, 1, 2))(*args)
        (count, counts), found = jax.jit(gated)(jnp.full(N, flag), *args)
        assert int(count) == 5 and counts.tolist() == [0, 1, 2, 3, 4]
        assert relative(found, want) < ROUNDING


@pytest.mark.usefixtures("float64")
def test_stacks_by_segment_and_frozen_weights():
    stack = wide(STACK)
    x, flags = inputs(), jnp.array([1.0, 0, 1, 1, 0])
    cut = lambda i, j: jax.tree.map(lambda a: a[i:j], stack)  # noqa: E731
    policies = LAYOUTS["several"]
    _, (grads, _) = by_flags((cut(0, 1), cut(1, 3), cut(3, 4), cut(4, 5)), x, flags, policies)
    joined = jax.tree.map(lambda *a: jnp.concatenate(a), *grads)
    assert relative(joined, by_flags(stack, x, flags, policies)[1][0]) < ROUNDING

    def only_gate(gate, flags):
        run = lambda g: hl.gated_blocks(mlp, {**stack, "gate": g}, x, policies, jnp.zeros(N))  # noqa: E731
        (y, _), pull = jax.vjp(run, gate)
        return pull((jnp.cos(y), flags))[0]

    want = by_flags(stack, x, flags, policies)[1][0]["gate"]
    assert relative(jax.jit(only_gate)(stack["gate"], flags), want) < ROUNDING
    # The gradients of frozen weights are not computed, in neither way.
    matmuls = lambda f, *a: sum(  # noqa: E731
        e.primitive.name == "dot_general" for e in tracing.primitives(jax.make_jaxpr(f)(*a).jaxpr)
    )
    all_of = lambda s, f: by_flags.__wrapped__(s, x, f, policies)[1]  # noqa: E731
    assert matmuls(only_gate, stack["gate"], flags) < matmuls(all_of, stack, flags)


def test_what_backward_never_reads_is_not_kept():
    policy = hl.Policy({n: hl.Compress("int8") for n in ("norm", "gate", "up", "act")})
    run = lambda x: hl.gated_blocks(mlp, STACK, x, [policy] * N, jnp.zeros(N))  # noqa: E731
    kept = tracing.saved_residuals(run, inputs())
    codes = [r.shape for r in kept if r.dtype == "int8"]
    # Frozen weights: nothing reads the norm or the activation.
    assert codes == [(N, 3, 5, 12)] * 2
    full = [r.shape for r in kept if r.dtype == "float32" and "argument" not in r.origin]
    assert full.count((N, 3, 5, 8)) == 1  # the inputs, for the way that recomputes
    assert (N, 3, 5, 12) not in full


def test_memory_is_that_of_the_plan():
    n = 24
    stack = jax.tree.map(lambda *a: jnp.stack(a), *[params(i, 16, 64) for i in range(n)])
    policy = hl.Policy({**{k: hl.Compress("int8", tile=64) for k in ("gate", "up")}})
    x, policies = inputs(shape=(4, 64, 16)), (policy,) * n
    gate = temp_bytes(by_flags.lower(stack, x, jnp.zeros(n), policies).compile())
    plan = temp_bytes(by_plan.lower(stack, x, policies).compile())
    gc = temp_bytes(by_plan.lower(stack, x, (GC,) * n).compile())
    assert gc < plan
    assert gate <= 1.02 * plan, (gate, plan, gc)


def test_vmap_is_refused():
    message = r"gated_blocks under jax\.vmap \(an axis of 2\)"
    x = jnp.stack([inputs(), inputs(2)])
    run = lambda x: hl.gated_blocks(mlp, STACK, x, LAYOUTS["one"], jnp.zeros(N))  # noqa: E731
    with pytest.raises(ValueError, match=message):
        jax.vmap(run)(x)
    with pytest.raises(ValueError, match=message):
        jax.jit(jax.vmap(jax.grad(lambda x: run(x)[0].sum())))(x)
    (y, _), pull = jax.vjp(run, x[0])
    with pytest.raises(ValueError, match=message):
        jax.vmap(lambda f: pull((y, f)))(jnp.zeros((2, N)))


def sharded(x, spec):
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    return jax.device_put(x, NamedSharding(mesh, spec))


@pytest.mark.newest
@pytest.mark.usefixtures("float64")
def test_rows_on_two_devices_take_one_flag_or_their_own():
    stack = wide(STACK)
    x, policies = inputs(shape=(4, 5, 8)), LAYOUTS["apart"]
    flags = jnp.array([[1.0, 0, 0, 0, 1], [0, 0, 1, 0, 1]])
    whole = by_flags(stack, x, flags[0], policies)[1]
    found = by_flags(stack, sharded(x, P("data")), sharded(flags[0], P()), policies)[1]
    assert not found[1].sharding.is_fully_replicated
    assert relative(jax.device_get(found), jax.device_get(whole)) < ROUNDING

    def on_each(stack, x, flags):
        token = jax.lax.pcast(jnp.zeros(N), "data", to="varying")
        run = lambda s, x: hl.gated_blocks(mlp, s, x, policies, token)  # noqa: E731
        (y, _), pull = jax.vjp(run, stack, x)
        return pull((jnp.cos(y), flags[0]))

    specs = P(), P("data"), P("data")
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    mapped = jax.shard_map(on_each, mesh=mesh, in_specs=specs, out_specs=specs[:2])
    grads, d_x = compiled(mapped)(stack, x, flags)
    halves = [by_flags(stack, x[2 * i : 2 * i + 2], flags[i], policies)[1] for i in range(2)]
    want = jax.tree.map(jnp.add, halves[0][0], halves[1][0])
    assert relative(grads, want) < ROUNDING
    assert relative(d_x, jnp.concatenate([half[1] for half in halves])) < ROUNDING
    assert relative(grads, whole[0]) > 1e-4  # with one flag for both


@pytest.mark.usefixtures("float64")
def test_inside_scan_disabled_and_forward_mode():
    stack = wide(STACK)

    def loss(s, flags):
        return by_flags.__wrapped__(s, inputs(), flags, LAYOUTS["one"])[1]

    rows = jnp.array([[0.0] * N, [1.0] * N])
    stacked = jax.lax.scan(lambda c, f: (c, loss(stack, f)), 0, rows)[1]
    for i in range(2):
        one = jax.tree.map(lambda a: a[i], stacked)  # noqa: B023
        assert relative(one, by_flags(stack, inputs(), rows[i], LAYOUTS["one"])[1]) < ROUNDING
    run = lambda x: hl.gated_blocks(mlp, stack, x, LAYOUTS["one"], jnp.zeros(N))[0]  # noqa: E731
    with hl.disabled():
        jax.jvp(run, (inputs(),), (inputs(),))
    with pytest.raises(TypeError, match="forward-mode") as error:
        jax.jvp(run, (inputs(),), (inputs(),))
    assert "hl.disabled" in "".join(error.value.__notes__)
    with pytest.raises(TypeError, match="differentiated twice"):
        jax.grad(lambda x: jax.grad(lambda x: run(x).sum())(x).sum())(inputs())


def test_bad_input():
    run = functools.partial(hl.gated_blocks, mlp, STACK, inputs())
    with pytest.raises(ValueError, match=r"token has shape \[4\].*5 blocks: jnp\.zeros\(5\)"):
        run([INT8] * N, jnp.zeros(4))
    with pytest.raises(TypeError, match=r"token is int32.*jnp\.zeros\(5\)"):
        run([INT8] * N, jnp.zeros(N, jnp.int32))
    with pytest.raises(ValueError, match="4 policies for 5 blocks"):
        run([INT8] * 4, jnp.zeros(4))
    with pytest.raises(ValueError, match=r"\['gaet'\] not found"):
        run([hl.Policy({"gaet": hl.Compress("int8")})] * N, jnp.zeros(N))
    with pytest.raises(ValueError, match=r"gated_blocks: mlp is decorated with hl\.remat"):
        hl.gated_blocks(hl.remat(GC)(mlp), STACK, inputs(), [INT8] * N, jnp.zeros(N))
    with pytest.raises(ValueError, match="expected its input's structure"):
        hl.gated_blocks(lambda p, x: {"h": mlp(p, x)}, STACK, inputs(), [INT8] * N, jnp.zeros(N))


@pytest.mark.newest
@pytest.mark.usefixtures("float64")
def test_offloaded_names_come_back_in_both_ways():
    stack = wide(STACK)
    policy = hl.Policy({"gate": hl.Compress("int8"), "up": hl.Offload()})
    for flag in (0.0, 1.0):
        policies = (policy,) * N
        _, found = by_flags(stack, inputs(), jnp.full(N, flag), policies)
        _, want = by_plan(stack, inputs(), spelled(policies, [flag] * N))
        assert relative(found, want) < ROUNDING
