"""Fingerprints name what differs, and do not differ by accident."""

import subprocess
import sys

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from blocks import inputs, mlp, params
from hilore_jax.planning.fingerprint import describe, differences, fingerprint, program_digest

P, X = params(), inputs()
BASE = fingerprint(mlp, (P, X), (P, X), target="cpu", blocks=3)


def test_equal_situations_have_equal_fingerprints():
    shapes = jax.eval_shape(lambda: (P, X))
    assert fingerprint(mlp, shapes, shapes, target="cpu", blocks=3) == BASE
    assert differences(BASE, BASE) == []


def test_each_difference_is_named_with_both_values():
    wide = inputs(shape=(4, 5, 8))
    assert differences(BASE, fingerprint(mlp, (P, X), (P, X), target="gpu", blocks=3)) == [
        "target: planned for cpu; found gpu"
    ]
    found = differences(BASE, fingerprint(mlp, (P, wide), (P, X), target="cpu", blocks=3))
    assert "block arguments: planned for float32[3,5,8]; found float32[4,5,8]" in found
    assert differences(BASE, {"jax": "0.1"}) == [f"jax: planned for {jax.__version__}; found 0.1"]

    def other(p, x):
        return mlp(p, checkpoint_name(x, "also"))

    (found,) = differences(BASE, fingerprint(other, (P, X), (P, X), target="cpu", blocks=3))
    assert found.startswith("block: planned for")


def test_custom_rules_do_not_print_their_address_into_it():
    code = (
        "import jax, jax.numpy as jnp\n"
        "from hilore_jax.planning.fingerprint import fingerprint\n"
        "f = jax.custom_vjp(lambda x: x * 2)\n"
        "f.defvjp(lambda x: (x * 2, x), lambda x, g: (g,))\n"
        "pad = [lambda: i for i in range({n})]\n"
        "print(fingerprint(lambda x: f(x), (jnp.ones(3),), ())['block'])\n"
    )
    run = [
        subprocess.run(
            [sys.executable, "-c", code.format(n=n)], capture_output=True, text=True, check=True
        ).stdout
        for n in (1, 5000)
    ]
    assert run[0] == run[1] and run[0].strip()


def test_a_program_is_told_by_the_arrays_that_it_captures():
    def digest(w, scale=2.0, inner=lambda fn: fn):
        return program_digest(jax.make_jaxpr(lambda x: inner(lambda x: x @ w)(x) * scale)(X[0]))

    w, other = jnp.eye(8), jnp.eye(8).at[3, 3].add(1e-6)
    looped = lambda fn: lambda x: jax.lax.scan(lambda c, _: (fn(c), None), x, length=2)[0]  # noqa: E731
    for inner in (lambda fn: fn, jax.jit, jax.checkpoint, looped):
        assert digest(w, inner=inner) == digest(jnp.array(w), inner=inner)
        assert digest(w, inner=inner) != digest(other, inner=inner)
    assert digest(w) != digest(w, scale=2.0000002) != digest(w, inner=looped)


def test_describe_counts_equal_leaves():
    tree = {"a": jnp.ones((2, 3)), "b": jnp.ones((2, 3)), "c": jnp.ones((), jnp.int32)}
    assert describe(tree) == "2 x float32[2,3], int32[]"
