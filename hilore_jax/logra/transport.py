"""Packets through a folder that trainer and followers share."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hilore_jax.logra.message import Buffer, GapError
from hilore_jax.logra.packet import FullSync, Packet

_POLL = 0.02  # seconds between two looks into the folder
_NAME = re.compile(r"(packet|full)-(\d{6,})\.safetensors")
_WANTED = "full-sync-wanted"
_OWNER = "trainer-run"  # holds the name of the run whose trainer writes here


@dataclass(frozen=True)
class FileTransport:
    """A folder of messages, one file each: `packet-000012.safetensors`, `full-000013.safetensors`.

    One trainer writes, any number of followers read; its first message makes the folder its run's.
    A file appears whole or not at all, also under an interruption; so it may lie on a disk of
    several machines that renames atomically. A trainer that goes back to an earlier checkpoint
    takes a new folder.

    Attributes:
        folder: where; made if it is not there.

    Raises:
        ValueError: it is a file.

    Example:
        >>> import tempfile
        >>> import ml_dtypes, numpy as np
        >>> from hilore_jax.logra.sketches import Sketches
        >>> transport = FileTransport(tempfile.mkdtemp())
        >>> factor = np.ones((3, 2), ml_dtypes.bfloat16)
        >>> packet = Packet(update=0, sketches=Sketches(rank=2), factors={"q": factor})
        >>> transport.send(packet).name, transport.receive(0) == packet.to_bytes()
        ('packet-000000.safetensors', True)
    """

    folder: Path | str

    def __post_init__(self):
        place = Path(self.folder)
        if place.exists() and not place.is_dir():
            raise ValueError(f"the sync folder {place} is a file: name a folder")
        place.mkdir(parents=True, exist_ok=True)

    def send(self, message: Packet | FullSync) -> Path:
        """Writes a message. A full sync also answers all who asked for one.

        Args:
            message: a packet or a full sync.

        Returns:
            Its file. To write the same message again, after a restart, is allowed.

        Raises:
            ValueError: the folder is another run's, or holds another message of that number.
            OSError: the folder cannot be written.
        """
        data, full = message.to_bytes(), isinstance(message, FullSync)
        path = self._path("full" if full else "packet", message.update)
        self._claim(message.run)
        there = path.exists()
        if there and path.read_bytes() != data:
            raise ValueError(
                f"{path} holds another {'full sync before' if full else 'packet of'} update "
                f"{message.update}: followers may have applied it. Take a new folder where a "
                "trainer starts again, or goes back to an earlier checkpoint"
            )
        if full:
            # Before it is written: who asks from now on may have missed it, and gets another.
            (Path(self.folder) / _WANTED).unlink(missing_ok=True)
        if not there:
            _write_whole(path, data)
        return path

    def owner(self) -> str | None:
        """The run whose trainer writes here; None: none has yet."""
        path = Path(self.folder) / _OWNER
        return path.read_bytes().decode().removesuffix("\n") if path.exists() else None

    def packets(self, first: int = 0) -> Iterator[bytes]:
        """The packets that are there, in order and without a gap; waits for none.

        Args:
            first: number of the first.

        Yields:
            The bytes of each.
        """
        while (path := self._path("packet", first)).exists():
            yield path.read_bytes()
            first += 1

    def receive(self, update: int, timeout: float = 60.0) -> bytes:
        """The packet of an update, as soon as it is there.

        Args:
            update: its number.
            timeout: seconds to wait.

        Returns:
            Its bytes, not checked.

        Raises:
            GapError: it is not there, but later ones are: it was pruned.
            TimeoutError: it did not come.
        """
        path = self._path("packet", update)
        for _ in _looks(timeout):
            # Listed before it is looked for: a later packet then means that this one was written.
            later = [number for number in self._numbers("packet") if number > update]
            if path.exists():
                return path.read_bytes()
            if later:
                raise GapError(
                    f"{path} is not there, but {self._path('packet', min(later)).name} is: the "
                    "packet was removed; ask the trainer for a full sync"
                )
        raise TimeoutError(f"{path} did not come within {timeout} s; is the trainer running?")

    def full_sync(self, at_least: int = 0, timeout: float = 60.0) -> bytes:
        """The newest full sync; where there is none that is new enough, asks for one and waits.

        Args:
            at_least: the update before which it is taken has this number, or a later one.
            timeout: seconds to wait.

        Returns:
            Its bytes, not checked.

        Raises:
            TimeoutError: the trainer wrote none.
        """
        asked = False
        for _ in _looks(timeout):
            newest = max(self._numbers("full"), default=-1)
            if newest >= at_least:
                return self._path("full", newest).read_bytes()
            if not asked:
                (Path(self.folder) / _WANTED).touch()
                asked = True
        raise TimeoutError(
            f"no full sync from before update {at_least} or later came to {self.folder} within "
            f"{timeout} s; the trainer writes one after an update, where wanted() is true"
        )

    def wanted(self) -> bool:
        """Whether a follower has asked for a full sync that was not sent yet."""
        return (Path(self.folder) / _WANTED).exists()

    def prune(self, before: int) -> int:
        """Removes messages with numbers below one, and what interrupted writers left behind.

        Args:
            before: the first number to keep. A follower that needs an older packet has to ask for
                a full sync.

        Returns:
            How many messages were removed.
        """
        old = [
            self._path(kind, number)
            for kind in ("packet", "full")
            for number in self._numbers(kind)
            if number < before
        ]
        for path in (*old, *Path(self.folder).glob(".*.partial")):
            path.unlink(missing_ok=True)
        return len(old)

    def holds_messages(self) -> bool:
        """Whether a packet or a full sync lies here."""
        return bool(self._numbers("packet") or self._numbers("full"))

    def _claim(self, run: str) -> None:
        """Makes the folder a run's; refuses that of another."""
        path = Path(self.folder) / _OWNER
        try:
            with path.open("xb") as file:  # exclusive: of two trainers that start, one has it
                file.write(f"{run}\n".encode())
        except FileExistsError:
            if self.owner() != run:
                raise ValueError(
                    f"the sync folder {self.folder} is of the run {self.owner()!r} ({path.name}), "
                    f"this message of the run {run!r}: name a folder of its own for each run"
                ) from None

    def _path(self, kind: str, number: int) -> Path:
        return Path(self.folder) / f"{kind}-{number:06d}.safetensors"

    def _numbers(self, kind: str) -> list[int]:
        """Numbers of the files of a kind; others, such as half-written ones, are not looked at."""
        found = (_NAME.fullmatch(name) for name in os.listdir(self.folder))
        return sorted(int(match[2]) for match in found if match and match[1] == kind)


def _looks(timeout: float) -> Iterator[None]:
    """One look at once, and more until the time is over."""
    end = time.monotonic() + timeout
    yield
    while (left := end - time.monotonic()) > 0:
        time.sleep(min(_POLL, left))
        yield


def _write_whole(path: Path, data: Buffer) -> None:
    """Writes a file that appears complete or not at all, also when the machine stops."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.partial")
    try:
        with partial.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # or the new name itself could be lost
    finally:
        os.close(folder)
