"""Merging a factor: the dense sum, in chunks, and bfloat16 weights that are right in the mean."""

import functools

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from hilore_jax.logra import merge_factor, projection
from hilore_jax.logra.merge import stochastic_round
from hilore_jax.logra.projection import layer_key, update_key

KEY = update_key(layer_key(0, "blocks.0.q_proj"), 0)
D_IN, D_OUT, RANK = 37, 11, 4  # a rank whose signs are exact, and so are sums of them
merge = jax.jit(merge_factor, static_argnames="rows")
rounded = jax.jit(stochastic_round)


def bits(x) -> np.ndarray:
    return np.asarray(x).view(np.uint16 if x.dtype == jnp.bfloat16 else np.uint32)


def case(dtype="float32", size=1.0, d_in=D_IN, d_out=D_OUT):
    rng = np.random.default_rng(0)
    kernel = jnp.asarray(rng.normal(size=(d_in, d_out)), dtype)
    factor = jnp.asarray(size * rng.normal(size=(d_out, RANK)), jnp.bfloat16)
    return kernel, factor, projection(KEY, RANK, d_in)


def dense(kernel, factor, a) -> np.ndarray:
    wide = [np.asarray(x).astype(np.float64) for x in (kernel, factor, a)]
    return wide[0] - (wide[1] @ wide[2]).T


def neighbours(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The bfloat16 values next to float32 ones, towards zero and away from it."""
    below = x.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
    above = below + np.where(below.view(np.float32) == x, np.uint32(0), np.uint32(0x10000))
    return below.view(np.float32), above.view(np.float32)


@pytest.mark.parametrize("rows", [1, 5, 37, 100, None])
def test_float32_weights_move_by_the_dense_product(rows):
    kernel, factor, a = case()
    moved = merge(kernel, factor, a, rows=rows)
    assert moved.dtype == jnp.float32
    np.testing.assert_allclose(moved, dense(kernel, factor, a), rtol=1e-6, atol=1e-6)
    assert float(jnp.abs(moved - kernel).max()) > 1
    np.testing.assert_array_equal(moved, merge(kernel, factor, a, KEY, rows=rows))


def test_a_projection_in_bfloat16():
    kernel, factor, a = case()
    a = a.astype(jnp.bfloat16)
    moved = merge(kernel, factor, a, rows=8)
    np.testing.assert_allclose(moved, dense(kernel, factor, a), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("rows", [5, None])
def test_bfloat16_weights_become_one_of_two_neighbours(rows):
    kernel, factor, a = case("bfloat16", 1e-2)
    moved = merge(kernel, factor, a, KEY, rows=rows)
    assert moved.dtype == jnp.bfloat16
    exact = dense(kernel, factor, a)
    got = np.asarray(moved, np.float64)
    low, high = neighbours(exact.astype(np.float32))
    assert np.all((got == low) | (got == high))
    towards, away = (got == low) & (low != high), (got == high) & (low != high)
    assert towards.sum() > 50 and away.sum() > 50


def test_bfloat16_weights_are_right_in_the_mean():
    """A step of some hundredths of a unit in the last place: to nearest, hardly any would move."""
    kernel, factor, a = case("bfloat16", 1e-4)
    keys = jax.vmap(lambda n: update_key(layer_key(1, "q"), n))(jnp.arange(2000))
    move = functools.partial(merge_factor, rows=16)
    moved = jax.jit(jax.vmap(move, in_axes=(None, None, None, 0)))(kernel, factor, a, keys)
    exact = dense(kernel, factor, a)
    mean = np.mean(np.asarray(moved, np.float64), axis=0)
    low, high = neighbours(exact.astype(np.float32))
    spread = np.abs(high - low) / 2 / 2000**0.5
    assert np.all(np.abs(mean - exact) < 6 * spread + 1e-7)
    step = exact - np.asarray(kernel, np.float64)
    gained = np.sum((mean - np.asarray(kernel, np.float64)) * step) / np.sum(step**2)
    assert gained == pytest.approx(1, abs=0.05)
    nearest = np.asarray(jnp.asarray(exact, jnp.float32).astype(jnp.bfloat16), np.float64)
    changed = (np.asarray(moved[0]) != np.asarray(kernel)).mean()
    assert (nearest != np.asarray(kernel, np.float64)).mean() < 0.5 * changed


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_chunks_do_not_matter(dtype):
    kernel, factor, a = case(dtype, 1e-2)
    whole = merge(kernel, factor, a, KEY, rows=None)
    for rows in (1, 5, 36, 37):
        np.testing.assert_array_equal(bits(merge(kernel, factor, a, KEY, rows=rows)), bits(whole))
    other = merge(kernel, factor, a, update_key(layer_key(0, "blocks.0.q_proj"), 1), rows=None)
    assert np.array_equal(bits(other), bits(whole)) == (dtype == "float32")


def test_shards_do_not_matter():
    kernel, factor, a = case("bfloat16", 1e-2, d_in=32, d_out=10)
    whole = merge(kernel, factor, a, KEY, rows=None)
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    for spec in (PartitionSpec("x", None), PartitionSpec(None, "x")):
        sharding = NamedSharding(mesh, spec)
        moved = jax.jit(functools.partial(merge_factor, rows=None), out_shardings=sharding)(
            jax.device_put(kernel, sharding), factor, a, KEY
        )
        assert moved.sharding == sharding
        np.testing.assert_array_equal(bits(moved), bits(whole))


@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9])
def test_the_share_that_is_rounded_away_from_zero(share, sign):
    x = jnp.full((301, 203), sign * (1.5 + share * 2.0**-7), jnp.float32)
    got = np.abs(np.asarray(rounded(x, KEY), np.float64))
    assert set(np.unique(got)) <= {1.5, 1.5 + 2.0**-7}
    away = (got > 1.5).mean()
    assert abs(away - share) < 5 * (share * (1 - share) / x.size) ** 0.5 + 1e-9
    # Neighbouring entries, and the four that share a counter, choose apart.
    if share == 0.5:
        chosen = (got > 1.5) - 0.5
        for shift in (1, 2, 3, 4):
            assert abs((chosen[:, shift:] * chosen[:, :-shift]).mean()) < 6 / 4 / 240
            assert abs((chosen[shift:] * chosen[:-shift]).mean()) < 6 / 4 / 240


def test_values_at_the_edges_are_kept():
    values = [0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -(2.0**-126), 2.0**120]
    x = jnp.asarray([values], jnp.float32)
    got = rounded(x, KEY)
    np.testing.assert_array_equal(np.asarray(got, np.float32), x)
    assert np.signbit(np.asarray(got, np.float32))[0, 1]
    nans = jnp.asarray(np.array([[0x7F800001, 0xFFFFFFFF]], np.uint32).view(np.float32))
    assert np.all(np.isnan(rounded(nans, KEY)))


def test_a_rows_choice_depends_on_its_number_alone():
    x = jax.random.normal(jax.random.key(0), (20, 9))
    whole = bits(rounded(x, KEY))
    np.testing.assert_array_equal(bits(rounded(x[7:], KEY, 7)), whole[7:])
    np.testing.assert_array_equal(bits(rounded(x[:, :6], KEY)), whole[:, :6])
    assert not np.array_equal(bits(rounded(x[7:], KEY)), whole[7:])


def test_rounding_does_not_use_the_projections_words():
    """Signs of A are bits of (row, column); noise that repeated them would follow the step."""
    up = np.asarray(rounded(jnp.full((1, 400), 1.0 + 2.0**-8, jnp.float32), KEY))[0] > 1
    signs = np.asarray(projection(KEY, 64, 100)) > 0  # of the same columns of counters
    for part in up.reshape(100, 4).T:
        agree = np.mean(signs == part, axis=1)
        assert agree.min() > 0.2 and agree.max() < 0.8


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_second_matrix_exists(dtype):
    """Merged in place, a block of rows at a time; on a CPU, bfloat16 is copied once as it is."""
    d_in, d_out, rank, rows = 2048, 256, 4, 64
    shapes = [((d_in, d_out), dtype), ((d_out, rank), "bfloat16"), ((rank, d_in), "float32")]
    args = [jax.ShapeDtypeStruct(shape, jnp.dtype(kind)) for shape, kind in shapes]
    key = jax.ShapeDtypeStruct((2,), jnp.uint32)

    def compiled(rows):
        function = functools.partial(merge_factor, rows=rows)
        program = jax.jit(function, donate_argnums=0).lower(*args, key).compile()
        memory, text = program.memory_analysis(), program.as_text()
        assert memory is not None and text is not None
        assert memory.alias_size_in_bytes == d_in * d_out * jnp.dtype(dtype).itemsize
        return memory.temp_size_in_bytes, text.count(f"f32[{d_in},{d_out}]")

    size, arrays = compiled(rows)
    copy = d_in * d_out * 2 if dtype == "bfloat16" else 0
    assert size - copy < 8 * rows * d_out * 4 < d_in * d_out * 2
    assert dtype == "float32" or arrays == 0
    size, arrays = compiled(None)
    assert size >= d_in * d_out * 4 and arrays > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"factor": (D_OUT + 1, RANK)}, r"factor \(12, 4\).*expected \[in, out\], \[out, rank\]"),
        ({"a": (RANK, D_IN + 1)}, r"projection \(4, 38\)"),
        ({"a": (RANK + 1, D_IN)}, r"projection \(5, 37\)"),
        ({"dtype": "bfloat16"}, r"rounds at random.*key.*float32"),
        ({"dtype": "float16"}, r"kernel is float16, expected float32 or bfloat16"),
    ],
)
def test_bad_arguments(change, message):
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        with pytest.raises(ValueError, match=f"(?s){message}"):
            merge_factor(
                jnp.zeros((D_IN, D_OUT), change.get("dtype", "float32")),
                jnp.zeros(change.get("factor", (D_OUT, RANK)), jnp.bfloat16),
                jnp.zeros(change.get("a", (RANK, D_IN))),
            )
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)
