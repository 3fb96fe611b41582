"""A follower moves on with every packet, comes back by a full sync, and survives a restart."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from hilore_jax.logra import (
    FileTransport,
    Follower,
    GapError,
    PacketError,
    Sketches,
    follow,
    make_full_sync,
    sync,
)
from small_run import SKETCHES, kernels_of, packet_of, same_bits, start_of, trained


@pytest.mark.parametrize("donate", [False, True])
def test_a_refusal_leaves_the_follower_and_a_full_sync_brings_it_on(donate):
    follower = Follower.start(start_of(jnp.bfloat16).to_bytes(), donate=donate)
    follower = follower.apply(packet_of(0).to_bytes())
    damaged = bytearray(packet_of(1).to_bytes())
    damaged[-1] ^= 1
    for message, error in ((packet_of(2), GapError), (packet_of(0), GapError), (damaged, None)):
        with pytest.raises(error or PacketError):
            follower.apply(message)
        assert follower.update == 1
    expected = trained(kernels_of(jnp.bfloat16), range(1))
    assert same_bits(follower.kernels, expected)
    follower = follower.apply(start_of(jnp.bfloat16, 3).to_bytes()).apply(packet_of(3))
    assert follower.update == 4
    assert same_bits(follower.kernels, trained(kernels_of(jnp.bfloat16), range(4)))


def test_a_follower_goes_on_after_a_restart():
    follower = Follower.start(start_of(jnp.bfloat16)).apply(packet_of(0)).apply(packet_of(1))
    again = Follower.start(follower.state().to_bytes()).apply(packet_of(2))
    whole = follower.apply(packet_of(2))
    assert again.update == whole.update == 3 and again.sketches == SKETCHES
    assert same_bits(again.kernels, whole.kernels)
    with pytest.raises(GapError, match="applied before"):
        Follower.start(again.state()).apply(packet_of(2))


def test_kernels_of_a_message_are_never_donated():
    data = start_of().to_bytes()
    before = bytes(data)
    Follower.start(data).apply(packet_of(0))
    Follower.start(start_of()).apply(data).apply(packet_of(0))
    assert data == before


def test_settings_are_held_to_until_a_full_sync_changes_them():
    follower = Follower.start(start_of())
    other = replace(packet_of(0), sketches=Sketches(rank=4, seed=6))
    with pytest.raises(PacketError, match=r"settings .*seed=6"):
        follower.apply(other)
    follower = follower.apply(make_full_sync(0, other.sketches, kernels_of()))
    assert follower.apply(other).sketches == other.sketches


def test_packets_of_another_run_are_refused_until_a_full_sync_of_it(tmp_path):
    """Same settings, same number, other weights before: nothing else tells the two apart."""
    follower = Follower.start(replace(start_of(), run="a"))
    assert follower.state().run == "a"
    with pytest.raises(PacketError, match=r"is of the run 'b', .* of the run 'a': .* full sync"):
        follower.apply(replace(packet_of(0), run="b"))
    assert follower.apply(replace(packet_of(0), run="a")).update == 1
    transport = FileTransport(tmp_path)
    transport.send(replace(packet_of(0), run="b"))
    transport.send(replace(start_of(update=1), run="b"))
    follower = follow(follower, transport, timeout=0.0)
    assert (follower.update, follower.run) == (1, "b")
    assert follower.apply(replace(packet_of(1), run="b")).update == 2


@pytest.mark.parametrize("lost", [TimeoutError, ConnectionResetError])
def test_what_was_refused_is_said_where_no_full_sync_comes(lost):
    class Receiver:
        def receive(self, update, timeout=0.0):
            return packet_of(2).to_bytes()

        def full_sync(self, at_least, timeout=0.0):
            raise lost("nothing came")

    kind = TimeoutError if lost is TimeoutError else ConnectionError
    with pytest.raises(kind, match=r"^nothing came. .* refused: the packet of update 2 .* missing"):
        follow(Follower.start(start_of()), Receiver(), timeout=0.0)


@pytest.mark.parametrize(
    "kernels",
    [
        kernels_of() | {"head": jnp.ones((2, 3))},
        kernels_of() | {"blocks.1.q_proj": jnp.ones((12, 11))},
        kernels_of(jnp.bfloat16),
    ],
)
def test_a_full_sync_of_another_model_is_refused(kernels):
    follower = Follower.start(start_of())
    with pytest.raises(PacketError, match=r"differs in \d layers: it has .*another model"):
        follower.apply(make_full_sync(1, SKETCHES, kernels))
    assert same_bits(follower.kernels, kernels_of())


def test_following_a_folder_asks_for_what_is_missing(tmp_path):
    transport = FileTransport(tmp_path)
    transport.send(start_of())
    follower = Follower.start(transport.full_sync())
    transport.send(packet_of(0))
    follower = follow(follower, transport, timeout=0.0)
    assert follower.update == 1
    transport.send(packet_of(2))  # and none of update 1
    with pytest.raises(TimeoutError, match="no full sync from before update 2 or later"):
        follow(follower, transport, timeout=0.0)
    assert transport.wanted()
    transport.send(start_of(update=3))
    assert not transport.wanted()
    follower = follow(follower, transport, timeout=0.0)
    assert follower.update == 3 and same_bits(follower.kernels, trained(kernels_of(), range(3)))
    damaged = transport.send(packet_of(3))
    damaged.write_bytes(damaged.read_bytes()[:-3])
    transport.send(start_of(update=4))
    assert follow(follower, transport, timeout=0.0).update == 4


def test_kernels_are_moved_in_pieces_of_so_many_rows(monkeypatch):
    asked, merge = [], sync.merge_factor

    def noted(*args, rows):
        asked.append(rows)
        return merge(*args, rows=rows)

    monkeypatch.setattr(sync, "merge_factor", noted)
    follower = Follower.start(start_of(), rows=7).apply(packet_of(0))
    assert set(asked) == {7} and follower.rows == 7
    for layer, kernel in trained(kernels_of(), range(1)).items():
        np.testing.assert_allclose(follower.kernels[layer], kernel, rtol=3e-7, atol=1e-8)


@pytest.mark.parametrize("axis", [AxisType.Auto, AxisType.Explicit])
def test_sharded_kernels_stay_where_they_are(axis):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(axis,))
    place = NamedSharding(mesh, PartitionSpec("x", None))
    kernels = {layer: jax.device_put(kernel, place) for layer, kernel in kernels_of().items()}
    follower = Follower(kernels=kernels, update=0, sketches=SKETCHES, rows=None)
    follower = follower.apply(packet_of(0))
    for layer, kernel in trained(kernels_of(), range(1)).items():
        np.testing.assert_allclose(follower.kernels[layer], kernel, rtol=3e-7, atol=1e-8)
    restarted = follower.apply(start_of(update=2))
    assert same_bits(restarted.kernels, trained(kernels_of(), range(2)))
    for each in (follower, restarted):
        assert all(kernel.sharding == place for kernel in each.kernels.values())
