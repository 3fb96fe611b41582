"""What backward reads under a policy that compresses: choices stay forward's, refusals are loud."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import hilore_jax as hl
from blocks import relative
from hilore_jax import codecs

pytestmark = pytest.mark.newest

H = hl.Policy({"h": hl.Compress("int8")})
# int8 decodes (100, 0.1) to about (100.2, 0) and (100, 1.9) to about (100.2, 1.58): the small value
# crosses zero, or the integer below it.
SMALL, BETWEEN = jnp.array([[100.0, 0.1]]), jnp.array([[100.0, 1.9]])
ONES = jnp.ones((1, 2))


def named(w, x):
    return checkpoint_name(x * w, "h")


def gradient(block, *args):
    return jax.jit(jax.grad(lambda w, *rest: hl.remat(H)(block)(w, *rest).sum()))(*args)


def test_a_branch_is_taken_by_the_exact_value():
    def block(w, x):
        h = named(w, x)
        return jax.lax.cond(h[0, 1] > 0, lambda h: 5 * h * h, lambda h: -h * h, h)

    decoded = codecs.round_trip(SMALL)
    assert decoded[0, 1] == 0  # the decoded value would take the other branch
    np.testing.assert_allclose(gradient(block, ONES, SMALL), 10 * decoded * SMALL, rtol=1e-6)


def test_a_switch_reads_decoded_operands_when_only_its_index_is_exact():
    def block(w, x, i):
        return jax.lax.switch(i, [jnp.sin, jnp.tanh, lambda h: h * h], named(w, x))

    got = gradient(block, ONES, SMALL, 2)
    np.testing.assert_allclose(got, 2 * codecs.round_trip(SMALL) * SMALL, rtol=1e-6)
    assert relative(got, 2 * SMALL * SMALL) > 1e-4


def test_a_branch_inside_a_loop_is_taken_by_the_exact_value():
    def block(w, x):
        h = named(w, x)

        def body(carry, row):
            return carry + jax.lax.cond(
                row[1] > 0, lambda r: 5 * r * r, lambda r: -r * r, row
            ), None

        return jax.lax.scan(body, jnp.zeros(2), h)[0]

    np.testing.assert_allclose(gradient(block, ONES, SMALL), 10 * SMALL**2, rtol=1e-6)


@pytest.mark.parametrize("take", ["gather", "dynamic_slice", "one_hot", "inside a jit", "scatter"])
def test_indices_are_made_from_the_exact_value(take):
    table = jnp.arange(200.0) ** 2

    def rows(index, table):
        if take == "gather":
            return table[index[0]]
        if take == "dynamic_slice":
            return jnp.stack([jax.lax.dynamic_slice(table, (i,), (1,))[0] for i in index[0]])
        if take == "one_hot":
            return jax.nn.one_hot(index[0], 200) @ table
        return jnp.zeros(2).at[index[0] % 2].add(table[index[0]])

    def block(table, w, x):
        h = named(w, x)
        to_index = lambda h: jnp.floor(h).astype(jnp.int32)  # noqa: E731
        index = jax.jit(to_index)(h) if take == "inside a jit" else to_index(h)
        return rows(index, table) * h[0]

    got = gradient(block, table, ONES, BETWEEN)
    assert np.flatnonzero(np.asarray(got)).tolist() == [1, 100]
    assert int(codecs.round_trip(BETWEEN)[0, 1]) == 1 and int(BETWEEN[0, 1]) == 1
    by_w = gradient(lambda w, x: block(table, w, x), ONES, BETWEEN)
    if take != "scatter":
        np.testing.assert_allclose(by_w[0], table[jnp.array([100, 1])] * BETWEEN[0], rtol=1e-6)


def test_an_array_is_compared_exactly():
    # The k-th largest is exact; compared with decoded scores it would drop half of its own.
    keys = jax.random.split(jax.random.key(0), 3)
    x, w = jax.random.normal(keys[0], (64, 32)), jax.random.normal(keys[1], (32, 8)) / 5
    experts = jax.random.normal(keys[2], (8, 32, 4))

    def route(w, x):
        p = checkpoint_name(jax.nn.softmax(x @ w), "h")
        gate = jnp.where(p >= jax.lax.top_k(p, 2)[0][:, -1:], p, 0.0)
        return jnp.einsum("te,ted->td", gate, jnp.einsum("td,edf->tef", x, experts)) ** 2

    want = jax.grad(lambda w: route(w, x).sum())(w)
    assert relative(gradient(route, w, x), want) < 0.02


def test_rounding_is_of_the_exact_value():
    def block(w, x):
        h = named(w, x)
        return (h + jax.lax.stop_gradient(jnp.round(h) - h)) ** 2

    np.testing.assert_allclose(
        gradient(block, ONES, BETWEEN), 2 * jnp.round(BETWEEN) * BETWEEN, rtol=1e-6
    )


@pytest.mark.parametrize("loop", ["counter", "key", "jit"])
def test_integers_that_only_pass_through_switch_no_compression_off(loop):
    def block(w, x):
        h = named(w, x)
        if loop == "counter":
            return jax.lax.fori_loop(0, 3, lambda i, v: jnp.sin(v), h)
        if loop == "key":
            step = lambda c, _: ((jnp.sin(c[0]), jax.random.split(c[1])[0]), None)  # noqa: E731
            return jax.lax.scan(step, (h, jax.random.key(0)), None, length=3)[0][0]
        return jax.jit(lambda h: (jnp.sin(h), 3))(h)[0]

    (row,) = hl.explain(H, block, jnp.ones((4, 256)), jnp.ones((4, 256))).rows
    assert row.kept_bytes == codecs.nbytes((4, 256), "int8")


def test_a_loop_runs_as_often_as_forward():
    def block(w, x):
        h = named(w, x)
        turns = jax.lax.while_loop(
            lambda c: (c[0] < 8) & (c[1] > 0), lambda c: (c[0] + 1, c[1] - 0.05), (0, h[0, 1])
        )[0]
        return h * jax.lax.stop_gradient(turns)

    np.testing.assert_allclose(gradient(block, ONES, SMALL), 2 * SMALL, rtol=1e-6)


def test_names_chosen_by_are_not_listed_as_tainted():
    def block(w, x):
        h = named(w, x)
        index = checkpoint_name(jnp.floor(h).astype(jnp.int32), "index")
        return jnp.arange(200.0)[index] * checkpoint_name(jnp.sin(h), "sine")

    rows = {row.name: row.tainted for row in hl.explain(H, block, ONES, BETWEEN).rows}
    assert rows == {"h": False, "index": False, "sine": True}


def test_second_derivatives_that_the_codes_do_not_carry_are_all_there():
    x = jax.random.normal(jax.random.key(0), (5, 4))
    w = jax.random.normal(jax.random.key(1), (4, 3))

    def block(w, x):
        return jnp.sin(checkpoint_name(x * 2, "h") @ w)

    def hessian(f):
        return jax.hessian(lambda w: f(w, x).sum())(w)

    got, want = hessian(hl.remat(H)(block)), hessian(block)
    assert 0 < relative(got, want) < 0.02
    # The decoded value where the first derivative reads the activation; its own tangent is exact.
    decoded, sine = codecs.round_trip(x * 2), jnp.sin((x * 2) @ w)
    by_hand = jnp.einsum("ti,tj,tk->ikj", decoded, x * 2, -sine)
    diagonal = jnp.einsum("ikjk->ikj", got)
    assert relative(diagonal, by_hand) < 1e-5


def test_second_derivatives_through_a_sort():
    x = jax.random.normal(jax.random.key(0), (5, 4))
    w = jax.random.normal(jax.random.key(1), (5, 4))

    def block(w, x):
        return jnp.sin(jnp.sort(checkpoint_name(x * 2, "h") * w, axis=-1))

    got, want = (jax.hessian(lambda w, f=f: f(w, x).sum())(w) for f in (hl.remat(H)(block), block))
    assert 0 < relative(got, want) < 0.05


@pytest.mark.parametrize("policy", [hl.Policy({}), H, hl.Policy({"h": hl.Store()})], ids=str)
def test_a_block_that_writes_a_ref_is_refused(policy):
    ref = jax.new_ref(jnp.zeros(()))

    def block(w, x):
        h = named(w, x)
        ref[...] += jax.lax.stop_gradient(h.sum())
        return jnp.sin(h)

    with pytest.raises(ValueError, match=r"jax\.Ref.*hl\.disabled"):
        jax.grad(lambda w: hl.remat(policy)(block)(w, SMALL).sum())(ONES)
    assert ref[...] == 0
    with hl.disabled():
        jax.grad(lambda w: hl.remat(policy)(block)(w, SMALL).sum())(ONES)
    assert ref[...] == SMALL.sum()


@pytest.mark.parametrize("policy", [hl.Policy({}), H], ids=str)
def test_a_ref_made_inside_the_block_is_refused_too(policy):
    # jax.checkpoint fails on it with a KeyError, or an advice to switch on the second engine.
    def block(w, x):
        total = jax.new_ref(jnp.zeros(()))
        total[...] += jnp.sin(named(w, x)).sum()
        return total[...]

    with pytest.raises(ValueError, match=r"jax\.Ref"):
        jax.grad(lambda w: hl.remat(policy)(block)(w, SMALL))(ONES)


@pytest.mark.parametrize("policy", [hl.Policy({}), H], ids=str)
def test_constant_outputs_are_arrays(policy):
    def block(w, x):
        return jnp.sin(named(w, x)), 2.0, jnp.zeros(2), 3

    out = hl.remat(policy)(block)(ONES, SMALL)
    assert all(isinstance(o, jax.Array) for o in out)
    assert [o.dtype.name for o in out] == ["float32", "float32", "float32", "int32"]


def test_offload_beside_compression_takes_one_memory_only():
    def block(w, x):
        return jnp.sin(checkpoint_name(jnp.tanh(named(w, x)), "a"))

    both = {"h": hl.Compress(), "a": hl.Offload("unpinned_host")}
    with pytest.raises(
        ValueError, match=r"policy\['a'\] is offload:unpinned_host.*hl\.Offload\(\)"
    ):
        hl.remat(hl.Policy(both))(block)(ONES, SMALL)
