"""Sketched linear maps: the gradient's sketch, without the gradient, wherever blocks run."""

import functools
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import hilore_jax as hl
from hilore_jax.logra import Sketches, sketched_dense
from hilore_jax.logra.sketch import SKETCH_HIDDEN

RANK, D_IN, D_OUT = 3, 12, 10
KEYS = ("blocks.0.gate", "blocks.0.down")


@pytest.fixture(scope="module")
def arrays():
    rng = np.random.default_rng()
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    sketches = Sketches(rank=RANK)
    return {
        "x": draw(4, 5, D_IN),
        "gate": draw(D_IN, D_OUT),
        "down": draw(D_OUT, D_IN),
        "a_gate": sketches.projection(sketches.key(KEYS[0], 0), D_IN),
        "a_down": sketches.projection(sketches.key(KEYS[1], 0), D_OUT),
    }


def slots():
    return {"gate": jnp.zeros((D_OUT, RANK)), "down": jnp.zeros((D_IN, RANK))}


def block(slots, x, arrays):
    h = sketched_dense(x, arrays["gate"], slots["gate"], arrays["a_gate"])
    h = checkpoint_name(h, "mlp_gate")
    return x + sketched_dense(jax.nn.silu(h), arrays["down"], slots["down"], arrays["a_down"])


def loss(slots, x, arrays, policy=None):
    fn = block if policy is None else hl.remat(policy)(block)
    return jnp.sum(jnp.sin(fn(slots, x, arrays)))


def dense_sketch(x, arrays):
    """G A^T of the weights' whole gradients, by autodiff of the plain block."""

    def plain(weights):
        h = jax.nn.silu(x @ weights["gate"])
        return jnp.sum(jnp.sin(x + h @ weights["down"]))

    whole = jax.grad(plain)({name: arrays[name] for name in ("gate", "down")})
    return {name: whole[name].T @ arrays[f"a_{name}"].T for name in whole}


def close(found, expected, rtol=2e-5):
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=rtol, atol=rtol * np.abs(value).max())


def test_the_slots_gradient_is_the_sketch_of_the_weights(arrays):
    close(jax.grad(loss)(slots(), arrays["x"], arrays), dense_sketch(arrays["x"], arrays))


def test_the_output_and_the_inputs_gradient_are_the_plain_maps(arrays):
    x, w, a = (arrays[name] for name in ("x", "gate", "a_gate"))
    out, back = jax.vjp(lambda x: sketched_dense(x, w, jnp.zeros((D_OUT, RANK)), a), x)
    np.testing.assert_array_equal(out, x @ w)
    np.testing.assert_allclose(back(out)[0], out @ w.T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "policy",
    ["gc", "store", "sketch_hidden=store", "sketch_hidden=store,mlp_gate=store"],
)
def test_exact_policies_leave_the_sketch_as_it_is(arrays, policy):
    found = jax.jit(jax.grad(loss), static_argnums=3)(
        slots(), arrays["x"], arrays, hl.parse_policy(policy)
    )
    close(found, dense_sketch(arrays["x"], arrays))


def test_a_compressed_gate_leaves_the_sketch_of_the_map_after_it_alone(arrays):
    # Methods 3: A x is kept exactly, so that what x is decoded from no longer enters S of down.
    policy = hl.parse_policy("sketch_hidden=store,mlp_gate=int4:tile=32")
    found = jax.grad(loss)(slots(), arrays["x"], arrays, policy)
    exact = dense_sketch(arrays["x"], arrays)
    close({"down": found["down"]}, {"down": exact["down"]})
    apart = np.linalg.norm(found["gate"] - exact["gate"]) / np.linalg.norm(exact["gate"])
    assert 1e-4 < apart < 0.5  # the witness that something was compressed


def test_microbatches_add_up_and_a_scan_gives_each_block_its_own(arrays):
    x = arrays["x"]
    parts = [jax.grad(loss)(slots(), part, arrays) for part in (x[:1], x[1:])]
    close(jax.tree.map(jnp.add, *parts), dense_sketch(x, arrays))

    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), slots())

    def scanned(stacked):
        step = lambda x, slots: block(slots, x, arrays)  # noqa: E731
        policies = (hl.Policy({}),) * 2
        return jnp.sum(jnp.sin(hl.scan_blocks(lambda p, x: step(x, p), stacked, x, policies)))

    def unrolled(stacked):
        y = x
        for i in range(2):
            y = block(jax.tree.map(lambda leaf, i=i: leaf[i], stacked), y, arrays)
        return jnp.sum(jnp.sin(y))

    close(jax.grad(scanned)(stacked), jax.grad(unrolled)(stacked))


def test_backward_reads_the_projected_input_and_no_input(arrays):
    x, w, a = (arrays[name] for name in ("x", "gate", "a_gate"))
    _, back = jax.vjp(lambda slot: sketched_dense(x, w, slot, a), jnp.zeros((D_OUT, RANK)))
    kept = sorted(tuple(leaf.shape) for leaf in jax.tree.leaves(back))
    assert x.shape not in kept
    assert (*x.shape[:-1], RANK) in kept
    plain = jax.vjp(lambda w: x @ w, w)[1]  # the witness: a dense weight's gradient reads x
    assert x.shape in {tuple(leaf.shape) for leaf in jax.tree.leaves(plain)}


def test_no_gradient_of_the_weights_shape_is_in_the_program():
    x = jnp.zeros((4, 64, 96))
    w, a, slot = jnp.zeros((96, 80)), jnp.zeros((RANK, 96)), jnp.zeros((80, RANK))

    def products(fn, *args):
        """Matmuls of the compiled program whose result has the weight's shape."""
        lowered = jax.jit(fn, compiler_options=hl.compiler_options()).lower(*args)
        text = lowered.compile().as_text() or ""
        return re.findall(r"f32\[(?:96,80|80,96)\]\S* (?:dot|custom-call|fusion)\(", text)

    def sketched(slot, w, x):
        return jnp.sum(sketched_dense(x, w, slot, a) ** 2)

    assert not products(jax.grad(sketched), slot, w, x)
    assert products(jax.grad(lambda w, x: jnp.sum((x @ w) ** 2)), w, x)  # the witness


def test_under_vmap_each_row_has_its_own_sketch(arrays):
    x, w, a = (arrays[name] for name in ("x", "gate", "a_gate"))
    one = lambda x: jax.grad(lambda s: jnp.sum(sketched_dense(x, w, s, a) ** 2))(  # noqa: E731
        jnp.zeros((D_OUT, RANK))
    )
    rows = jax.vmap(one)(x)
    for row, value in zip(rows, x, strict=True):
        np.testing.assert_allclose(row, one(value), rtol=1e-4, atol=1e-4)


def test_under_shard_map_devices_sketches_are_summed(arrays):
    x = arrays["x"]
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    spec = P("data")

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(), spec, P()), out_specs=P())
    def local(slots, x, arrays):
        return jax.lax.psum(loss(slots, x, arrays), "data")

    rest = {name: value for name, value in arrays.items() if name != "x"}
    close(jax.jit(jax.grad(local))(slots(), x, rest), dense_sketch(x, arrays))


def test_forward_mode_moves_the_weight_along_the_factor(arrays):
    rng = np.random.default_rng()
    d = {
        "gate": jnp.asarray(rng.normal(size=(D_OUT, RANK)), jnp.float32),
        "down": jnp.asarray(rng.normal(size=(D_IN, RANK)), jnp.float32),
    }
    x = arrays["x"]
    with hl.disabled():
        out, tangent = jax.jvp(lambda s: block(s, x, arrays), (slots(),), (d,))

    def moved(weights):
        return x + jax.nn.silu(x @ weights["gate"]) @ weights["down"]

    weights = {name: arrays[name] for name in d}
    along = {name: (d[name] @ arrays[f"a_{name}"]).T for name in d}
    expected, slope = jax.jvp(moved, (weights,), (along,))
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(tangent, slope, rtol=1e-4, atol=1e-4)


def test_bfloat16_sketches_add_up_in_float32(arrays):
    half = lambda name: arrays[name].astype(jnp.bfloat16)  # noqa: E731
    x, w, a = half("x"), half("gate"), half("a_gate")
    found = jax.grad(lambda s: jnp.sum(sketched_dense(x, w, s, a).astype(jnp.float32)))(
        jnp.zeros((D_OUT, RANK))
    )
    assert found.dtype == jnp.float32
    hidden = (x @ a.T).astype(jnp.float32).sum((0, 1))  # each g is 1, exact in bfloat16
    np.testing.assert_allclose(found, jnp.tile(hidden, (D_OUT, 1)), rtol=1e-5, atol=1e-4)


def test_the_name_is_one_that_policies_can_say(arrays):
    shown = str(hl.explain(hl.parse_policy("gc"), block, slots(), arrays["x"], arrays))
    assert SKETCH_HIDDEN in shown


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slot": jnp.zeros((D_OUT + 1, RANK))}, r"slot \(11, 3\)"),
        ({"slot": jnp.zeros((D_OUT, RANK + 1))}, r"\[out, rank\] and \[rank, in\]"),
        ({"a": jnp.zeros((RANK, D_IN + 1))}, r"a \(3, 13\)"),
        ({"x": jnp.zeros((2, D_IN + 2))}, r"x \(2, 14\)"),
        ({"slot": jnp.zeros((D_OUT, RANK), jnp.bfloat16)}, "expected float32"),
    ],
)
def test_shapes_that_do_not_belong_together_are_named(arrays, change, message):
    given = {
        "x": arrays["x"],
        "kernel": arrays["gate"],
        "slot": jnp.zeros((D_OUT, RANK)),
        "a": arrays["a_gate"],
    }
    # Without the type checks of the suite, whose own error comes first.
    unchecked = inspect.unwrap(sketched_dense)
    with pytest.raises(ValueError, match=message):
        unchecked(**(given | change))
