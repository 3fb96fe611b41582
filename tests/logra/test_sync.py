"""A packet moves a follower's weights as the trainer moved its own, or not at all."""

import subprocess
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hilore_jax.logra import (
    FileTransport,
    Follower,
    GapError,
    PacketError,
    Sketches,
    apply_packet,
    full_sync_bytes,
    make_full_sync,
    make_packet,
    move_kernels,
    packet_bytes,
    sync,
)
from hilore_jax.models.config import LINEARS
from hilore_jax.models.shapes import family
from small_run import SHAPES, SKETCHES, factors_of, kernels_of, packet_of, same_bits, trained

REPLAY = """
import sys
from hilore_jax.logra import FileTransport, Follower
for name in sys.argv[1:]:
    transport = FileTransport(name)
    follower = Follower.start(transport.full_sync(0, timeout=0))
    for data in transport.packets():
        follower = follower.apply(data)
    assert follower.update == 3
    open(name + "/result", "wb").write(follower.state().to_bytes())
"""


def test_another_process_replays_packets_bit_for_bit(tmp_path):
    starts = {name: kernels_of(name) for name in ("float32", "bfloat16")}
    for name, kernels in starts.items():
        transport = FileTransport(tmp_path / name)
        transport.send(make_full_sync(0, SKETCHES, kernels))
        for update in range(3):
            transport.send(packet_of(update))
    folders = [str(tmp_path / name) for name in starts]
    command = [sys.executable, "-c", REPLAY, *folders]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr
    for name, kernels in starts.items():
        expected = trained(kernels, range(3))
        found = Follower.start((tmp_path / name / "result").read_bytes())
        assert found.update == 3 and same_bits(found.kernels, expected)
        assert not any(np.array_equal(expected[layer], kernels[layer]) for layer in kernels)


def dense_step(update, layer):
    """F A of a layer in float64, `[in, out]`."""
    a = SKETCHES.projection(SKETCHES.key(layer, update), SHAPES[layer][0])
    return (np.asarray(factors_of(update)[layer], np.float64) @ np.asarray(a, np.float64)).T


def test_bfloat16_weights_are_not_rounded_to_nearest():
    kernels = kernels_of(jnp.bfloat16)
    moved = apply_packet(kernels, packet_of(0), expected=0)
    for layer, kernel in kernels.items():
        exact = np.asarray(kernel, np.float32) - dense_step(0, layer).astype(np.float32)
        nearest = exact.astype(jnp.bfloat16)
        found = np.asarray(moved[layer])
        assert (found != nearest).any(), f"{layer}: nothing here tells the two apart"
        ulp = np.abs(np.spacing(nearest).astype(np.float32))
        assert (np.abs(found.astype(np.float32) - exact) <= 1.001 * ulp).all()
    other = {layer: kernel.astype(jnp.float32) for layer, kernel in kernels.items()}
    rounded = move_kernels(other, factors_of(0), SKETCHES, 0)
    assert not same_bits({k: v.astype(jnp.bfloat16) for k, v in rounded.items()}, moved)


def test_float32_weights_move_by_the_dense_step():
    kernels = kernels_of()
    moved = apply_packet(kernels, packet_of(2), expected=2, sketches=SKETCHES)
    assert list(moved) == list(kernels)
    for layer, kernel in kernels.items():
        exact = np.asarray(kernel, np.float64) - dense_step(2, layer)
        np.testing.assert_allclose(moved[layer], exact, rtol=3e-7, atol=1e-8)


def changed(update=2, **changes):
    return replace(packet_of(update), **changes)


def narrow(update):
    factors = {layer: factor[:, :3] for layer, factor in factors_of(update).items()}
    return make_packet(update, replace(SKETCHES, rank=3), factors)


FACTORS = dict(packet_of(2).factors)
LESS = {layer: FACTORS[layer] for layer in list(FACTORS)[1:]}
SHORT = FACTORS | {"blocks.1.q_proj": FACTORS["blocks.1.q_proj"][:-1]}


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize(
    ("packet", "error", "told"),
    [
        (changed(4), GapError, r"update 4 came where .* 2 was expected: 2 missing; ask .* full"),
        (changed(1), GapError, r"update 1 was applied before, that of update 2 is expected"),
        (
            changed(run="b"),
            PacketError,
            "is of the run 'b', the follower's weights .* of the run ''",
        ),
        (changed(7, run="b"), PacketError, "is of the run 'b'"),
        *(
            (changed(sketches=replace(SKETCHES, **other)), PacketError, f"settings .*{told}.*, exp")
            for other, told in (
                ({"seed": 6}, "seed=6"),
                ({"kind": "gaussian"}, "kind='gaussian'"),
                ({"dtype": "bfloat16"}, "dtype='bfloat16'"),
            )
        ),
        (narrow(2), PacketError, r"settings .*rank=3.*, expected .*rank=4"),
        (changed(factors=LESS), PacketError, r"blocks.0.q_proj \(1\) are missing from it"),
        (
            changed(factors=FACTORS | {"head": FACTORS["blocks.1.q_proj"]}),
            PacketError,
            r"head \(1\) the follower does not have",
        ),
        (changed(factors=SHORT), PacketError, r"9 outputs of blocks.1.q_proj, .* \(12, 10\)"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_moves(packet, error, told, donate):
    kernels = kernels_of()
    with pytest.raises(error, match=told):
        apply_packet(kernels, packet, expected=2, sketches=SKETCHES, run="", donate=donate)
    assert same_bits(kernels, kernels_of())  # which a donated array would not let itself be asked
    moved = apply_packet(kernels, packet_of(2), expected=2, sketches=SKETCHES, donate=donate)
    assert same_bits(moved, move_kernels(kernels_of(), factors_of(2), SKETCHES, 2))


@pytest.mark.parametrize(
    ("kernel", "told"),
    [
        (jnp.ones((12, 10), jnp.float16), "is float16, expected float32 or bfloat16"),
        (jnp.ones((2, 12, 10)), r"\(2, 12, 10\), expected a jax array \[in, out\]"),
    ],
)
def test_kernels_that_cannot_be_moved(kernel, told):
    with pytest.raises(PacketError, match=f"the follower's blocks.1.q_proj .*{told}"):
        apply_packet(kernels_of() | {"blocks.1.q_proj": kernel}, packet_of(0), expected=0)


def test_kernels_are_donated_only_on_request():
    kernels = kernels_of()
    apply_packet(kernels, packet_of(0), expected=0)
    assert not any(kernel.is_deleted() for kernel in kernels.values())
    apply_packet(kernels, packet_of(0), expected=0, donate=True)
    assert all(kernel.is_deleted() for kernel in kernels.values())


def test_there_is_one_program_a_shape(monkeypatch):
    traced, merge = [], sync.merge_factor

    def counted(kernel, *args, **options):
        traced.append(kernel.shape)
        return merge(kernel, *args, **options)

    monkeypatch.setattr(sync, "merge_factor", counted)
    sketches = Sketches(rank=4, seed=77)  # of no other test, whose programs would be found
    kernels = kernels_of()
    for update in range(3):
        packet = make_packet(update, sketches, factors_of(update))
        kernels = apply_packet(kernels, packet, expected=update)
    assert sorted(traced) == sorted(set(SHAPES.values()))


def test_messages_do_not_change_with_arrays_that_are_donated():
    kernels = kernels_of()
    full = make_full_sync(0, SKETCHES, kernels)
    move_kernels(kernels, factors_of(0), SKETCHES, 0, donate=True)
    assert same_bits(full.kernels, kernels_of())


def test_a_packet_of_7b_is_less_than_an_eighth_of_the_weights_it_moves():
    config = family("qwen2.5-7b")
    kernels = {
        f"blocks.{block}.{name}": jax.ShapeDtypeStruct(config.linear_shape(name), jnp.bfloat16)
        for block in range(config.n_layers)
        for name in LINEARS
    }
    packet, full = packet_bytes(kernels, 256), full_sync_bytes(kernels)
    assert (packet, full) == (711_983_104, 13_050_576_896)
    assert packet <= full / 8
    assert full_sync_bytes(kernels, "float32") == 2 * full


def test_bytes_are_what_messages_take():
    kernels, packet = kernels_of(jnp.bfloat16), packet_of(0)
    full = make_full_sync(0, SKETCHES, kernels)
    assert packet.nbytes == packet_bytes(kernels, SKETCHES.rank)
    assert full.nbytes == full_sync_bytes(kernels) == full_sync_bytes(kernels_of(), jnp.bfloat16)
    for message in (packet, full):
        assert 0 < len(message.to_bytes()) - message.nbytes < 400 + 120 * len(SHAPES)
