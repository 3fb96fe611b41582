"""Projections: fixed words, the right moments, and nothing but their key matters."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from hilore_jax.logra import Sketches, projection
from hilore_jax.logra.projection import KINDS, layer_key, update_key

# From an implementation in plain Python integers.
GOLDEN_LAYER = [1998359401, 1622596111]
GOLDEN_LAST = [193881170, 1870070655]
GOLDEN_UPDATE = [1404040650, 4056255340]
GOLDEN_LATER = [932663609, 4096375823]
GOLDEN_SIGNS = "+--++-++--+-+-+++--++++-+-++-+-+-+++++--++--+-+-"
GOLDEN_LAST_SIGNS = "++++----+++--+++"
GOLDEN_NORMALS = [
    [-0.124417454, 0.574082732, -0.409466237],
    [-0.380597293, 0.463631421, 0.467626750],
]

KEY = update_key(layer_key(0, "blocks.0.q_proj"), 0)


draw = jax.jit(projection, static_argnums=(1, 2, 3, 4))
key_of = jax.jit(update_key)


def signs(a) -> str:
    return "".join("+" if x > 0 else "-" for x in np.asarray(a).ravel())


@pytest.mark.newest
def test_golden_keys():
    """Whoever changes one of these can no longer read the packets and checkpoints of before."""
    assert layer_key(0, "blocks.0.q_proj").tolist() == GOLDEN_LAYER
    assert layer_key(2**64 - 1, "Ω").tolist() == GOLDEN_LAST
    assert np.asarray(KEY).tolist() == GOLDEN_UPDATE
    assert np.asarray(update_key(layer_key(7, "lm_head"), 12345)).tolist() == GOLDEN_LATER


@pytest.mark.newest
def test_golden_projections():
    assert signs(draw(KEY, 3, 16)) == signs(projection(KEY, 3, 16)) == GOLDEN_SIGNS
    assert signs(draw(KEY, 130, 2))[-16:] == GOLDEN_LAST_SIGNS
    np.testing.assert_allclose(draw(KEY, 2, 3, "gaussian"), GOLDEN_NORMALS, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_sharding_does_not_matter(kind):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    plain = np.asarray(draw(KEY, 64, 6, kind))
    for spec in (PartitionSpec("x", None), PartitionSpec(None, "x")):
        sharding = NamedSharding(mesh, spec)
        make = jax.jit(lambda key: projection(key, 64, 6, kind), out_shardings=sharding)
        sharded = make(KEY)
        assert sharded.sharding == sharding
        assert sharded.addressable_shards[0].data.size == 64 * 3
        if kind == "rademacher":
            np.testing.assert_array_equal(sharded, plain)
        else:  # log and cos of compiled code differ in the last place
            np.testing.assert_allclose(sharded, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("flag", "values"),
    [
        ("jax_threefry_partitionable", (False, True)),
        ("jax_default_prng_impl", ("rbg", "unsafe_rbg")),
    ],
)
def test_flags_of_jax_do_not_matter(flag, values):
    def words(layer):
        key = update_key(layer, 0)
        return key, projection(key, 3, 16), projection(key, 2, 3, "gaussian")

    layer, before = layer_key(0, "blocks.0.q_proj"), getattr(jax.config, flag)
    try:
        for value in values:
            jax.config.update(flag, value)
            key, a, normals = jax.jit(words)(layer)
            assert np.asarray(key).tolist() == GOLDEN_UPDATE
            assert signs(a) == GOLDEN_SIGNS
            np.testing.assert_allclose(normals, GOLDEN_NORMALS, rtol=1e-5)
    finally:
        jax.config.update(flag, before)


@pytest.mark.parametrize("kind", KINDS)
def test_moments(kind):
    a = np.asarray(draw(KEY, 96, 4096, kind), np.float64) * 96**0.5
    # Of 393216 entries: six standard deviations of each statistic.
    assert abs(a.mean()) < 6 / 627
    assert abs((a**2).mean() - 1) < (1e-6 if kind == "rademacher" else 6 * 2**0.5 / 627)
    assert abs((a**3).mean()) < 6 * 15**0.5 / 627
    fourth = 1.0 if kind == "rademacher" else 3.0
    assert abs((a**4).mean() - fourth) < 6 * 96**0.5 / 627
    assert np.abs(a.mean(axis=0)).max() < 6 / 96**0.5
    assert np.abs(a.mean(axis=1)).max() < 6 / 64


def test_gaussian_tails():
    a = np.asarray(draw(KEY, 96, 4096, "gaussian")) * 96**0.5
    assert 4 < np.abs(a).max() < 6  # expected 4.7
    for sigmas, share in ((1, 0.31731), (2, 0.0455), (3, 0.0027)):
        assert abs((np.abs(a) > sigmas).mean() - share) < 6 * (share / a.size) ** 0.5


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_nearly_orthogonal(kind):
    """`A A^T = (k / r) I` up to 1/sqrt(k): what clipping through the Gram matrix relies on."""
    rank, width = 64, 8192
    gram = np.asarray(draw(KEY, rank, width, kind), np.float64)
    gram = gram @ gram.T * rank / width
    off = gram - np.diag(np.diag(gram))
    assert np.abs(np.diag(gram) - 1).max() < (
        1e-5 if kind == "rademacher" else 5 * (2 / width) ** 0.5
    )
    assert np.abs(off).max() < 5.5 / width**0.5
    assert np.std(off[~np.eye(rank, dtype=bool)]) == pytest.approx(width**-0.5, rel=0.1)


@pytest.mark.parametrize("kind", KINDS)
def test_columns_are_nearly_orthogonal(kind):
    """Across the words of one counter, and of neighbouring counters, there is no pattern."""
    a = np.asarray(draw(KEY, 4096, 48, kind), np.float64)
    gram = a.T @ a
    assert np.abs(gram - np.diag(np.diag(gram))).max() < 5.5 / 64


@pytest.mark.parametrize("rank", [1, 63, 64, 65, 130])
@pytest.mark.parametrize("kind", KINDS)
def test_a_lower_rank_is_a_prefix(rank, kind):
    whole = np.asarray(draw(KEY, 192, 5, kind)) * 192**0.5
    part = np.asarray(draw(KEY, rank, 5, kind)) * rank**0.5
    assert part.shape == (rank, 5)
    np.testing.assert_allclose(part, whole[:rank], rtol=1e-6)


def test_a_column_does_not_depend_on_the_width():
    assert np.array_equal(draw(KEY, 9, 5), draw(KEY, 9, 70)[:, :5])


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_is_float32_rounded_once(kind):
    wide = draw(KEY, 48, 40, kind)
    narrow = draw(KEY, 48, 40, kind, jnp.bfloat16)
    assert wide.dtype == jnp.float32 and narrow.dtype == jnp.bfloat16
    np.testing.assert_array_equal(narrow, wide.astype(jnp.bfloat16))
    assert not np.array_equal(narrow.astype(jnp.float32), wide)
    exact = draw(KEY, 256, 40, "rademacher", jnp.bfloat16)
    assert set(np.asarray(exact, np.float32).ravel()) == {-1 / 16, 1 / 16}


def test_layers_updates_and_seeds_differ():
    keys = {
        (seed, layer, update): np.asarray(key_of(layer_key(seed, layer), np.uint32(update)))
        for seed, layer, update in itertools.product(
            (0, 1, 2**32), ("blocks.1.q", "blocks.11.q", "blocks.1.k"), (0, 1, 2**31)
        )
    }
    drawn = {name: np.asarray(draw(key, 64, 256)) * 8 for name, key in keys.items()}
    for one, other in itertools.combinations(drawn.values(), 2):
        assert abs((one * other).mean()) < 6 / 128
    apart = np.asarray(draw(KEY, 64, 256, "gaussian")).ravel()
    assert abs(np.corrcoef(apart, np.asarray(draw(KEY, 64, 256)).ravel())[0, 1]) < 6 / 128


def test_an_update_is_a_number_of_32_bits():
    layer = layer_key(0, "q")
    last = np.asarray(update_key(layer, 2**32 - 1))
    np.testing.assert_array_equal(last, key_of(layer, np.uint32(2**32 - 1)))


def test_keys_of_a_stack_and_a_traced_update():
    layers = np.stack([layer_key(3, f"blocks.{n}.q_proj") for n in range(3)])
    stacked = key_of(layers, jnp.int32(5))
    alone = [np.asarray(update_key(layer, 5)) for layer in layers]
    np.testing.assert_array_equal(stacked, alone)
    sketches = Sketches(rank=4, seed=3)
    np.testing.assert_array_equal(sketches.key("blocks.2.q_proj", 5), alone[2])
    a = sketches.projections(stacked, 7)
    assert a.shape == (3, 4, 7)
    np.testing.assert_array_equal(a[2], sketches.projection(stacked[2], 7))


def test_sketches_round_the_projection_to_their_dtype():
    key = Sketches(rank=3).key("q", 0)
    assert Sketches(rank=3, dtype="bfloat16").projection(key, 5).dtype == jnp.bfloat16
    gaussian = Sketches(rank=3, kind="gaussian").projection(key, 5)
    np.testing.assert_array_equal(gaussian, projection(key, 3, 5, "gaussian"))


@pytest.mark.parametrize("kind", KINDS)
def test_the_error_of_a_sketch(kind):
    """`E ||G A^T A - G||^2 / ||G||^2 = (k - 1) / r` for signs; a Gaussian's is (k + 1) / r."""
    rank, width, tries = 8, 41, 300
    g = jax.random.normal(jax.random.key(0), (13, width))

    def error(seed):
        a = projection(update_key(layer_key(1, "w"), seed), rank, width, kind)
        return jnp.sum((g @ a.T @ a - g) ** 2) / jnp.sum(g**2)

    mean = jax.jit(lambda: jnp.mean(jax.lax.map(error, jnp.arange(tries))))()
    expected = (width - 1 if kind == "rademacher" else width + 1) / rank
    assert float(mean) == pytest.approx(expected, rel=0.1)
    assert float(mean) == pytest.approx(expected, rel=0.03)  # what this many tries give


@pytest.mark.parametrize("kind", KINDS)
def test_a_sketch_is_right_in_the_mean(kind):
    g = jax.random.normal(jax.random.key(0), (4, 12))

    def back(seed):
        a = projection(update_key(layer_key(1, "w"), seed), 8, 12, kind)
        return g @ a.T @ a

    mean = jax.jit(lambda: jnp.mean(jax.lax.map(back, jnp.arange(3000)), axis=0))()
    assert float(jnp.linalg.norm(mean - g) / jnp.linalg.norm(g)) < 2 * (11 / 8 / 3000) ** 0.5


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: layer_key(-1, "q"), "seed is -1, expected 0 to"),
        (lambda: layer_key(2**64, "q"), "seed is 18446744073709551616"),
        (lambda: layer_key(0, ""), "name is empty"),
        (lambda: projection(KEY, 0, 3), "0 x 3 entries, expected at least 1 x 1"),
        (lambda: projection(KEY, 3, 0), "3 x 0 entries"),
        (lambda: Sketches(rank=0), "rank is 0, expected at least 1"),
        (lambda: Sketches(seed=-1), "seed is -1, expected 0 to"),
        (lambda: Sketches(dtype="float16"), "dtype is 'float16', expected"),
    ],
)
def test_bad_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call()
