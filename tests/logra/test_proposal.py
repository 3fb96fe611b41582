"""Proposals over stacks of layers, against NumPy in float64."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from hilore_jax.logra import Sketches, move_kernels, proposal
from hilore_jax.logra.proposal import (
    factor_square,
    grams_of,
    move_stack,
    weight_square,
)

SKETCHES = Sketches(rank=3, seed=2)
SHAPES = {"a": (2, 8, 5), "b": (1, 8, 6), "c": (2, 7, 5)}  # n, in, out
LAYERS = {name: [f"{name}.{i}" for i in range(n)] for name, (n, _, _) in SHAPES.items()}
KEYS = {n: jnp.stack([SKETCHES.key(x, 4) for x in layers]) for n, layers in LAYERS.items()}
WIDTHS = {name: shape[1] for name, shape in SHAPES.items()}
RATIO = 1e-3


# One program for all tests: made by hand, each loop would be compiled again.
quick = functools.partial(
    jax.jit, compiler_options={"xla_backend_optimization_level": 0}, static_argnames="ratio"
)
propose = quick(proposal.propose)


@pytest.fixture(scope="module")
def grams():
    return grams_of(SKETCHES, KEYS, WIDTHS)


def drawn(seed, shape_of):
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape_of(*shape)) for name, shape in SHAPES.items()}


def narrow(arrays, dtype=jnp.float32):
    return {name: jnp.asarray(x, dtype) for name, x in arrays.items()}


def projections():
    return {
        name: [np.asarray(SKETCHES.projection(key, WIDTHS[name]), np.float64) for key in keys]
        for name, keys in KEYS.items()
    }


def expected(sketches, v, count, kernels, max_norm):
    """Methods 2.1 and 2.2, layer by layer."""
    a = projections()
    pairs = [(n, i) for n, (layers, _, _) in SHAPES.items() for i in range(layers)]
    square = sum(np.sum((sketches[n][i] @ a[n][i]) ** 2) for n, i in pairs)
    clip = min(1.0, max_norm / np.sqrt(square))
    d, after = {}, {}
    for n, i in pairs:
        s = sketches[n][i] * clip
        second = 0.95 * v[n][i] ** 2 + 0.05 * np.mean(s**2, axis=1)
        h = np.sqrt(second / (1 - 0.95**count))
        scale = 1 / (h + 1e-8 * h.mean())
        scale /= np.sqrt(np.mean(scale**2))
        row = scale[:, None] * s
        d[n, i] = row * np.linalg.norm(s) / np.linalg.norm(row)
        after[n, i] = np.sqrt(second)
    weights = sum(np.sum(w**2) for w in kernels.values())
    moved = sum(np.sum((d[n, i] @ a[n][i]) ** 2) for n, i in pairs)
    size = RATIO * np.sqrt(weights / moved)
    return {k: size * x for k, x in d.items()}, after, clip, np.sqrt(square)


@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_two_updates_are_those_of_the_equations(grams, max_norm):
    kernels = drawn(0, lambda n, i, o: (n, i, o))
    weights = weight_square(narrow(kernels))
    v64 = {name: np.zeros((n, o)) for name, (n, _, o) in SHAPES.items()}
    v = narrow(v64)
    for count in (1, 2):
        sketches = drawn(count, lambda n, i, o: (n, o, 3))
        d, after, clip, norm = expected(sketches, v64, count, kernels, max_norm)
        made = propose(
            narrow(sketches),
            grams,
            v,
            count,
            weight_square=weights,
            ratio=RATIO,
            max_norm=max_norm,
        )
        assert (clip < 1) == (max_norm == 0.5)  # else the clipping would go untested
        np.testing.assert_allclose(made.clip, clip, rtol=1e-5)
        np.testing.assert_allclose(made.sketch_norm, norm, rtol=1e-5)
        for (n, i), value in d.items():
            np.testing.assert_allclose(made.d[n][i], value, rtol=1e-4, atol=1e-9)
            np.testing.assert_allclose(made.v[n][i], after[n, i], rtol=1e-5)
        moved = factor_square(made.d, grams)
        np.testing.assert_allclose(np.sqrt(moved / weights), RATIO, rtol=1e-5)
        v, v64 = made.v, {n: np.asarray(x, np.float64) for n, x in made.v.items()}


def test_sketches_of_any_size_make_the_same_proposal(grams):
    # 1e-25 squared is no float32: a step that vanishes would say nothing of it.
    found = drawn(1, lambda n, i, o: (n, o, 3))
    v = {name: jnp.zeros((n, o)) for name, (n, _, o) in SHAPES.items()}
    one, tiny = (
        propose(narrow({n: s * x for n, x in found.items()}), grams, v, 1, weight_square=4.0,
                ratio=RATIO, max_norm=1e6)
        for s in (1.0, 1e-25)
    )  # fmt: skip
    for name in SHAPES:
        np.testing.assert_allclose(one.d[name], tiny.d[name], rtol=1e-4, atol=1e-9)


def test_zero_sketches_move_nothing(grams):
    zero = {name: jnp.zeros((n, o, 3)) for name, (n, _, o) in SHAPES.items()}
    v = {name: jnp.ones((n, o)) for name, (n, _, o) in SHAPES.items()}
    made = propose(zero, grams, v, 1, weight_square=4.0, ratio=RATIO, max_norm=1e6)
    assert not any(np.any(d) for d in made.d.values())
    assert float(made.sketch_norm) == 0.0 and float(made.clip) == 1.0


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_stack_moves_as_its_layers_do_and_not_at_all_where_it_must_not(dtype):
    kernel = jnp.asarray(drawn(0, lambda n, i, o: (n, i, o))["a"], dtype)
    factor = jnp.asarray(0.1 * drawn(1, lambda n, i, o: (n, o, 3))["a"], ml_dtypes.bfloat16)
    layers = dict(zip(LAYERS["a"], kernel, strict=True))
    alone = move_kernels(layers, dict(zip(LAYERS["a"], factor, strict=True)), SKETCHES, 4)
    moved = move_stack(kernel, factor, KEYS["a"], SKETCHES)
    for one, other in zip(moved, alone.values(), strict=True):
        np.testing.assert_array_equal(one, other)
    assert np.mean(np.asarray(moved != kernel)) > 0.9
    np.testing.assert_array_equal(move_stack(kernel, factor, KEYS["a"], SKETCHES, False), kernel)
