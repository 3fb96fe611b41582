"""Sketches of a user's own NNX module."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import hilore_jax as hl
from hilore_jax.logra import Sketches, SketchSlot, sketch_linears

SKETCHES = Sketches(rank=2, seed=3)


class Mlp(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.up = nnx.Linear(5, 7, rngs=rngs)
        self.blocks = nnx.List([nnx.Linear(7, 7, rngs=rngs, use_bias=False) for _ in range(2)])
        assert self.up.bias is not None
        self.up.bias.set_value(jnp.arange(7.0))

    def __call__(self, x):
        x = jax.nn.silu(self.up(x))
        for block in self.blocks:
            x = x + block(x)
        return x


X = jnp.asarray(np.random.default_rng(0).normal(size=(4, 5)), jnp.float32)


def test_chosen_linears_have_the_sketch_of_their_gradient():
    mlp = Mlp()
    sketched = sketch_linears(mlp, ["^up$", r"blocks\.1"], SKETCHES, update=4)
    assert isinstance(sketched, Mlp) and isinstance(sketched.blocks[0], nnx.Linear)
    assert isinstance(mlp.up, nnx.Linear)  # the module itself stays as it is
    np.testing.assert_allclose(sketched(X), mlp(X), rtol=1e-6)
    graphdef, slots, rest = nnx.split(sketched, SketchSlot, ...)
    found = jax.grad(lambda s: jnp.sum(jnp.sin(nnx.merge(graphdef, s, rest)(X))))(slots)
    whole, params, others = nnx.split(mlp, nnx.Param, ...)
    exact = jax.grad(lambda p: jnp.sum(jnp.sin(nnx.merge(whole, p, others)(X))))(params)
    for path, layer in ((("up",), "up"), (("blocks", 1), "blocks.1")):
        g = dict(nnx.to_flat_state(exact))[*path, "kernel"].get_value()
        a = SKETCHES.projection(SKETCHES.key(layer, 4), g.shape[0])
        s = dict(nnx.to_flat_state(found))[*path, "slot"].get_value()
        np.testing.assert_allclose(s, (a @ g).T, rtol=1e-4, atol=1e-5)
        assert np.abs(s).max() > 1e-2
    assert len(jax.tree.leaves(found)) == 2


def test_it_can_be_made_inside_a_jitted_update_and_refreshed():
    graphdef, state = nnx.split(Mlp())

    traces = []

    @jax.jit
    def sketch(state, update):
        traces.append(1)
        sketched = sketch_linears(nnx.merge(graphdef, state), "up", SKETCHES, update=update)
        inner, slots, rest = nnx.split(sketched, SketchSlot, ...)
        return jax.grad(lambda s: jnp.sum(nnx.merge(inner, s, rest)(X)))(slots)

    first, second = (jax.tree.leaves(sketch(state, n))[0] for n in (0, 1))
    assert len(traces) == 1 and np.abs(first - second).max() > 1e-2


def test_a_linear_of_its_own_becomes_a_sketched_one():
    linear = nnx.Linear(5, 7, rngs=nnx.Rngs(0), dtype=jnp.bfloat16)
    sketched = sketch_linears(linear, "", dataclasses.replace(SKETCHES, dtype="bfloat16"))
    assert sketched(X).dtype == jnp.bfloat16
    with hl.disabled():
        np.testing.assert_array_equal(sketched(X), linear(X))


def test_the_projection_is_rounded_alike_for_the_sketch_and_for_the_merge():
    sketched = sketch_linears(
        nnx.Linear(5, 7, rngs=nnx.Rngs(0), param_dtype=jnp.bfloat16), "", SKETCHES
    )
    with pytest.raises(ValueError, match="float32 in a layer that computes in bfloat16"):
        sketched(X.astype(jnp.bfloat16))
    assert sketched(X).dtype == jnp.float32
    key, narrow = SKETCHES.key("q", 0), Sketches(rank=3, dtype="bfloat16")
    a = narrow.projection_in("float32", key, 5)
    assert a.dtype == jnp.float32
    np.testing.assert_array_equal(a, narrow.projection(key, 5).astype(jnp.float32))


def as_they_are(values, **_):
    return values


def general(*args, **options):
    return jax.lax.dot_general(*args, **options)


def tied():
    mlp = Mlp()
    mlp.blocks[1] = mlp.blocks[0]
    return mlp


@pytest.mark.parametrize(
    ("module", "patterns", "rank", "message"),
    [
        (Mlp, "gate", 2, r"\['gate'\] match none .*\['blocks.0', 'blocks.1', 'up'\]"),
        (Mlp, ["up", "gate"], 2, r"\['gate'\] match none"),
        (Mlp, [], 2, "no patterns"),
        (Mlp, "up", 5, "up is 5 x 7, and a sketch of rank 5 no smaller"),
        (tied, "blocks", 2, "more than one place"),
        (
            lambda: nnx.Linear(5, 7, rngs=nnx.Rngs(0), precision="highest"),
            "",
            2,
            "the module has a precision of its own",
        ),
        (
            lambda: nnx.Linear(
                5,
                7,
                rngs=nnx.Rngs(0),
                promote_dtype=as_they_are,
                preferred_element_type=jnp.float32,
            ),
            "",
            2,
            "has a promote_dtype and preferred_element_type of its own, .* leave it out",
        ),
        (
            lambda: nnx.Linear(5, 7, rngs=nnx.Rngs(0), dot_general=general),
            "",
            2,
            "has a dot_general of its own",
        ),
        (
            lambda: nnx.Sequential(nnx.LoRALinear(5, 7, lora_rank=2, rngs=nnx.Rngs(0))),
            "layers",
            2,
            r"layers\.0 is a LoRALinear, and only a plain nnx\.Linear .* leave it out",
        ),
        (
            lambda: nnx.vmap(lambda key: nnx.Linear(5, 7, rngs=nnx.Rngs(key)))(
                jax.random.split(jax.random.key(0), 3)
            ),
            "",
            2,
            r"kernel of the module has shape \(3, 5, 7\), a stack of linear maps; expected",
        ),
        (
            lambda: nnx.Linear(5, 7, rngs=nnx.Rngs(0), dtype=jnp.bfloat16),
            "",
            2,
            r"float32 in a layer that computes in bfloat16.*give Sketches\(dtype='bfloat16'\)",
        ),
    ],
)
def test_what_cannot_be_sketched_is_named(module, patterns, rank, message):
    with pytest.raises(ValueError, match=message):
        sketch_linears(module(), patterns, Sketches(rank=rank))
