"""Messages in a folder: whole files in order, and a request for a full sync."""

import os
import threading
import time
from dataclasses import replace

import pytest

from hilore_jax.logra import FileTransport, GapError, make_full_sync, transport
from small_run import SKETCHES, kernels_of, packet_of, start_of, trained


def messages(folder):
    """The files of a folder but that of its owner."""
    return sorted(set(os.listdir(folder)) - {"trainer-run"})


def test_packets_are_files_in_order(tmp_path):
    folder = FileTransport(tmp_path / "a" / "b")
    for update in (10, 9, 12):
        folder.send(packet_of(update))
    assert messages(folder.folder) == [
        f"packet-0000{update}.safetensors" for update in ("09", 10, 12)
    ]
    assert list(folder.packets(9)) == [packet_of(9).to_bytes(), packet_of(10).to_bytes()]
    assert list(folder.packets()) == []
    assert folder.receive(12, timeout=0.0) == packet_of(12).to_bytes()


def test_numbers_beyond_six_digits_are_in_order(tmp_path):
    folder = FileTransport(tmp_path)
    for update in (999_999, 1_000_000):
        folder.send(packet_of(update))
    assert len(list(folder.packets(999_999))) == 2


def test_a_reader_waits_for_the_next(tmp_path):
    folder = FileTransport(tmp_path)
    writer = threading.Timer(0.1, lambda: folder.send(packet_of(0)))
    writer.start()
    assert folder.receive(0, timeout=30.0) == packet_of(0).to_bytes()
    writer.join()
    begin = time.monotonic()
    with pytest.raises(TimeoutError, match=r"packet-000001.* did not come within 0.05 s"):
        folder.receive(1, timeout=0.05)
    assert time.monotonic() - begin >= 0.05


def test_half_written_files_are_not_seen(tmp_path, monkeypatch):
    folder = FileTransport(tmp_path)
    synced = []

    def stops(number):
        synced.append(number)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(transport.os, "fsync", stops)
        with pytest.raises(KeyboardInterrupt):
            folder.send(packet_of(0))
    assert synced and messages(tmp_path) == []
    partial = tmp_path / ".packet-000000.safetensors.1.2.partial"
    partial.write_bytes(packet_of(0).to_bytes()[:50])
    (tmp_path / "packet-x.safetensors").touch()
    (tmp_path / "full-000007.safetensors.partial").touch()
    with pytest.raises(TimeoutError):
        folder.receive(0, timeout=0.0)
    with pytest.raises(TimeoutError):
        folder.full_sync(0, timeout=0.0)
    assert folder.prune(0) == 0 and not partial.exists()


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    seen, fsync = [], os.fsync

    def noted(number):
        seen.append(messages(tmp_path))
        fsync(number)

    monkeypatch.setattr(transport.os, "fsync", noted)
    FileTransport(tmp_path).send(packet_of(0))
    (before, after) = seen
    assert len(before) == 1 and before[0].endswith(".partial")
    assert after == ["packet-000000.safetensors"]


def test_pruned_packets_are_a_gap(tmp_path):
    folder = FileTransport(tmp_path)
    for update in range(4):
        folder.send(packet_of(update))
    folder.send(start_of(update=1))
    folder.send(start_of(update=3))
    assert folder.prune(3) == 4
    assert messages(tmp_path) == ["full-000003.safetensors", "packet-000003.safetensors"]
    with pytest.raises(GapError, match=r"packet-000003.safetensors is: the packet was removed"):
        folder.receive(1, timeout=60.0)


def test_the_newest_full_sync_is_given_and_others_are_asked_for(tmp_path):
    trainer, follower = FileTransport(tmp_path), FileTransport(tmp_path)
    for update in (1, 3):
        trainer.send(start_of(update=update))
    assert follower.full_sync(2, timeout=0.0) == start_of(update=3).to_bytes()
    assert not trainer.wanted()
    found = []
    asker = threading.Thread(target=lambda: found.append(follower.full_sync(4, timeout=30.0)))
    asker.start()
    while not trainer.wanted():
        time.sleep(0.01)
    trainer.send(packet_of(4))
    assert trainer.wanted()
    trainer.send(start_of(update=5))
    asker.join()
    assert found == [start_of(update=5).to_bytes()] and not trainer.wanted()


def test_a_packet_is_never_replaced_by_another(tmp_path):
    folder = FileTransport(tmp_path)
    path = folder.send(packet_of(0))
    assert folder.send(packet_of(0)) == path
    path.write_bytes(packet_of(1).to_bytes())
    with pytest.raises(ValueError, match=r"holds another packet of update 0.*Take a new folder"):
        folder.send(packet_of(0))
    assert path.read_bytes() == packet_of(1).to_bytes()


def test_a_full_sync_is_never_replaced_by_another(tmp_path):
    folder = FileTransport(tmp_path)
    path = folder.send(start_of())
    (tmp_path / "full-sync-wanted").touch()
    other = make_full_sync(0, SKETCHES, trained(kernels_of(), range(1)))
    with pytest.raises(ValueError, match=r"holds another full sync before update 0.*new folder"):
        folder.send(other)
    assert path.read_bytes() == start_of().to_bytes() and folder.wanted()
    assert folder.send(start_of()) == path and not folder.wanted()


def test_a_folder_is_of_the_first_run_that_writes_to_it(tmp_path):
    folder, other = FileTransport(tmp_path), FileTransport(tmp_path)
    assert folder.owner() is None and not folder.holds_messages()
    folder.send(replace(start_of(), run="a"))
    assert other.owner() == "a" and other.holds_messages()
    for message in (packet_of(0), start_of(update=1)):
        with pytest.raises(ValueError, match=r"is of the run 'a' \(trainer-run\), .* the run 'b'"):
            other.send(replace(message, run="b"))
        assert messages(tmp_path) == ["full-000000.safetensors"]
    other.send(replace(packet_of(0), run="a"))  # as after a restart
    (tmp_path / "trainer-run").write_text("")  # as of a trainer that stopped while it made it
    with pytest.raises(ValueError, match="is of the run ''"):
        folder.send(replace(packet_of(1), run="a"))


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="file is a file: name a folder"):
        FileTransport(tmp_path / "file")
