"""Packets over TCP: a server at the trainer, a client at each follower.

There is neither encryption nor a login: who can connect can read the weights, and a checksum is no
signature. Keep to loopback or to a network of your own.
"""

from __future__ import annotations

import logging
import socket
import threading
from types import TracebackType

from hilore_jax.logra.frames import (
    FULL,
    MAX_BYTES,
    PACKET,
    REQUEST,
    Deadline,
    receive_frame,
    send_frame,
)
from hilore_jax.logra.packet import FullSync, Packet

_log = logging.getLogger("hilore_jax")
_POLL = 0.1  # seconds between two looks of a waiting thread at whether the server is closed


class SocketServer:
    """The trainer's end: sends every packet to all followers, and full syncs to who asked.

    All sending is done by the caller of `send`, between updates; threads only accept followers
    and note their requests.

    Args:
        host: address to listen on.
        port: 0: any that is free, see `address`.
        timeout: seconds within which a follower has to take 16 MiB; a slower one is disconnected,
            said in the log, and can connect again.
        max_bytes: the longest message that is sent.

    Raises:
        OSError: the address cannot be listened on.

    Example:
        >>> import ml_dtypes, numpy as np
        >>> from hilore_jax.logra.sketches import Sketches
        >>> kernels = {"q": np.ones((3, 2), np.float32)}
        >>> full = FullSync(update=0, sketches=Sketches(rank=1), kernels=kernels)
        >>> with SocketServer() as server, SocketClient(server.address) as client:
        ...     client.ask()
        ...     while not server.wanted():
        ...         pass
        ...     server.send(full), client.full_sync() == full.to_bytes()
        (1, True)
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        timeout: float = 30.0,
        max_bytes: int = MAX_BYTES,
    ):
        self._timeout, self._max_bytes = timeout, max_bytes
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._peers: dict[socket.socket, threading.Thread] = {}
        self._asking: set[socket.socket] = set()
        try:
            self._listener = socket.create_server((host, port))
        except OSError as error:
            raise OSError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
        self._address: tuple[str, int] = self._listener.getsockname()[:2]
        self._listener.settimeout(_POLL)
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    @property
    def address(self) -> tuple[str, int]:
        """Host and port, for `SocketClient`."""
        return self._address

    @property
    def followers(self) -> int:
        """How many are connected."""
        with self._lock:
            return len(self._peers)

    def wanted(self) -> bool:
        """Whether a follower has asked for a full sync that was not sent yet."""
        with self._lock:
            return bool(self._asking)

    def send(self, message: Packet | FullSync) -> int:
        """Sends a packet to all followers, or a full sync to those who asked for one.

        Those who wait for a full sync get no packets before it.

        Args:
            message: a packet or a full sync.

        Returns:
            How many followers got it.

        Raises:
            ValueError: it is longer than `max_bytes`.
            ConnectionError: the server is closed.
        """
        if self._closed.is_set():
            raise ConnectionError("the sync server is closed: start another SocketServer")
        full = isinstance(message, FullSync)
        with self._lock:
            peers = [peer for peer in self._peers if (peer in self._asking) == full]
            # Before it is sent: who asks from now on has missed it, and gets another.
            self._asking -= set(peers) if full else set()
        data = message.to_bytes()
        if len(data) > self._max_bytes:
            raise ValueError(
                f"a message of {len(data)} bytes, more than the {self._max_bytes} of max_bytes; "
                "give server and clients a higher one"
            )
        return sum(self._deliver(peer, FULL if full else PACKET, data) for peer in peers)

    def close(self) -> None:
        """Disconnects all followers and stops listening."""
        self._closed.set()
        self._accepting.join()
        self._listener.close()
        with self._lock:
            peers = dict(self._peers)
        for peer, reader in peers.items():
            _shut(peer)
            reader.join()

    def __enter__(self) -> SocketServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.close()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                peer, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError as error:  # a follower that left while it connected
                _log.warning("a follower could not connect: %s", error)
                continue
            peer.settimeout(self._timeout)
            reader = threading.Thread(target=self._read, args=(peer,), daemon=True)
            with self._lock:
                self._peers[peer] = reader
            reader.start()

    def _read(self, peer: socket.socket) -> None:
        """Notes a follower's requests until it leaves."""
        try:
            while True:
                receive_frame(peer, Deadline(None), (REQUEST,), 0)
                with self._lock:
                    self._asking.add(peer)
        except OSError as error:
            if not self._closed.is_set():
                _log.info("a follower left: %s", error)
        finally:
            with self._lock:
                del self._peers[peer]
                self._asking.discard(peer)
            peer.close()

    def _deliver(self, peer: socket.socket, kind: int, data: bytes) -> bool:
        try:
            send_frame(peer, kind, data)
        except OSError as error:
            # The trainer goes on without it; its reader closes the socket.
            _log.warning("a follower did not take a message and is disconnected: %s", error)
            _shut(peer)
            return False
        return True


class SocketClient:
    """A follower's end.

    Args:
        address: host and port of the server.
        timeout: seconds to wait for the connection, and then for any part of a message.
        max_bytes: the longest message that is taken.

    Raises:
        ConnectionError: nobody listens there.

    Example:
        >>> with SocketServer() as server, SocketClient(server.address) as client:
        ...     client.receive(0, timeout=0.01)
        Traceback (most recent call last):
        ...
        TimeoutError: nothing came from the trainer within 0.01 s
    """

    def __init__(
        self, address: tuple[str, int], *, timeout: float = 30.0, max_bytes: int = MAX_BYTES
    ):
        host, port = address
        try:
            self._socket = socket.create_connection(address, timeout)
        except OSError as error:
            raise ConnectionError(
                f"no trainer at {host}:{port} ({error}): start it first, and check its address"
            ) from None
        self._max_bytes = max_bytes

    def receive(self, update: int, timeout: float = 60.0) -> memoryview:
        """The next message: the packet of an update, unless some were missed.

        Args:
            update: its number; `Follower.apply` checks it.
            timeout: seconds to wait.

        Returns:
            Its bytes, not checked.

        Raises:
            TimeoutError: nothing came. The connection can still be used.
            ConnectionError: the trainer has gone, or sent something else. Connect again, and ask
                for a full sync.
        """
        del update
        return receive_frame(self._socket, Deadline(timeout), (PACKET, FULL), self._max_bytes)[1]

    def ask(self) -> None:
        """Asks for a full sync, without waiting for it."""
        send_frame(self._socket, REQUEST, b"")

    def full_sync(self, at_least: int = 0, timeout: float = 60.0) -> memoryview:
        """Asks for a full sync and waits for it; packets that come before it are dropped.

        Args:
            at_least: not used: what comes is from before the trainer's next update.
            timeout: seconds to wait.

        Returns:
            Its bytes, not checked.

        Raises:
            TimeoutError: none came; the trainer sends one after an update, where `wanted()`.
            ConnectionError: the trainer has gone, or sent something else.
        """
        del at_least
        deadline = Deadline(timeout)
        self.ask()
        while True:
            kind, data = receive_frame(self._socket, deadline, (PACKET, FULL), self._max_bytes)
            if kind == FULL:
                return data

    def close(self) -> None:
        """Leaves the server."""
        _shut(self._socket)
        self._socket.close()

    def __enter__(self) -> SocketClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.close()


def _shut(peer: socket.socket) -> None:
    try:
        peer.shutdown(socket.SHUT_RDWR)
    except OSError:  # the other side was faster
        return
