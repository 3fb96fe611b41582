"""RowAdam against its equations in float64, and the norms that need no dense update."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hilore_jax.logra import projection, row_adam
from hilore_jax.logra.projection import layer_key, update_key
from hilore_jax.logra.row_adam import clip_scale, dense_square, is_usable, norm, update_scale


def equations(sketches, b2=0.95, eps=1e-8):
    """Methods 2.2, line by line, in float64: every update's D, and the last v."""
    v, proposals = np.zeros(len(sketches[0])), []
    for step, s in enumerate(np.asarray(sketches, np.float64), start=1):
        v = b2 * v + (1 - b2) * np.mean(s**2, axis=1)
        h = np.sqrt(v / (1 - b2**step))
        if not s.any():
            proposals.append(np.zeros_like(s))
            continue
        scale = 1 / (h + eps * np.mean(h))
        scale = scale / np.sqrt(np.mean(scale**2))
        moved = scale[:, None] * s
        proposals.append(moved * np.linalg.norm(s) / np.linalg.norm(moved))
    return proposals, v


step = jax.jit(lambda s, v, n, b2, eps: row_adam(s, v, n, b2=b2, eps=eps))


def run(sketches, b2=0.95, eps=1e-8):
    v, proposals = np.zeros(len(sketches[0]), np.float32), []
    for number, s in enumerate(sketches, start=1):
        d, v = step(np.asarray(s, np.float32), v, number, b2, eps)
        proposals.append(np.asarray(d, np.float64))
    return proposals, np.asarray(v, np.float64)


def fresh(updates=5, rows=17, rank=8):
    rng = np.random.default_rng(updates + rows)
    sizes = np.exp(rng.normal(size=(updates, rows, 1)))
    return (rng.normal(size=(updates, rows, rank)) * sizes).astype(np.float32)


def agree(sketches, **settings):
    proposals, v = run(sketches, **settings)
    expected, second = equations(sketches, **settings)
    for d, e in zip(proposals, expected, strict=True):
        np.testing.assert_allclose(d, e, rtol=2e-5, atol=2e-6 * (np.abs(e).max() or 1e-30))
    np.testing.assert_allclose(v, np.sqrt(second), rtol=2e-5)


@pytest.mark.parametrize("settings", [{}, {"b2": 0.5}, {"b2": 0.0}, {"eps": 0.3}, {"eps": 0.0}])
def test_the_equations_over_several_updates(settings):
    agree(fresh(), **settings)


@pytest.mark.parametrize("shape", [(1, 1), (1, 9), (33, 1)])
def test_small_shapes(shape):
    agree(fresh(3, *shape))


@pytest.mark.parametrize("scale", [1e-25, 1e-12, 1e8, 1e20])
def test_the_scale_of_gradients_does_not_matter(scale):
    agree(fresh() * np.float32(scale))


def test_scales_that_change_and_differ():
    sketches = fresh()
    sketches[1] *= np.float32(1e-20)
    sketches[3] *= np.float32(1e15)
    agree(sketches)
    apart = fresh()
    apart[:, ::3] *= np.float32(1e-25)
    apart[:, 1::3] *= np.float32(1e10)
    agree(apart)


def test_rows_that_are_zero():
    sketches = fresh()
    sketches[:, 2] = 0  # a row that never has a gradient
    sketches[0, 5] = 0  # one that has none at first
    sketches[3:, 7] = 0  # one that has none any more
    agree(sketches)
    proposals, v = run(sketches)
    assert v[2] == 0 and not any(d[2].any() for d in proposals)


def test_a_sketch_of_zeros_moves_nothing():
    sketches = fresh()
    sketches[2] = 0
    agree(sketches)
    proposals, before = run(sketches[:2])
    proposals, v = run(sketches[:3])
    assert not proposals[2].any()
    np.testing.assert_allclose(v, before * 0.95**0.5, rtol=1e-6)
    d, v = row_adam(jnp.zeros((3, 2)), jnp.zeros(3), 1)
    assert not np.any(d) and not np.any(v)


def test_the_second_moment_is_remembered():
    """A row that was large stays small: D is not that of a first update."""
    sketches = fresh()
    sketches[0, 4] *= 100
    later = run(sketches[:2])[0][1]
    first = run(sketches[1:2])[0][0]
    assert np.linalg.norm(later[4]) < 0.2 * np.linalg.norm(first[4])


@pytest.mark.parametrize("scale", [1e-25, 1.0, 1e20])
def test_the_norm_is_kept(scale):
    sketches = fresh() * np.float32(scale)
    for s, d in zip(sketches, run(sketches)[0], strict=True):
        kept = np.linalg.norm(np.float64(s))
        assert np.linalg.norm(d) == pytest.approx(kept, rel=1e-5)
        assert not np.allclose(d, s, rtol=0.1, atol=0)


def test_a_sketch_that_is_not_finite_is_not_hidden():
    for bad in (np.nan, np.inf):
        d, v = row_adam(jnp.array([[bad, 1.0], [1.0, 2.0]]), jnp.zeros(2), 1)
        assert not np.all(np.isfinite(d)) and not np.all(np.isfinite(v))


@pytest.mark.parametrize("scale", [1e-30, 1e-10, 1.0, 1e30])
def test_norm(scale):
    x = np.random.default_rng(0).normal(size=(5, 7)).astype(np.float32) * np.float32(scale)
    assert float(norm(jnp.asarray(x))) == pytest.approx(np.linalg.norm(np.float64(x)), rel=1e-6)
    assert float(norm(jnp.zeros((0, 3)))) == float(norm(jnp.zeros(3))) == 0.0
    assert np.isnan(norm(jnp.array([1.0, np.nan])))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["rademacher", "gaussian"])
def test_the_dense_norm_without_the_dense_update(kind, dtype):
    key = update_key(layer_key(0, "w"), 3)
    a = projection(key, 12, 50, kind, jnp.dtype(dtype))
    s = jnp.asarray(fresh(1, 20, 12)[0])
    dense = np.asarray(s, np.float64) @ np.asarray(a, np.float64)
    assert float(dense_square(s, a)) == pytest.approx(np.sum(dense**2), rel=1e-5)
    assert float(dense_square(s * 0, a)) == 0.0
    # Not the sketch's own norm, which is what clipping would take it for.
    assert np.sum(dense**2) > 2 * float(jnp.sum(s**2))


def test_no_dense_update_is_made():
    compiled = jax.jit(dense_square).lower(jnp.ones((600, 4)), jnp.ones((4, 700))).compile()
    memory = compiled.memory_analysis()
    assert memory is not None and memory.temp_size_in_bytes < 600 * 700


def test_clipping_brings_the_dense_gradient_to_its_norm():
    a = [projection(update_key(layer_key(0, name), 0), 6, 30) for name in "qk"]
    s = [jnp.asarray(x) for x in fresh(2, 10, 6)]
    square = sum(dense_square(x, y) for x, y in zip(s, a, strict=True))
    for limit in (0.1, 1.0):
        scale = clip_scale(square, limit)
        dense = [np.asarray(x * scale) @ np.asarray(y) for x, y in zip(s, a, strict=True)]
        assert np.sqrt(sum(np.sum(x**2) for x in dense)) == pytest.approx(limit, rel=1e-5)
    assert float(clip_scale(square, 1e6)) == 1.0
    assert float(clip_scale(square, None)) == 1.0
    assert float(clip_scale(0.0, 1.0)) == 1.0


def test_update_scale():
    a = projection(update_key(layer_key(0, "q"), 0), 6, 30)
    d = jnp.asarray(fresh(1, 10, 6)[0])
    weights = np.random.default_rng(1).normal(size=(10, 30))
    scale = float(update_scale(6e-5, np.sum(weights**2), dense_square(d, a)))
    moved = scale * np.asarray(d, np.float64) @ np.asarray(a, np.float64)
    assert np.linalg.norm(moved) / np.linalg.norm(weights) == pytest.approx(6e-5, rel=1e-5)
    assert float(update_scale(6e-5, 4.0, 0.0)) == 0.0
    assert float(update_scale(6e-5, 0.0, 4.0)) == 0.0
    assert update_scale(6e-5, 1.0, 1.0).dtype == jnp.float32


def test_is_usable():
    def usable(*arrays):
        return [bool(x) for x in is_usable([jnp.asarray(x) for x in arrays])]

    assert usable([1.0], [[0.0]]) == [True, True]
    assert usable([0.0], [[0.0]]) == [True, False]
    assert usable([np.nan], [[1.0]])[0] is False
    assert usable([0.0], [[-np.inf]])[0] is False
    assert is_usable({}) == (True, False)
