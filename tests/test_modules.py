"""`hl.remat` on Flax NNX modules: parameters get gradients, state keeps its updates."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

import hilore_jax as hl
from blocks import ROUNDING, relative
from hilore_jax import tracing
from hilore_jax.work import live_work

GC = hl.Policy({})
INT8 = hl.Policy({"h": hl.Compress("int8")})
POLICIES = pytest.mark.parametrize("policy", [GC, INT8, hl.Policy({"h": hl.Store()})], ids=str)


class Block(nnx.Module):
    def __init__(self, rngs, rate=0.0):
        self.inner = nnx.Linear(4, 8, param_dtype=float, rngs=rngs)
        self.outer = nnx.Linear(8, 4, param_dtype=float, rngs=rngs)
        self.drop = nnx.Dropout(rate, rngs=rngs)
        self.calls = nnx.BatchStat(jnp.zeros(()))

    def run(self, x, train=False):
        self.calls[...] += 1
        h = checkpoint_name(self.inner(x), "h")
        return x + self.outer(self.drop(jnp.sin(h), deterministic=not train))

    def __call__(self, x):
        return self.run(x)


def data():
    """In the default float type, as `param_dtype=float`: float64 where the fixture is on."""
    return jax.random.normal(jax.random.key(0), (6, 4))


def gradient(module, call):
    return nnx.grad(lambda m: jnp.sum(jnp.sin(call(m, data()))))(module)


def leaves(state):
    return nnx.to_pure_dict(state)


@pytest.mark.newest
@POLICIES
@pytest.mark.usefixtures("float64")
def test_a_method_decorated_in_the_class_body(policy):
    class Wrapped(Block):
        __call__ = hl.remat(policy)(Block.__call__)
        run_static = hl.remat(policy, static_argnames="train")(Block.run)

    plain, wrapped = Block(nnx.Rngs(0)), Wrapped(nnx.Rngs(0))
    want = gradient(plain, lambda m, x: m(x))
    got = gradient(wrapped, lambda m, x: m(x))
    bound = 0.02 if policy == INT8 else ROUNDING
    assert relative(leaves(got), leaves(want)) < bound
    assert float(wrapped.calls[...]) == 1.0 == float(plain.calls[...])
    got = gradient(wrapped, lambda m, x: m.run_static(x, train=True))
    assert relative(leaves(got), leaves(want)) < bound


@POLICIES
def test_programs_really_differ(policy):
    class Stateless(nnx.Module):
        def __init__(self, rngs):
            self.inner = nnx.Linear(4, 8, param_dtype=float, rngs=rngs)

        def __call__(self, x):
            return jnp.sin(checkpoint_name(self.inner(x), "h"))

    graph, state = nnx.split(Stateless(nnx.Rngs(0)))

    def value(state, call):
        return jnp.sum(call(nnx.merge(graph, state), data()))

    def matmuls(call):
        return live_work(jax.value_and_grad(lambda s: value(s, call)), state).matmuls

    wrapped = hl.remat(policy)(lambda m, x: m(x))
    assert matmuls(wrapped) == matmuls(lambda m, x: m(x)) + (policy == GC)
    kept = tracing.saved_residuals(lambda s: value(s, wrapped), state)
    assert ("int8" in [r.dtype for r in kept]) == (policy == INT8)


@pytest.mark.newest
@POLICIES
@pytest.mark.usefixtures("float64")
def test_an_instance_becomes_a_copy_that_survives_split_and_merge(policy):
    block = Block(nnx.Rngs(0))
    wrapped = hl.remat(policy)(block)
    assert isinstance(wrapped, Block) and wrapped is not block
    assert type(block) is Block and wrapped.inner is block.inner  # shared, and untouched
    assert nnx.split(wrapped)[0] != nnx.split(block)[0]  # the policy is part of what jit keys on

    def doubled(m):
        graph, params, rest = nnx.split(m, nnx.Param, ...)
        return nnx.merge(graph, jax.tree.map(lambda a: a * 2, params), rest)

    again, plain = doubled(wrapped), doubled(block)
    want = gradient(plain, lambda m, x: m(x))
    got = gradient(again, lambda m, x: m(x))
    assert relative(leaves(got), leaves(want)) < (0.02 if policy == INT8 else ROUNDING)
    assert all(float(jnp.abs(g).sum()) > 0 for g in jax.tree.leaves(leaves(got)))


@pytest.mark.usefixtures("float64")
def test_a_class_becomes_a_subclass():
    Wrapped = hl.remat(GC)(Block)
    assert issubclass(Wrapped, Block) and Wrapped is not Block
    assert Block.__call__ is not Wrapped.__call__
    wrapped = Wrapped(nnx.Rngs(0))
    got, want = gradient(wrapped, lambda m, x: m(x)), gradient(Block(nnx.Rngs(0)), Block.__call__)
    assert relative(leaves(got), leaves(want)) < ROUNDING


@pytest.mark.usefixtures("float64")
def test_a_bound_method_works_and_may_not_be_stored():
    block = Block(nnx.Rngs(0))
    got = gradient(block, lambda m, x: hl.remat(GC)(m.run)(x))
    assert relative(leaves(got), leaves(gradient(block, lambda m, x: m(x)))) < ROUNDING
    vars(block)["fast"] = method = hl.remat(GC)(block.run)
    with pytest.raises(TypeError, match=r"stored on the module.*zero gradients"):
        method(data())


@pytest.mark.newest
@POLICIES
@pytest.mark.usefixtures("float64")
def test_dropout_draws_once_and_advances_its_stream(policy):
    plain, wrapped = Block(nnx.Rngs(0), rate=0.5), Block(nnx.Rngs(0), rate=0.5)
    call = hl.remat(policy, static_argnames="train")(Block.run)
    for _ in range(2):  # the second draw differs from the first, and equally in both
        want = gradient(plain, lambda m, x: m.run(x, train=True))
        got = gradient(wrapped, lambda m, x: call(m, x, train=True))
        assert relative(leaves(got), leaves(want)) < (0.03 if policy == INT8 else ROUNDING)
    assert float(wrapped.calls[...]) == float(plain.calls[...]) == 2.0
    counts = [
        int(state.get_value())
        for m in (plain, wrapped)
        for _, state in nnx.to_flat_state(nnx.state(m, nnx.RngCount))
    ]
    assert counts[: len(counts) // 2] == counts[len(counts) // 2 :] and max(counts) == 2


def test_only_changed_state_leaves_the_block():
    # What the pure function returns is what a scan would stack: never the read-only parameters.
    block = Block(nnx.Rngs(0))
    call = hl.remat(GC)(lambda m, x: m(x))
    graph, state = nnx.split(block)
    jaxpr = jax.make_jaxpr(lambda s, x: call(nnx.merge(graph, s), x))(state, data())
    (eqn,) = [e for e in jaxpr.jaxpr.eqns if e.primitive.name in ("checkpoint", "remat2")]
    outs = [tuple(v.aval.shape) for v in eqn.outvars]
    assert sorted(outs) == [(), (6, 4)]


@pytest.mark.usefixtures("float64")
def test_modules_inside_pytrees_and_shared_between_arguments():
    a = Block(nnx.Rngs(0))

    def both(pair, x):
        return pair["one"](x) + pair["two"](x)

    out = hl.remat(GC)(both)({"one": a, "two": a}, data())
    assert relative(out, 2 * Block(nnx.Rngs(0))(data())) < ROUNDING
    assert float(a.calls[...]) == 2.0


class Ticket(nnx.Pytree):
    def __init__(self):
        self.n = nnx.Variable(jnp.zeros(()))


@pytest.mark.newest
@POLICIES
@pytest.mark.usefixtures("float64")
def test_streams_variables_and_other_nnx_objects_keep_their_updates(policy):
    def block(w, stream, variable, ticket, x):
        variable[...] += 1
        ticket.n[...] += 1
        keep = jax.random.bernoulli(stream(), 0.5, x.shape)
        return jnp.where(keep, jnp.sin(checkpoint_name(x @ w, "h")), 0.0)

    w = jax.random.normal(jax.random.key(3), (4, 4))
    owned = {
        name: (nnx.Rngs(5).default, nnx.Variable(jnp.zeros(())), Ticket())
        for name in ("got", "want")
    }
    call = hl.remat(policy)(block)
    for turn in (1, 2):  # the second draw differs from the first, and equally in both
        got = nnx.grad(lambda *owned: call(*owned, data()).sum())(w, *owned["got"])
        want = nnx.grad(lambda w, s, v, t: block(w, s, v, t, data()).sum())(w, *owned["want"])
        assert relative(got, want) < (0.03 if policy == INT8 else ROUNDING)
        stream, variable, ticket = owned["got"]
        assert int(stream.count[...]) == turn == float(variable[...]) == float(ticket.n[...])


@pytest.mark.usefixtures("float64")
def test_a_state_stays_a_pytree():
    graph, state = nnx.split(nnx.Linear(4, 8, param_dtype=float, rngs=nnx.Rngs(0)))
    seen = []

    def block(state, x):
        seen.append(type(state))
        return jnp.sin(nnx.merge(graph, state)(x))

    got = jax.grad(lambda s: hl.remat(GC)(block)(s, data()).sum())(state)
    want = jax.grad(lambda s: block(s, data()).sum())(state)
    assert relative(leaves(got), leaves(want)) < ROUNDING
    assert set(seen) == {nnx.State}


def test_explain_takes_a_module():
    block = Block(nnx.Rngs(0))
    explanation = hl.explain(INT8, lambda m, x: m(x), block, data())
    assert explanation.rows[0].name == "h" and explanation.rows[0].kept_bytes == 6 * 8 + 6 * 2
    assert float(block.calls[...]) == 0.0  # explaining runs nothing


def test_growing_a_module_inside_the_block_is_refused():
    def grow(m, x):
        m.extra = nnx.Param(jnp.zeros(3))
        return m(x)

    with pytest.raises(ValueError, match="changed the structure of its NNX module"):
        hl.remat(GC)(grow)(Block(nnx.Rngs(0)), data())


def test_what_is_not_callable_is_refused():
    with pytest.raises(TypeError, match="decorates a function or NNX module"):
        hl.remat(GC)(3)
    with pytest.raises(TypeError, match="decorates functions and NNX modules"):
        hl.remat(GC)(dict)
