"""Values compared to the bit, or but for the rounding of floats."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hilore_jax.planning.values import alike, content, sketch

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(3, 7)).astype(np.float32)
TREE = {"x": X, "mask": X > 0, "key": jax.random.key(3), "half": jnp.bfloat16(1.5)}


def changed(name, value):
    return {**TREE, name: value}


@pytest.mark.parametrize("floats", [True, False])
def test_what_is_no_float_is_compared_to_the_bit(floats):
    flipped = (X > 0) ^ (np.arange(7) == 6)
    assert content(TREE, floats=floats) == content({**TREE}, floats=floats)
    for other in (
        changed("mask", flipped),
        changed("key", jax.random.key(4)),
        changed("x", X.reshape(7, 3)),
        changed("x", X.astype(np.float64)),
        changed("x", np.where(X > 1, np.nan, X)),
        changed("x", np.where(X > 1, np.inf, X)),
    ):
        assert content(TREE, floats=floats) != content(other, floats=floats)


def test_floats_are_compared_but_for_rounding():
    close = changed("x", np.nextafter(X, np.float32(9)))
    assert content(TREE) != content(close)
    assert content(TREE, floats=False) == content(close, floats=False)
    assert alike(sketch(TREE), sketch(close)) and alike(sketch(TREE), sketch(TREE))
    one = X.copy()
    one[2, 3] += 0.1
    others = (one, X[::-1], -X, 1.01 * X, np.zeros_like(X), X[:2])
    for other in others:
        assert not alike(sketch(TREE), sketch(changed("x", other)))
    assert not alike(sketch(TREE), sketch({"x": X})) and not alike([[1.0]], [[1.0, 2.0]])
    # A small leaf is not lost beside a large one, and zeros are zeros.
    assert not alike(sketch([1e6 * X, X[:1]]), sketch([1e6 * X, X[1:2]]))
    assert alike(sketch([0 * X]), sketch([0 * X])) and not alike(sketch([0 * X]), sketch([X]))


def test_what_is_not_finite_does_not_spoil_the_rest():
    bad = np.where(X > 1, np.nan, X)
    assert np.isfinite(sketch([bad])).all()
    assert alike(sketch([bad]), sketch([np.nextafter(bad, np.float32(9))]))
    assert not alike(sketch([bad]), sketch([bad[::-1]]))
