"""`hl.remat` on functions: equal gradients by different programs, under every transformation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

import hilore_jax as hl
from blocks import ROUNDING, D, F, decoder, inputs, mlp, mlp_by_hand, params, relative, temp_bytes
from hilore_jax import codecs, tracing
from hilore_jax.remat import is_disabled
from hilore_jax.work import live_work

GC = hl.Policy({})
STORE_GATE_UP = hl.Policy({"gate": hl.Store(), "up": hl.Store()})
INT8 = hl.Policy({"gate": hl.Compress("int8"), "up": hl.Compress("int8", axis=1, tile=2)})
INT8_STORE = hl.Policy({"gate": hl.Compress("int8"), "up": hl.Store(), "act": hl.Store()})


def loss(block, p, x):
    return jnp.sum(jnp.sin(block(p, x)))


def grads(block, p, x):
    return jax.jit(
        jax.grad(functools.partial(loss, block), argnums=(0, 1)),
        compiler_options=hl.compiler_options(),
    )(p, x)


def backward_matmuls(block, p, x):
    gradient = jax.value_and_grad(functools.partial(loss, block), argnums=(0, 1))
    return live_work(gradient, p, x).matmuls


def residual_dtypes(block, p, x):
    return sorted(
        r.dtype
        for r in tracing.saved_residuals(functools.partial(loss, block), p, x)
        if "argument" not in r.origin
    )


@pytest.mark.newest
@pytest.mark.parametrize(
    ("policy", "recomputed"),
    [(GC, 2), (hl.Policy({"gate": hl.Store()}), 1), (STORE_GATE_UP, 0)],
)
@pytest.mark.usefixtures("float64")
def test_store_and_recompute_equal_no_remat_by_other_programs(policy, recomputed):
    p, x = params(), inputs()
    block = hl.remat(policy)(mlp)
    assert relative(grads(block, p, x), grads(mlp, p, x)) < ROUNDING
    assert backward_matmuls(mlp, p, x) == 9
    assert backward_matmuls(block, p, x) == 9 + recomputed


@pytest.mark.newest
@pytest.mark.parametrize("codec", ["int8", "int4", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.usefixtures("float64")
def test_compressed_gradients_equal_decoding_by_hand(codec):
    p, x = params(), inputs()
    policy = hl.Policy({"gate": hl.Compress(codec), "up": hl.Compress(codec, axis=1, tile=2)})
    block = hl.remat(policy)(mlp)
    g = jnp.cos(mlp(p, x))
    want = mlp_by_hand(p, x, g, decoder(codec), decoder(codec, 1, 2))
    assert relative(grads(block, p, x), want) < ROUNDING
    exact = mlp_by_hand(p, x, g, lambda v: v, lambda v: v)
    assert relative(grads(mlp, p, x), exact) < ROUNDING  # the reference itself is right
    assert relative(want, exact) > 1e-4  # and decoding matters


@pytest.mark.newest
@pytest.mark.usefixtures("float64")
def test_forward_value_is_untouched_by_compression():
    p, x = params(), inputs()
    block = hl.remat(hl.Policy({"gate": hl.Compress("int4"), "act": hl.Compress("int4")}))(mlp)
    np.testing.assert_array_equal(jax.jit(block)(p, x), jax.jit(mlp)(p, x))
    value, _ = jax.jit(jax.value_and_grad(lambda p: loss(block, p, x)))(p)
    assert relative(value, loss(mlp, p, x)) < ROUNDING


@pytest.mark.newest
def test_residuals_are_exactly_the_encoded_arrays():
    p, x = params(), inputs()
    assert residual_dtypes(hl.remat(INT8)(mlp), p, x).count("float32") == 1  # the loss's own cos
    for codec, dtype in [("int8", "int8"), ("int4", "uint8"), ("fp8_e4m3", "uint8")]:
        policy = hl.Policy({"gate": hl.Compress(codec), "up": hl.Compress(codec, axis=1, tile=2)})
        found = residual_dtypes(hl.remat(policy)(mlp), p, x)
        assert found == sorted([dtype] * 2 + ["bfloat16"] * 2 + ["float32"]), codec
    kept = [
        r
        for r in tracing.saved_residuals(lambda p, x: hl.remat(INT8)(mlp)(p, x), p, x)
        if "argument" not in r.origin
    ]
    expected = codecs.nbytes((3, 5, F), "int8") + codecs.nbytes((3, 5, F), "int8", axis=1, tile=2)
    assert sum(r.nbytes for r in kept) == expected


def test_error_falls_from_int4_to_int8():
    p, x = params(), inputs()
    exact = grads(mlp, p, x)
    errors = {}
    for codec in ("int4", "fp8_e5m2", "fp8_e4m3", "int8"):
        policy = hl.Policy({"gate": hl.Compress(codec, tile=4), "up": hl.Compress(codec, tile=4)})
        errors[codec] = relative(grads(hl.remat(policy)(mlp), p, x), exact)
    assert errors["int8"] < errors["fp8_e4m3"] < errors["fp8_e5m2"]
    assert 0 < errors["int8"] < errors["int4"] / 5


@pytest.mark.usefixtures("float64")
def test_stored_names_beside_compressed_ones_are_exact():
    p, x = params(), inputs()
    g = jnp.cos(mlp(p, x))
    h = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
    act = jax.nn.silu(h @ p["gate"]) * (h @ p["up"])
    got = grads(hl.remat(INT8_STORE)(mlp), p, x)[0]
    down = act.reshape(-1, F).T @ g.reshape(-1, D)  # reads the stored act, exact
    assert relative(got["down"], down) < ROUNDING
    assert relative(got["gate"], grads(mlp, p, x)[0]["gate"]) > 1e-4  # reads the decoded gate


@pytest.mark.usefixtures("float64")
def test_no_matmul_is_recomputed_from_a_decoded_value():
    # norm is decoded; gate and up are recomputed. By default they come out exact, so that the
    # only error is in the weight gradients that read the norm itself.
    p, x = params(), inputs()
    exact = grads(mlp, p, x)
    names = {"norm": hl.Compress("int4")}
    careful = grads(hl.remat(hl.Policy(names))(mlp), p, x)
    loose = grads(hl.remat(hl.Policy(names, tainted_matmuls=True))(mlp), p, x)
    assert relative(careful[0]["down"], exact[0]["down"]) < ROUNDING
    assert relative(careful[0]["gate"], exact[0]["gate"]) > 1e-3
    assert relative(loose[0]["down"], exact[0]["down"]) > 1e-3
    assert relative(loose, exact) > relative(careful, exact)


@pytest.mark.usefixtures("float64")
def test_choices_are_never_made_by_a_decoded_value():
    def route(w, x):
        score = checkpoint_name(x @ w, "score")
        top, index = jax.lax.top_k(score, 2)
        return top.sum(-1) * (1 + index.sum(-1).astype(x.dtype))

    w = jax.random.normal(jax.random.key(0), (D, 16))
    x = inputs(shape=(64, D))
    block = hl.remat(hl.Policy({"score": hl.Compress("int4", tile=None)}))(route)
    got, want = (jax.grad(lambda w, f=f: f(w, x).sum())(w) for f in (block, route))
    assert relative(got, want) < ROUNDING  # top_k's rule reads the indices


def test_the_same_name_twice_keeps_both_values():
    def twice(w, x):
        x = jnp.tanh(checkpoint_name(x @ w, "h"))
        return jnp.tanh(checkpoint_name(x @ w, "h") * 3)

    w, x = params(3)["gate"][:, :D], inputs()
    block = hl.remat(hl.Policy({"h": hl.Compress("int8")}))(twice)
    got, want = (jax.grad(lambda w, f=f: f(w, x).sum())(w) for f in (block, twice))
    assert 1e-5 < relative(got, want) < 0.05
    kept = tracing.saved_residuals(lambda w: block(w, x).sum(), w)
    assert [r.dtype for r in kept].count("int8") == 2


@pytest.mark.newest
@pytest.mark.parametrize("policy", [GC, STORE_GATE_UP, INT8, INT8_STORE], ids=str)
@pytest.mark.usefixtures("float64")
def test_under_vmap_scan_and_accumulation(policy):
    p, x = params(), inputs(shape=(4, 3, 5, D))
    block = hl.remat(policy)(mlp)
    one = jax.grad(functools.partial(loss, block))
    separate = jax.tree.map(lambda *g: sum(g), *[one(p, row) for row in x])
    mapped = jax.grad(lambda p: jax.vmap(functools.partial(loss, block), (None, 0))(p, x).sum())(p)
    per_row = jax.vmap(one, (None, 0))(p, x)
    scanned, _ = jax.lax.scan(
        lambda acc, row: (jax.tree.map(jnp.add, acc, one(p, row)), None),
        jax.tree.map(jnp.zeros_like, p),
        x,
    )
    inside = jax.grad(
        lambda p: jax.lax.scan(lambda acc, row: (acc + loss(block, p, row), None), 0.0, x)[0]
    )(p)
    assert relative(mapped, separate) < ROUNDING
    assert relative(jax.tree.map(lambda g: g.sum(0), per_row), separate) < ROUNDING
    assert relative(scanned, separate) < ROUNDING
    assert relative(inside, separate) < ROUNDING


@pytest.mark.newest
@pytest.mark.parametrize("policy", [GC, STORE_GATE_UP, INT8, INT8_STORE], ids=str)
@pytest.mark.usefixtures("float64")
def test_under_shard_map_with_replicated_weights(policy):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    p, x = params(), inputs(shape=(4, 5, D))
    block = hl.remat(policy)(mlp)

    def sharded(p, x):
        local = lambda p, x: jax.lax.psum(loss(block, p, x), "data")  # noqa: E731
        return jax.shard_map(local, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())(p, x)

    got = jax.jit(jax.grad(sharded))(p, x)
    want = jax.grad(functools.partial(loss, block))(p, x)
    assert relative(got, want) < ROUNDING
    inner = jax.jit(jax.grad(lambda p: loss(hl.remat(policy)(mlp), p, x)))(p)
    assert relative(inner, want) < ROUNDING


@pytest.mark.usefixtures("float64")
def test_shard_map_around_a_block_that_is_itself_sharded():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    p, x = params(), inputs(shape=(4, 5, D))
    placed = jax.device_put(x, jax.sharding.NamedSharding(mesh, P("data")))
    got = jax.jit(jax.grad(functools.partial(loss, hl.remat(INT8)(mlp))))(p, placed)
    want = jax.grad(functools.partial(loss, hl.remat(INT8)(mlp)))(p, x)
    assert relative(got, want) < ROUNDING


@pytest.mark.newest
@pytest.mark.usefixtures("float64")
def test_captured_tracers_are_differentiated():
    p, x = params(), inputs()

    def outer(p, block_of):
        scale = jnp.tanh(p["gate"].sum())

        def closes_over(x):
            return mlp(jax.tree.map(lambda w: w * scale, p), x)

        return jnp.sum(jnp.sin(block_of(closes_over)(x)))

    for policy in (GC, INT8_STORE):
        got = jax.grad(outer)(p, hl.remat(policy))
        want = jax.grad(outer)(p, lambda f: f)
        bound = ROUNDING if policy == GC else 0.02
        assert relative(got, want) < bound


def test_frozen_weights_keep_nothing_for_their_gradient():
    # Only down's gradient reads act, only gate's and up's read norm: frozen, both are dropped.
    p, x = params(), inputs()
    policy = hl.Policy({n: hl.Compress("int8") for n in ("norm", "gate", "up", "act")})
    block = hl.remat(policy)(mlp)
    trained = tracing.saved_residuals(lambda p, x: block(p, x), p, x)
    frozen = tracing.saved_residuals(lambda x: block(p, x), x)
    assert [r.dtype for r in trained].count("int8") == 4
    assert [r.dtype for r in frozen].count("int8") == 2
    got = jax.grad(lambda x: loss(block, p, x))(x)
    assert relative(got, jax.grad(lambda x: loss(mlp, p, x))(x)) < 0.02


@pytest.mark.usefixtures("float64")
def test_an_unused_output_costs_nothing_in_backward():
    def two(p, x):
        return mlp(p, x), {"extra": jnp.sin(x @ p["gate"]) @ p["gate"].T}

    p, x = params(), inputs()
    block = hl.remat(INT8)(two)
    alone = live_work(jax.grad(lambda p: jnp.sin(hl.remat(INT8)(mlp)(p, x)).sum()), p)
    first = live_work(jax.grad(lambda p: jnp.sin(block(p, x)[0]).sum()), p)
    both = live_work(
        jax.grad(lambda p: jnp.sin(block(p, x)[0]).sum() + block(p, x)[1]["extra"].sum()), p
    )
    assert first == alone
    assert both.matmuls > first.matmuls
    got = jax.grad(lambda p: block(p, x)[1]["extra"].sum())(p)
    want = jax.grad(lambda p: two(p, x)[1]["extra"].sum())(p)
    assert relative(got["gate"], want["gate"]) < ROUNDING


@pytest.mark.newest
@pytest.mark.usefixtures("float64")
def test_randomness_is_replayed_not_redrawn():
    def noisy(p, x, key):
        h = checkpoint_name(x @ p["gate"], "gate")
        keep = jax.random.bernoulli(key, 0.5, h.shape)
        return jnp.where(keep, jnp.sin(h), 0.0) @ p["down"]

    p, x, key = params(), inputs(), jax.random.key(7)
    want = jax.grad(lambda p: noisy(p, x, key).sum())(p)
    raw = jax.random.key_data(key)
    for policy, bound in ((GC, ROUNDING), (hl.Policy({"gate": hl.Compress("int8")}), 0.02)):
        block = hl.remat(policy)(noisy)
        assert relative(jax.grad(lambda p, b=block: b(p, x, key).sum())(p), want) < bound
        by_data = lambda p, x, k: noisy(p, x, jax.random.wrap_key_data(k))  # noqa: E731
        got = jax.grad(lambda p, b=hl.remat(policy)(by_data): b(p, x, raw).sum())(p)
        assert relative(got, want) < bound


@pytest.mark.usefixtures("float64")
def test_integer_and_boolean_arguments_and_outputs():
    def gather(table, ids, mask):
        rows = checkpoint_name(table[ids], "rows")
        return jnp.where(mask[..., None], jnp.sin(rows), 0.0), ids + 1

    table = jax.random.normal(jax.random.key(0), (10, D))
    ids, mask = jnp.array([1, 3, 3]), jnp.array([True, True, False])
    for policy, bound in ((GC, ROUNDING), (hl.Policy({"rows": hl.Compress("int8")}), 0.02)):
        block = hl.remat(policy)(gather)
        got = jax.grad(lambda t, b=block: b(t, ids, mask)[0].sum())(table)
        want = jax.grad(lambda t: gather(t, ids, mask)[0].sum())(table)
        assert relative(got, want) < bound
        np.testing.assert_array_equal(block(table, ids, mask)[1], ids + 1)


@pytest.mark.usefixtures("float64")
def test_custom_rules_inside_the_block_are_kept():
    @jax.custom_vjp
    def odd(x):
        return x

    odd.defvjp(lambda x: (x, None), lambda _, g: (7 * g,))

    @jax.custom_jvp
    def even(x):
        return x * x

    even.defjvp(lambda p, t: (even(p[0]), 5 * t[0]))

    def block(w, x):
        return odd(checkpoint_name(even(x @ w), "h") * 2)

    w, x = params()["gate"], inputs()
    want = jax.grad(lambda w: block(w, x).sum())(w)
    np.testing.assert_allclose(want, 70 * jnp.broadcast_to(x.sum((0, 1))[:, None], w.shape), 1e-4)
    for policy in (GC, hl.Policy({"h": hl.Compress("int8")}), hl.Policy({"h": hl.Store()})):
        got = jax.grad(lambda w, b=hl.remat(policy)(block): b(w, x).sum())(w)
        assert relative(got, want) < ROUNDING


def test_names_inside_an_inner_jit_are_found():
    inner = jax.jit(lambda p, x: checkpoint_name(x @ p["gate"], "gate"))

    def block(p, x):
        return jnp.sin(inner(p, x)) @ p["down"]

    p, x = params(), inputs()
    policy = hl.Policy({"gate": hl.Compress("int8")})
    kept = tracing.saved_residuals(lambda p: hl.remat(policy)(block)(p, x).sum(), p)
    assert "int8" in [r.dtype for r in kept]
    work, gc = (
        live_work(jax.value_and_grad(lambda p, b=hl.remat(q)(block): b(p, x).sum()), p)
        for q in (policy, GC)
    )
    assert gc.matmuls == work.matmuls + 1
    got = jax.grad(lambda p: hl.remat(policy)(block)(p, x).sum())(p)
    assert 0 < relative(got, jax.grad(lambda p: block(p, x).sum())(p)) < 0.02


@pytest.mark.usefixtures("float64")
def test_gradient_of_gradient():
    p, x = params(), inputs()

    def penalty(block):
        return jax.grad(lambda p: jnp.sum(jax.grad(functools.partial(loss, block), 1)(p, x) ** 2))(
            p
        )

    assert relative(penalty(hl.remat(GC)(mlp)), penalty(mlp)) < ROUNDING
    assert relative(penalty(hl.remat(STORE_GATE_UP)(mlp)), penalty(mlp)) < ROUNDING
    with pytest.raises(TypeError, match=r"differentiated twice.*hl\.disabled"):
        penalty(hl.remat(INT8)(mlp))
    with hl.disabled():
        assert relative(penalty(hl.remat(INT8)(mlp)), penalty(mlp)) < ROUNDING


def test_half_precision_blocks_keep_their_dtypes():
    p = jax.tree.map(lambda w: w.astype(jnp.bfloat16), params())
    x = inputs().astype(jnp.bfloat16)
    for policy in (GC, INT8, INT8_STORE):
        got = grads(hl.remat(policy)(mlp), p, x)
        assert {leaf.dtype for leaf in jax.tree.leaves(got)} == {jnp.dtype("bfloat16")}
        assert relative(got, grads(mlp, p, x)) < 0.05


@pytest.mark.newest
@pytest.mark.usefixtures("float64")
def test_disabled_runs_the_block_as_written_and_retraces():
    p, x = params(), inputs()
    block = hl.remat(INT8)(mlp)
    traces = []

    @jax.jit
    def f(p):
        traces.append(is_disabled())
        return loss(block, p, x)

    f(p)
    with hl.disabled():
        _, tangent = jax.jvp(f, (p,), (p,))  # custom_vjp has no forward mode; disabled has
        assert residual_dtypes(block, p, x).count("int8") == 0
    f(p)
    assert traces == [False, True]
    want = jax.jvp(functools.partial(loss, mlp), (p, x), (p, jnp.zeros_like(x)))[1]
    assert relative(tangent, want) < ROUNDING


@pytest.mark.usefixtures("float64")
def test_offload_moves_the_residual_to_host_memory():
    p, x = params(), inputs()
    for policy in (
        hl.Policy({"gate": hl.Offload()}),
        hl.Policy({"gate": hl.Offload(), "up": hl.Compress("int8")}),
    ):
        block = hl.remat(policy)(mlp)
        text = str(jax.make_jaxpr(jax.grad(functools.partial(loss, block)))(p, x))
        assert "<host>" in text or "Host" in text
        bound = ROUNDING if len(policy) == 1 else 0.02
        assert relative(grads(block, p, x), grads(mlp, p, x)) < bound


# Bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "policy", ["dots", ["gate"], None, jax.checkpoint_policies.save_only_these_names, {"a": 1}]
)
def test_what_is_not_a_policy_is_refused_at_decoration(policy):
    with pytest.raises(TypeError, match=r"takes an hl\.Policy, found .*Accepted"):
        hl.remat(policy)


@pytest.mark.parametrize("action", [hl.Store(), hl.Compress(), hl.Recompute()])
def test_unknown_name_lists_those_seen(action):
    block = hl.remat(hl.Policy({"gaet": action}))(mlp)
    with pytest.raises(ValueError, match=r"\['gaet'\] not found.*\['act', 'gate', 'norm', 'up'\]"):
        block(params(), inputs())


def test_compress_on_integers_is_refused():
    def block(x):
        return x * checkpoint_name(jnp.argmax(x, -1, keepdims=True), "index")

    with pytest.raises(TypeError, match=r"'index' is int32\[3,? ?5, 1\].*floating-point"):
        hl.remat(hl.Policy({"index": hl.Compress()}))(block)(inputs())


@pytest.mark.parametrize("kind", ["scan", "while", "cond"])
def test_compress_inside_a_loop_or_branch_is_refused(kind):
    named = lambda c: checkpoint_name(jnp.sin(c), "inner")  # noqa: E731

    def block(x):
        if kind == "scan":
            return jax.lax.scan(lambda c, _: (named(c), None), x, None, length=2)[0]
        if kind == "while":
            return jax.lax.while_loop(lambda c: c.sum() < 0, named, x)
        return jax.lax.cond(x.sum() > 0, named, lambda c: c, x)

    with pytest.raises(ValueError, match=f"'inner' is named inside a loop or branch .*{kind}"):
        hl.remat(hl.Policy({"inner": hl.Compress()}))(block)(inputs())


@pytest.mark.usefixtures("float64")
def test_store_inside_a_scan_works_without_compression():
    def block(w, x):
        step = lambda c, _: (jnp.sin(checkpoint_name(c @ w, "inner")), None)  # noqa: E731
        return jax.lax.scan(step, x, None, length=3)[0]

    w, x = params()["gate"][:, :D], inputs()
    counts = {}
    for name, policy in (("gc", GC), ("store", hl.Policy({"inner": hl.Store()}))):
        gradient = jax.value_and_grad(lambda w, b=hl.remat(policy)(block): b(w, x).sum())
        counts[name] = live_work(gradient, w).matmuls
        assert relative(gradient(w)[1], jax.grad(lambda w: block(w, x).sum())(w)) < ROUNDING
    assert counts["store"] == counts["gc"] - 3


def test_remat3_is_refused_clearly(monkeypatch):
    block = hl.remat(GC)(mlp)
    monkeypatch.setattr(tracing, "remat3_enabled", lambda: True)
    with pytest.raises(RuntimeError, match=r"jax_remat3 is on.*jax_remat3', False"):
        hl.remat(GC)
    with pytest.raises(RuntimeError, match="jax_remat3 is on"):
        block(params(), inputs())


def test_remat3_flag_is_read_from_jax():
    if not hasattr(jax.config, "jax_remat3"):
        pytest.skip("this jax has no jax_remat3 flag")
    jax.config.update("jax_remat3", True)
    try:
        assert tracing.remat3_enabled()
    finally:
        jax.config.update("jax_remat3", False)
    assert not tracing.remat3_enabled()


@pytest.mark.parametrize(
    "static",
    [{"static_argnums": 2, "static_argnames": "scale"}, {"static_argnames": ("mode", "scale")}],
)
@pytest.mark.parametrize("policy", [GC, INT8], ids=str)
@pytest.mark.usefixtures("float64")
def test_static_arguments(policy, static):
    def block(p, x, mode, *, scale):
        y = mlp(p, x)
        return (y * 2 if mode == "double" else y) * (3 if scale else 1)

    p, x = params(), inputs()
    wrapped = hl.remat(policy, **static)(block)
    want = block(p, x, "double", scale=True)
    assert relative(wrapped(p, x, "double", scale=True), want) < ROUNDING
    assert relative(wrapped(p, x, mode="double", scale=True), want) < ROUNDING
    assert relative(wrapped(p, scale=True, x=x, mode="double"), want) < ROUNDING


@pytest.mark.usefixtures("float64")
def test_static_positions_count_from_the_end_of_the_call():
    def block(x, *rest):
        *others, mode = rest
        return sum(others, x) * (2 if mode == "double" else 1)

    wrapped = hl.remat(GC, static_argnums=-1)(block)
    x = inputs()
    assert relative(wrapped(x, x, x, "double"), 6 * x) < ROUNDING
    assert relative(wrapped(x, "single"), x) < ROUNDING

    def keyword(x, mode, **scales):
        return x * (2 if mode == "double" else 1) * scales["a"]

    wrapped = hl.remat(GC, static_argnums=1)(keyword)
    assert relative(wrapped(x, mode="double", a=3.0), 6 * x) < ROUNDING


def test_untraceable_and_steering_arguments_are_named():
    def block(x, mode):
        return x if mode == "a" else -x

    with pytest.raises(TypeError, match=r"argument 'mode' holds 'a' \(str\).*static_argnames"):
        hl.remat(GC)(block)(inputs(), "a")

    def steers(x, train):
        return x * 2 if train else x

    with pytest.raises(jax.errors.TracerBoolConversionError) as error:
        hl.remat(GC)(steers)(inputs(), True)
    assert "static_argnames" in "".join(error.value.__notes__)
    assert "train" in "".join(error.value.__notes__)


def test_unknown_static_arguments_are_refused():
    with pytest.raises(ValueError, match=r"\['mode'\] are not among those of mlp: \['p', 'x'\]"):
        hl.remat(GC, static_argnames="mode")(mlp)
    with pytest.raises(ValueError, match=r"\[2\] are not among"):
        hl.remat(GC, static_argnums=2)(mlp)


def test_policies_do_not_retrace_and_are_static_arguments():
    traces = []

    @functools.partial(jax.jit, static_argnums=0)
    def step(policy, p, x):
        traces.append(policy)
        return jax.grad(functools.partial(loss, hl.remat(policy)(mlp)))(p, x)

    p, x = params(), inputs()
    for _ in range(3):
        step(hl.Policy({"gate": hl.Compress("int8"), "up": hl.Offload()}), p, x)
        step(hl.Policy({"up": hl.Offload(), "gate": hl.Compress("int8")}), p, x)
        step(hl.Policy({"up": hl.Offload()}), p, x)
    assert len(traces) == 2


def test_compiled_memory_follows_the_policy():
    p = [params(i, 64, 256) for i in range(4)]
    x = inputs(shape=(4, 64, 64))

    def temp(block):
        def total(p, x):
            for q in p:
                x = block(q, x)
            return jnp.sum(jnp.sin(x))

        options = hl.compiler_options()
        compiled = jax.jit(jax.grad(total)).lower(p, x).compile(compiler_options=options)
        return temp_bytes(compiled)

    saveable = jax.checkpoint_policies.save_only_these_names
    store = hl.Policy({"gate": hl.Store(), "up": hl.Store()})
    compress = hl.Policy({"gate": hl.Compress(tile=64), "up": hl.Compress(tile=64)})
    none, gc, exact = temp(mlp), temp(hl.remat(GC)(mlp)), temp(hl.remat(store)(mlp))
    assert abs(gc / temp(jax.checkpoint(mlp)) - 1) <= 0.01
    assert abs(exact / temp(jax.checkpoint(mlp, policy=saveable("gate", "up"))) - 1) <= 0.01
    assert gc < exact < none
    spared = 4 * hl.explain(compress, mlp, p[0], x).compression_savings
    assert temp(hl.remat(compress)(mlp)) <= exact - 0.9 * spared


@pytest.mark.parametrize("inner", [{}, {"gate": hl.Compress()}], ids=["gc", "int8"])
def test_a_second_decoration_is_refused(inner):
    once = hl.remat(hl.Policy(inner))(mlp)
    with pytest.raises(ValueError, match=r"mlp is decorated with hl\.remat\(.*\) already"):
        hl.remat(GC)(once)
    with pytest.raises(ValueError, match=r"hl\.scan_blocks: .*mlp is decorated"):
        hl.scan_blocks(once, jax.tree.map(lambda a: a[None], params()), inputs(), [GC])
    # A policy that keeps everything leaves the block as it is; a wrapper is another function.
    keep = hl.Policy(default=hl.Store())
    hl.remat(keep)(once)
    hl.remat(GC)(hl.remat(keep)(mlp))
    hl.remat(GC)(functools.wraps(once)(lambda p, x: once(p, x) + x))


def test_forward_mode_names_its_remedy():
    compressed = hl.remat(hl.Policy({"gate": hl.Compress()}))(mlp)
    x, p = inputs(), params()
    with pytest.raises(TypeError, match="forward-mode") as error:
        jax.jvp(lambda x: compressed(p, x), (x,), (x,))
    assert sum("hl.disabled()" in note for note in error.value.__notes__) == 1
    stack = jax.tree.map(lambda a: a[None], p)
    policies = [hl.Policy({"gate": hl.Compress()})]
    with pytest.raises(TypeError, match="forward-mode") as error:
        jax.jvp(lambda x: hl.scan_blocks(mlp, stack, x, policies), (x,), (x,))
    assert sum("hl.disabled()" in note for note in error.value.__notes__) == 1
    with hl.disabled():
        jax.jvp(lambda x: compressed(p, x), (x,), (x,))


def test_a_block_in_place_of_a_policy_and_linen_modules_say_what_to_write():
    with pytest.raises(TypeError, match=r"write hl\.remat\(policy\)\(mlp\)"):
        hl.remat(mlp)
    with pytest.raises(TypeError, match=r"write hl\.parse_policy\('gc'\)"):
        hl.remat("gc")
    for block in (linen.Dense, linen.Dense(3)):
        with pytest.raises(TypeError, match=r"Dense: decorate.*module\.apply"):
            hl.remat(GC)(block)
    module, x = linen.Dense(3), jnp.ones((2, 4))
    variables = module.init(jax.random.key(0), x)
    gradient = jax.grad(lambda v: hl.remat(GC)(module.apply)(v, x).sum())(variables)
    assert gradient["params"]["kernel"].shape == (4, 3)
