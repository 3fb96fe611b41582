"""Codecs against a float64 transcription of their equations, and what each promises."""

import dataclasses
import functools
import itertools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis.extra import numpy as hnp
from jax.ad_checkpoint import checkpoint_name

import hilore_jax as hl
from hilore_jax import codecs

CODECS = ("int8", "int4", "fp8_e4m3", "fp8_e5m2")
FLOAT8 = {"fp8_e4m3": ml_dtypes.float8_e4m3fn, "fp8_e5m2": ml_dtypes.float8_e5m2}
LIMITS = {"int8": 127, "int4": 7, "fp8_e4m3": 448, "fp8_e5m2": 57344}
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
TINY = float(np.finfo(np.float32).tiny)  # bfloat16's smallest normal number as well

# (shape, axis, tile, dtype): odd last tiles, tiles of one value or wider than the axis, whole axes;
# few, because each is compiled once for a codec and then serves every example.
LAYOUTS = (
    ((13,), 0, 5, "float32"),
    ((3, 7), -1, None, "float32"),
    ((4, 6), 0, 3, "bfloat16"),
    ((2, 5, 9), 1, 2, "float32"),
    ((2, 3, 8), -1, 128, "float16"),
    ((2, 2, 3, 5), -2, 2, "bfloat16"),
    ((3, 5), 1, 1, "float16"),
)

examples = hypothesis.settings(deadline=None, max_examples=50, derandomize=True)


def flush(x: np.ndarray) -> np.ndarray:
    """Float64 values of `x` as XLA reads float32 on CPU: subnormals are zero."""
    wide = x.astype(np.float64)
    return np.where(np.abs(wide) < TINY, 0.0, wide)


def tiles_of(size: int, tile: int | None) -> list[slice]:
    tile = size if tile is None else tile
    return [slice(start, min(start + tile, size)) for start in range(0, size, tile)]


def round_to(values: np.ndarray, codec: str) -> np.ndarray:
    """Values of the format nearest to scaled ones, ties to even, saturated."""
    values = np.clip(values.astype(np.float32), -LIMITS[codec], LIMITS[codec])
    if codec in FLOAT8:
        return values.astype(FLOAT8[codec]).astype(np.float64)
    return np.round(values).astype(np.float64)


def reference(x: np.ndarray, codec: str, axis: int, tile: int | None):
    """(scaled and rounded values in the shape of `x`, scales): the equations, tile by tile."""
    moved = np.moveaxis(flush(x), axis, -1)
    values, scales = np.zeros_like(moved), []
    for run in tiles_of(moved.shape[-1], tile):
        top = np.abs(moved[..., run]).max(-1)
        product = (top.astype(np.float32) * np.float32(1 / LIMITS[codec])).astype(np.float32)
        scale = product.astype(ml_dtypes.bfloat16).astype(np.float64)
        scale = np.where(scale < TINY, 1.0, scale)
        scales.append(scale)
        values[..., run] = round_to(moved[..., run] / scale[..., None], codec)
    return np.moveaxis(values, -1, axis), np.moveaxis(np.stack(scales, -1), -1, axis)


def unpack(encoded: codecs.Encoded, codec: str, shape: tuple[int, ...]) -> np.ndarray:
    """Payload values, read without the library."""
    payload = np.asarray(encoded.payload)
    if codec in FLOAT8:
        return payload.view(FLOAT8[codec]).astype(np.float64)
    if codec == "int4":
        both = np.concatenate([payload & 15, payload >> 4], axis=-1)[..., : shape[-1]]
        return both.astype(np.float64) - 8
    return payload.astype(np.float64)


@functools.partial(jax.jit, static_argnames=("codec", "axis", "tile"))
def both(x, codec, axis=-1, tile=128):
    """Encoded and decoded, compiled once for all examples of a layout."""
    encoded = codecs.encode(x, codec, axis=axis, tile=tile)
    return encoded, codecs.decode(encoded, codec, x.shape, x.dtype, axis=axis, tile=tile)


def round_trip(x, codec, axis=-1, tile: int | None = 128):
    return np.asarray(both(x, codec, axis=axis, tile=tile)[1])


measured = jax.jit(codecs.relative_error, static_argnames=("codec", "axis", "tile"))


@st.composite
def shapes(draw, direct):
    """Any (shape, axis, tile), zero-sized axes included."""
    shape = draw(hnp.array_shapes(min_dims=1, max_dims=4, min_side=0, max_side=300))
    axis = draw(st.integers(-len(shape), len(shape) - 1))
    return shape, axis, draw(st.sampled_from([None, 1, 2, 3, 32, 128, *([0] if direct else [])]))


@st.composite
def activations(draw):
    """(x, axis, tile) of every magnitude its dtype has: runs of zeros, subnormal, at the limit."""
    shape, axis, tile, name = draw(st.sampled_from(LAYOUTS))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    top = float(ml_dtypes.finfo(DTYPES[name]).max)
    units = [0.0, 1.0, 1e-38, 1e-40, 1e-7, 1e38, 65504.0, top]
    unit = rng.choice(units, shape) if draw(st.booleans()) else draw(st.sampled_from(units))
    x = np.clip(rng.uniform(-1, 1, shape) * unit, -top, top)
    if draw(st.booleans()):
        x = np.where(rng.uniform(size=shape) < 0.2, np.minimum(unit, top), x)
    return x.astype(DTYPES[name]), axis, tile


@pytest.mark.parametrize("codec", CODECS)
@examples
@hypothesis.given(case=activations())
def test_encode_is_the_float64_transcription_of_its_equations(codec, case):
    x, axis, tile = case
    encoded, _ = both(x, codec, axis=axis, tile=tile)
    values, scales = reference(x, codec, axis, tile)
    assert encoded.scale is not None and encoded.scale.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(encoded.scale).astype(np.float64), scales)
    np.testing.assert_array_equal(unpack(encoded, codec, x.shape), values)


@pytest.mark.parametrize("codec", CODECS)
@examples
@hypothesis.given(case=activations())
def test_decode_is_payload_times_scale_rounded_once(codec, case):
    x, axis, tile = case
    values, scales = reference(x, codec, axis, tile)
    runs = tiles_of(x.shape[axis], tile)
    spread = np.repeat(scales, [run.stop - run.start for run in runs], axis=axis)
    top = float(ml_dtypes.finfo(x.dtype).max)
    expected = np.clip((values * spread).astype(np.float32), -top, top).astype(x.dtype)
    found = round_trip(x, codec, axis, tile)
    assert found.dtype == x.dtype and np.isfinite(found.astype(np.float32)).all()
    np.testing.assert_allclose(flush(found), flush(expected), rtol=0, atol=0)


@pytest.mark.parametrize("codec", ["int8", "int4"])
@examples
@hypothesis.given(case=activations())
def test_integers_are_off_by_at_most_half_a_step(codec, case):
    x, axis, tile = case
    _, scales = reference(x, codec, axis, tile)
    runs = tiles_of(x.shape[axis], tile)
    step = np.repeat(scales, [run.stop - run.start for run in runs], axis=axis)
    # Runs too small for a scale of their own lose everything: less than limit * TINY.
    step = np.where(np.abs(flush(x)) < LIMITS[codec] * TINY, 2 * LIMITS[codec] * TINY, step)
    wide = x.astype(np.float64)
    error = np.abs(round_trip(x, codec, axis, tile).astype(np.float64) - wide)
    # float32 arithmetic, and the rounding of the result to the dtype of x.
    slack = float(ml_dtypes.finfo(x.dtype).eps) * np.abs(wide) + 1e-6 * step + TINY
    slack += float(ml_dtypes.finfo(x.dtype).smallest_subnormal)
    assert (error <= step / 2 + slack).all()


@pytest.mark.parametrize(("codec", "relative"), [("fp8_e4m3", 2.0**-4), ("fp8_e5m2", 2.0**-3)])
@examples
@hypothesis.given(seed=st.integers(0, 2**32 - 1), size=st.sampled_from([3, 128, 300]))
def test_normal_floats_keep_a_relative_error_of_half_their_last_bit(codec, relative, seed, size):
    rng = np.random.default_rng(seed)
    x = (rng.choice([-1, 1], size) * rng.uniform(2.0**-5, 1, size)).astype(np.float32)
    error = np.abs(round_trip(x, codec) - x)
    assert (error <= (relative + 2.0**-8) * np.abs(x)).all()
    assert error.max() > 0 or size < 10  # it is lossy


@pytest.mark.parametrize("codec", CODECS)
@examples
@hypothesis.given(data=st.data())
def test_nbytes_are_those_of_the_arrays(codec, data):
    shape, axis, tile = data.draw(shapes(direct=codec in FLOAT8))
    aval = jax.ShapeDtypeStruct(shape, jnp.float16)
    encoded, decoded = jax.eval_shape(
        functools.partial(both, codec=codec, axis=axis, tile=tile), aval
    )
    arrays = [a for a in encoded if a is not None]
    found = sum(a.size * a.dtype.itemsize for a in arrays)
    assert found == codecs.nbytes(shape, codec, axis=axis, tile=tile)
    assert {str(a.dtype) for a in arrays} <= {"int8", "uint8", "bfloat16"}
    assert decoded.shape == shape and decoded.dtype == jnp.float16


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(("shape", "axis"), [((2, 0, 7), 1), ((3, 0), 1), ((0, 3), 1)])
def test_empty_activations(codec, shape, axis):
    assert round_trip(jnp.ones(shape), codec, axis=axis).shape == shape
    assert float(measured(jnp.ones(shape), codec, axis=axis)) == 0


def test_nbytes_by_hand():
    shape = (2, 5, 7)
    assert codecs.nbytes(shape, "int8", axis=1, tile=2) == 70 + 2 * (2 * 3 * 7)
    assert codecs.nbytes(shape, "int4", axis=-1, tile=None) == 2 * 5 * 4 + 2 * (2 * 5 * 1)
    assert codecs.nbytes(shape, "fp8_e4m3", tile=0) == 70
    assert codecs.nbytes((2, 0, 7), "int8", axis=1, tile=2) == 0


@pytest.mark.newest
def test_a_direct_cast_saturates():
    x = jnp.array([448.0, 464, 465, 1e4, -1e30, 5e-4, 1e-3])
    found = round_trip(x, "fp8_e4m3", tile=0)
    assert found.tolist() == [448, 448, 448, 448, -448, 0, 2.0**-9]
    assert np.isnan(np.asarray(x).astype(ml_dtypes.float8_e4m3fn)[2:5].astype(np.float32)).all()
    assert int(codecs.count_clipped(x, "fp8_e4m3")) == 4
    wide = jnp.array([57344.0, 61440, 1e9, -61440])
    assert round_trip(wide, "fp8_e5m2", tile=0).tolist() == [57344, 57344, 57344, -57344]
    assert int(codecs.count_clipped(wide, "fp8_e5m2")) == 3
    assert both(x, "fp8_e4m3", tile=0)[0].scale is None


@pytest.mark.parametrize("codec", FLOAT8)
def test_float8_bits_are_those_of_ml_dtypes(codec):
    """Every value, every midpoint between two, and its neighbours: no double rounding."""
    every = np.arange(256, dtype=np.uint8).view(FLOAT8[codec]).astype(np.float32)
    every = np.unique(every[np.isfinite(every)])
    middle = (every[1:] + every[:-1]) / 2
    up, down = np.nextafter(middle, np.float32(np.inf)), np.nextafter(middle, np.float32(-np.inf))
    x = np.concatenate([every, middle, up, down])
    found = jax.jit(lambda x: codecs.encode(x, codec, tile=0).payload)(x)
    np.testing.assert_array_equal(np.asarray(found), x.astype(FLOAT8[codec]).view(np.uint8))


def test_ties_round_to_even():
    x = jnp.array([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, 126.5])
    assert both(x, "int8")[0].payload.tolist() == [127, 0, 2, 2, 0, -2, 126]
    small = jnp.array([7.0, 0.5, 1.5, 2.5, -3.5, 6.5])
    assert round_trip(small, "int4").tolist() == [7, 0, 2, 2, -4, 6]


@pytest.mark.parametrize("size", [1, 2, 14, 15])
def test_int4_holds_all_fifteen_values_two_to_a_byte(size):
    for start in range(-7, 8):
        x = ((np.arange(size) + start + 7) % 15 - 7).astype(np.float32)
        x[0] = 7.0  # the scale is 1
        encoded, found = both(x, "int4", tile=None)
        assert encoded.payload.shape == ((size + 1) // 2,) and encoded.payload.dtype == jnp.uint8
        np.testing.assert_array_equal(found, x)


@pytest.mark.parametrize("codec", CODECS)
def test_an_all_zero_tile_has_scale_one_and_stays_zero(codec):
    x = np.zeros((3, 5), np.float32)
    x[1, 3] = 2
    encoded, found = both(x, codec, tile=2)
    assert encoded.scale is not None
    ones = np.asarray(encoded.scale, np.float32) == 1
    assert ones.sum() == 8 and not ones[1, 1]
    assert (np.asarray(found)[x == 0] == 0).all() and found[1, 3] == pytest.approx(2, rel=0.01)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("top", [1e-37, 1e-38, 5e-39, 1e-44])
def test_a_tile_whose_scale_underflows_loses_at_most_what_it_holds(codec, top):
    x = np.array([top, -top / 3, 0, 1.0], np.float32)
    found = round_trip(x, codec, tile=3)
    assert np.isfinite(found).all() and found[2] == 0 and found[3] == pytest.approx(1, rel=5e-3)
    assert (np.abs(found - x)[:3] <= 1.01 * top).all()


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("name", DTYPES)
def test_the_largest_numbers_stay_finite(codec, name):
    """65504 / 127 rounds up to 516, and 516 * 127 is infinite in float16."""
    top = ml_dtypes.finfo(DTYPES[name]).max
    x = np.array([top, -top, top], DTYPES[name])
    found = round_trip(x, codec).astype(np.float64)
    np.testing.assert_allclose(found, x.astype(np.float64), rtol=2.0**-8)
    if codec == "int8" and name == "float16":
        assert both(x, codec)[0].scale.tolist() == [516]


@pytest.mark.newest
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
# The large ones: there XLA's CPU backend hands maxima to a library that passes over a NaN.
@pytest.mark.parametrize(
    ("shape", "axis", "tile"), [((3, 8), -1, 4), ((8, 256, 512), -1, 128), ((8, 256, 512), 1, 32)]
)
def test_a_non_finite_value_breaks_its_own_tile_and_no_other(codec, bad, shape, axis, tile):
    x = np.random.default_rng(3).normal(size=shape).astype(np.float32)
    at = tuple(n // 2 for n in shape)
    x[at] = bad
    run = list(at)
    run[axis] = slice(at[axis] // tile * tile, (at[axis] // tile + 1) * tile)
    expected = np.zeros(shape, bool)
    expected[tuple(run)] = True
    np.testing.assert_array_equal(np.isnan(round_trip(x, codec, axis, tile)), expected)
    assert np.isnan(measured(x, codec, axis=axis, tile=tile))


@pytest.mark.parametrize("codec", FLOAT8)
def test_a_direct_cast_breaks_only_the_non_finite_value(codec):
    x = jnp.array([1.0, jnp.nan, jnp.inf, -jnp.inf, 2.0])
    found = round_trip(x, codec, tile=0)
    np.testing.assert_array_equal(found, [1, np.nan, np.nan, np.nan, 2])


@pytest.mark.parametrize("codec", CODECS)
def test_jit_gives_the_same_bits(codec):
    """Maxima whose quotient and product with 1 / limit round to different bfloat16 scales."""
    top = np.random.default_rng(4).uniform(0.1, 9, 300_000).astype(np.float32)
    limit = np.float32(LIMITS[codec])
    one, other = ((v).astype(ml_dtypes.bfloat16) for v in (top / limit, top * (1 / limit)))
    picked = top[one != other]
    assert codec == "int8" or len(picked)
    x = np.concatenate([picked, top])[:200].reshape(10, 20, 1)
    x = np.concatenate([x, x / 3], -1)
    eager = codecs.encode(jnp.asarray(x), codec, tile=2)
    for found, expected in zip(both(x, codec, tile=2)[0], eager, strict=True):
        np.testing.assert_array_equal(np.asarray(found), np.asarray(expected))


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("axis", [-1, 0, 1])
def test_under_vmap_the_axis_is_each_examples(codec, axis):
    x = np.random.default_rng(2).normal(size=(3, 5, 7)).astype(np.float32)
    found = jax.vmap(lambda row: both(row, codec, axis=axis, tile=2)[1])(x)
    np.testing.assert_array_equal(found, [round_trip(row, codec, axis, 2) for row in x])
    assert not np.array_equal(found, x)


@pytest.mark.parametrize("codec", CODECS)
@examples
@hypothesis.given(case=activations())
def test_a_second_round_trip_changes_nothing(codec, case):
    x, axis, tile = case
    hypothesis.assume(x.dtype == np.float32 and np.abs(x).max() < 1e37)
    once = round_trip(x, codec, axis, tile)
    np.testing.assert_array_equal(flush(round_trip(once, codec, axis, tile)), flush(once))


@pytest.mark.parametrize("codec", FLOAT8)
def test_a_second_direct_cast_changes_nothing(codec):
    once = round_trip(np.random.default_rng(5).normal(size=99).astype(np.float32), codec, tile=0)
    np.testing.assert_array_equal(round_trip(once, codec, tile=0), once)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("scale", [1.0, 3e4, 1e-3])
def test_relative_error_is_the_ratio_of_norms(codec, name, scale):
    x = (np.random.default_rng(6).normal(size=(4, 33)) * scale / 4).astype(DTYPES[name])
    decoded = round_trip(x, codec, tile=8).astype(np.float64)
    exact = x.astype(np.float64)
    expected = np.linalg.norm(decoded - exact) / np.linalg.norm(exact)
    found = float(measured(x, codec, tile=8))
    assert found == pytest.approx(expected, rel=1e-4) and found > 0


def test_relative_error_at_the_ends_of_float32():
    pattern = np.array([1.0, 0.3, -0.7], np.float32)
    middle = float(measured(pattern))
    # Powers of two change neither the rounding nor the ratio; squares would leave float32.
    for power in (2.0**120, 2.0**-110):
        scaled = pattern * np.float32(power)
        assert float(measured(scaled)) == pytest.approx(middle, rel=1e-6)
    assert float(measured(jnp.zeros((2, 3)))) == 0


def test_error_falls_from_int4_to_int8():
    x = jax.random.normal(jax.random.key(0), (64, 256))
    error = {codec: float(measured(x, codec)) for codec in CODECS}
    assert error["int8"] < error["fp8_e4m3"] < error["fp8_e5m2"]
    assert error["int8"] < 0.01 < error["int4"]


def test_an_outlier_costs_only_its_own_tile():
    x = np.full((1, 256), 1e-3, np.float32)
    x[0, 0] = 1e3
    assert (round_trip(x, "int8", tile=128)[0, 128:] > 0).all()
    assert (round_trip(x, "int8", tile=None)[0, 1:] == 0).all()


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.uint8])
def test_integers_are_refused(dtype):
    with pytest.raises(TypeError, match=r"cannot compress u?int\d+\[2, 3\] with int8.*Store or"):
        codecs.encode(jnp.ones((2, 3), dtype))


@pytest.mark.parametrize("axis", [2, -3])
def test_an_axis_outside_the_activation_is_named_with_its_shape(axis):
    message = rf"codec axis {axis} is outside an activation of shape \(2, 3\)"
    with pytest.raises(ValueError, match=message):
        codecs.encode(jnp.ones((2, 3)), axis=axis)
    with pytest.raises(ValueError, match=message):
        codecs.nbytes((2, 3), axis=axis)
    with pytest.raises(ValueError, match=r"shape \(\)"):
        codecs.encode(jnp.ones(()), axis=-1)


def test_unknown_codecs():
    with pytest.raises(ValueError, match=r"unknown codec 'fp4'.*'fp8_e4m3'"):
        codecs.get_codec("fp4")
    with pytest.raises(TypeError):
        codecs.get_codec(8)  # pyright: ignore[reportArgumentType]


def test_a_users_own_codec():
    six = codecs.Codec("int6", "int8", 31.0, direct=False)

    @dataclasses.dataclass(frozen=True)
    class Doubled(codecs.Codec):
        """Even numbers only: half the codes are left to the user."""

        def quantize(self, x):
            return 2 * super().quantize(x / 2)

    even = Doubled("even", "int8", 30.0, direct=False)
    x = jax.random.normal(jax.random.key(1), (3, 9))
    for codec in (six, even):
        action = hl.Compress(codec, axis=0, tile=2)
        assert str(action) == f"{codec.name}:axis=0:tile=2" and hash(action)
        encoded, _ = both(x, codec, axis=0, tile=2)
        assert np.abs(np.asarray(encoded.payload)).max() == codec.limit
        assert sum(a.nbytes for a in encoded if a is not None) == codecs.nbytes(
            x.shape, codec, axis=0, tile=2
        )
    assert (np.asarray(encoded.payload) % 2 == 0).all()
    errors = [float(measured(x, c)) for c in ("int4", six, "int8")]
    assert all(a > b for a, b in itertools.pairwise(errors))

    @jax.jit
    def loss(x):
        def block(x):
            return jnp.sum(jnp.sin(checkpoint_name(x * 2, "h")))

        return hl.remat(hl.Policy({"h": hl.Compress(six)}))(block)(x)

    decoded = round_trip(2 * x, six)
    np.testing.assert_allclose(jax.grad(loss)(x), 2 * jnp.cos(decoded), rtol=1e-5, atol=1e-6)
    assert not np.allclose(decoded, 2 * x, atol=1e-4)
