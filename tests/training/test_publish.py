"""What a publisher writes: the start, packets, full syncs on request and in between."""

import os

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from hilore_jax.logra import FileTransport, Follower, FullSync, Packet, Sketches
from hilore_jax.models.sketched import sketched_config, sketched_stacks, stacked
from hilore_jax.training.publish import Publisher, by_layer

SKETCHES = Sketches(rank=2, seed=3)


@pytest.fixture(scope="module")
def held(tiny):
    """The config with sketches and the model's weights."""
    model = tiny()
    config = sketched_config(model.config, SKETCHES, ("q_proj",))
    return config, nnx.split(model, nnx.Param, ...)[1]


@pytest.fixture
def publisher(held, tmp_path):
    return lambda **options: Publisher(str(tmp_path), held[0], (2,), **options)


def factors(update):
    return {"0.q_proj": jnp.full((2, 16, 2), 1e-3 * (update + 1), jnp.bfloat16)}


def names(folder):
    return sorted(name.removesuffix(".safetensors") for name in os.listdir(folder))


def test_it_starts_where_the_run_does_and_clears_requests_of_before(held, publisher, tmp_path):
    (tmp_path / "full-sync-wanted").touch()
    publisher().start(5, held[1], "a")
    assert names(tmp_path) == ["full-000005", "trainer-run"]
    full = FullSync.from_bytes(FileTransport(tmp_path).full_sync(5, timeout=0.0))
    assert (full.update, full.run, full.sketches) == (5, "a", SKETCHES)
    kernels = by_layer(sketched_stacks(held[0], (2,)), stacked(held[1], "kernel"))
    assert full.kernels.keys() == kernels.keys() == {"blocks.0.q_proj", "blocks.1.q_proj"}
    assert all(np.array_equal(full.kernels[layer], kernels[layer]) for layer in kernels)


def test_it_answers_requests_with_the_weights_after_the_update(held, publisher, tmp_path):
    writes, sync = publisher(), FileTransport(tmp_path)
    writes.start(0, held[1], "a")
    sizes = writes.update(0, factors(0), held[1])
    assert sizes == {"sync/packet_bytes": 2 * 2 * 16 * 2, "sync/full_bytes": 4 * 2 * 16 * 16}
    assert names(tmp_path) == ["full-000000", "packet-000000", "trainer-run"]
    with pytest.raises(TimeoutError):
        sync.full_sync(1, timeout=0.0)
    moved = nnx.from_flat_state(
        {path: v.copy(v.get_value() + 1) for path, v in nnx.to_flat_state(held[1])}
    )
    writes.update(1, factors(1), moved)
    assert not sync.wanted()
    full = FullSync.from_bytes(sync.full_sync(2, timeout=0.0))
    assert (full.update, full.run) == (2, "a")
    kernels = by_layer(sketched_stacks(held[0], (2,)), stacked(moved, "kernel"))
    assert all(np.array_equal(full.kernels[layer], kernels[layer]) for layer in kernels)
    writes.update(2, factors(2), moved)  # nobody asks: no other
    assert "full-000003" not in names(tmp_path)


def test_packets_are_the_runs_and_fit_its_followers(held, publisher, tmp_path):
    writes, sync = publisher(), FileTransport(tmp_path)
    writes.start(0, held[1], "a")
    writes.update(0, factors(0), held[1])
    packet = Packet.from_bytes(sync.receive(0, timeout=0.0))
    assert (packet.update, packet.run, packet.sketches) == (0, "a", SKETCHES)
    assert all((f == np.asarray(factors(0)["0.q_proj"][0])).all() for f in packet.factors.values())
    assert Follower.start(sync.full_sync(0, timeout=0.0)).apply(packet).update == 1
    with pytest.raises(ValueError, match="is of the run 'a'"):
        publisher().start(0, held[1], "b")


def test_full_syncs_in_between_let_old_messages_go(held, publisher, tmp_path):
    writes = publisher(full_every=2)
    writes.start(1, held[1], "a")
    for update in range(1, 6):
        writes.update(update, factors(update), held[1])
        kept = {1: ["full-000001", "full-000002"], 3: ["full-000002", "full-000004"]}
        if update in kept:
            assert [name for name in names(tmp_path) if "full" in name] == kept[update]
    # Those from the last full sync but one on: a follower that is late by one still goes on.
    assert names(tmp_path) == [
        *("full-000004", "full-000006", "packet-000004", "packet-000005", "trainer-run")
    ]
