"""Messages over TCP on loopback: several followers, late ones, and peers that misbehave."""

import socket
import struct
import subprocess
import sys
import threading
import time

import ml_dtypes
import numpy as np
import pytest

from hilore_jax.logra import (
    Follower,
    Sketches,
    SocketClient,
    SocketServer,
    follow,
    frames,
    make_packet,
)
from small_run import kernels_of, packet_of, same_bits, start_of, trained


def until(condition):
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.002)


@pytest.fixture
def server():
    with SocketServer() as server:
        yield server


@pytest.fixture
def client(server):
    with SocketClient(server.address) as client:
        until(lambda: server.followers == 1)
        yield client


def test_every_follower_gets_every_packet(server, client):
    with SocketClient(server.address) as other:
        until(lambda: server.followers == 2)
        for update in range(2):
            assert server.send(packet_of(update)) == 2
        for update in range(2):
            for each in (client, other):
                assert each.receive(update, timeout=30.0) == packet_of(update).to_bytes()
    until(lambda: server.followers == 1)
    assert server.send(packet_of(2)) == 1
    assert client.receive(2, timeout=30.0) == packet_of(2).to_bytes()


LATE = """
import sys
from hilore_jax.logra import Follower, SocketClient, follow
with SocketClient(("127.0.0.1", int(sys.argv[1]))) as client:
    follower = Follower.start(client.full_sync())
    assert follower.update == 2
    follower = follow(follower, client)
    open(sys.argv[2], "wb").write(follower.state().to_bytes())
"""


def test_a_late_follower_in_another_process_asks_for_a_full_sync(server, tmp_path):
    for update in range(2):
        assert server.send(packet_of(update)) == 0
    assert server.send(start_of(update=2)) == 0  # nobody asked
    result = tmp_path / "result"
    command = [sys.executable, "-c", LATE, str(server.address[1]), str(result)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as late:
        until(server.wanted)
        assert server.send(start_of(update=2)) == 1 and not server.wanted()
        assert server.send(packet_of(2)) == 1
        _, error = late.communicate(timeout=60.0)
        assert late.returncode == 0, error
    follower = Follower.start(result.read_bytes())
    assert follower.update == 3 and same_bits(follower.kernels, trained(kernels_of(), range(3)))


def test_packets_before_the_full_sync_are_dropped(server, client):
    for update in range(2):
        server.send(packet_of(update))
    client.ask()
    until(server.wanted)
    assert server.send(packet_of(2)) == 0
    server.send(start_of(update=3))
    assert client.full_sync(timeout=30.0) == start_of(update=3).to_bytes()
    until(server.wanted)  # it asked twice here; what comes is a full sync in a packet's place
    server.send(start_of(update=3))
    assert client.receive(3, timeout=30.0) == start_of(update=3).to_bytes()


def test_a_follower_that_missed_a_packet_comes_back(server, client):
    follower = Follower.start(start_of())
    server.send(packet_of(1))

    def answer():
        until(server.wanted)
        server.send(start_of(update=2))

    trainer = threading.Thread(target=answer)
    trainer.start()
    follower = follow(follower, client, timeout=30.0)
    trainer.join()
    assert follower.update == 2 and same_bits(follower.kernels, trained(kernels_of(), range(2)))


def test_waiting_ends_and_the_connection_stays(server, client):
    with pytest.raises(TimeoutError, match=r"nothing came from the trainer within 0.02 s"):
        client.receive(0, timeout=0.02)
    with pytest.raises(TimeoutError, match=r"within 0.02 s"):
        client.full_sync(timeout=0.02)
    until(server.wanted)
    server.send(start_of())
    assert client.receive(0, timeout=30.0) == start_of().to_bytes()


def test_a_trainer_that_has_gone_is_named():
    with SocketServer() as server:
        client = SocketClient(server.address)
        until(lambda: server.followers == 1)
    with pytest.raises(ConnectionError, match="closed the connection between messages"):
        client.receive(0)
    client.close()
    with pytest.raises(ConnectionError, match=r"no trainer at 127.0.0.1:\d+ .*start it first"):
        SocketClient(server.address)
    with pytest.raises(ConnectionError, match="the sync server is closed"):
        server.send(packet_of(0))


def test_an_address_that_is_taken(server):
    with pytest.raises(OSError, match=r"cannot listen on 127.0.0.1:\d+: .*in use"):
        SocketServer(port=server.address[1])


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair()
    ours.settimeout(0.05)
    with ours, theirs:
        yield ours, theirs


def receive(peer, max_bytes=100):
    return frames.receive_frame(peer, frames.Deadline(5.0), (frames.PACKET,), max_bytes)


def test_frames_that_are_refused(pair):
    ours, theirs = pair
    theirs.sendall(struct.pack("<4sBQ", b"HTTP", 1, 3))
    with pytest.raises(ConnectionError, match=r"received b'HTTP' and kind 1, expected b'HLS1'"):
        receive(ours)
    theirs.sendall(struct.pack("<4sBQ", b"HLS1", frames.REQUEST, 0))
    with pytest.raises(ConnectionError, match=r"kind 3, .* one of \(1,\)"):
        receive(ours)
    theirs.sendall(struct.pack("<4sBQ", b"HLS1", 1, 101))
    with pytest.raises(ConnectionError, match="101 bytes, more than the 100 of max_bytes"):
        receive(ours)


def test_a_peer_that_stops_or_leaves_within_a_frame(pair):
    ours, theirs = pair
    theirs.sendall(struct.pack("<4sBQ", b"HLS1", 1, 10) + b"abc")
    with pytest.raises(ConnectionError, match=r"stopped after 3 of 10 bytes for 0.05 s"):
        receive(ours)
    theirs.sendall(struct.pack("<4sBQ", b"HLS1", 1, 10) + b"abc")
    theirs.close()
    with pytest.raises(ConnectionError, match="closed the connection after 3 of 10 bytes"):
        receive(ours)


def test_messages_longer_than_allowed_are_not_sent():
    with (
        SocketServer(max_bytes=100) as server,
        pytest.raises(ValueError, match=r"a message of \d+ bytes, more than the 100 of max_bytes"),
    ):
        server.send(packet_of(0))


def test_a_follower_that_takes_nothing_does_not_hold_the_trainer(caplog):
    with SocketServer(timeout=0.2) as server, SocketClient(server.address) as stuck:
        until(lambda: server.followers == 1)
        large = make_packet(0, Sketches(rank=1), {"q": np.zeros((2**22, 1), ml_dtypes.bfloat16)})
        sent = 0
        while server.send(large):
            sent += 1
            assert sent < 100, "the sockets' buffers take all of it"
        until(lambda: server.followers == 0)
        assert "did not take a message and is disconnected" in caplog.text

        def read_all():
            while True:
                stuck.receive(0, timeout=30.0)

        with pytest.raises(ConnectionError, match="closed the connection"):
            read_all()


def test_strangers_are_disconnected_and_the_others_stay(server, client):
    with socket.create_connection(server.address, 30) as stranger:
        until(lambda: server.followers == 2)
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        until(lambda: server.followers == 1)
    assert server.send(packet_of(0)) == 1
    assert client.receive(0, timeout=30.0) == packet_of(0).to_bytes()
