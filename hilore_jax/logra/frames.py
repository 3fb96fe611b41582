"""Length-prefixed frames on a TCP connection: magic, kind, length, and so many bytes."""

from __future__ import annotations

import selectors
import socket
import struct
import time

import numpy as np

PACKET, FULL, REQUEST = range(1, 4)
"""Kinds of frames: a packet, a full sync, a follower's request for one."""

MAX_BYTES = 2**36
"""The longest frame that is taken unless told otherwise: 64 GiB."""

_MAGIC = b"HLS1"
_HEAD = struct.Struct("<4sBQ")
_PIECE = 2**24  # bytes for which a send's timeout holds


class Deadline:
    """Until when a frame has to begin.

    Args:
        timeout: seconds from now; None: no limit.

    Example:
        >>> Deadline(0.0).left(), Deadline(None).left()
        (0.0, None)
    """

    def __init__(self, timeout: float | None):
        self.timeout = timeout
        self._end = None if timeout is None else time.monotonic() + timeout

    def left(self) -> float | None:
        """Seconds, 0 where it is over; None: no limit."""
        return None if self._end is None else max(0.0, self._end - time.monotonic())


def send_frame(peer: socket.socket, kind: int, data: bytes) -> None:
    """Sends a frame; the socket's timeout holds for every 16 MiB.

    Args:
        peer: the connection. After an error it cannot be used any more.
        kind: `PACKET`, `FULL` or `REQUEST`.
        data: the frame's bytes.

    Raises:
        OSError: the peer has gone, or took nothing for too long.
    """
    view = memoryview(data)
    peer.sendall(_HEAD.pack(_MAGIC, kind, len(view)))
    for start in range(0, len(view), _PIECE):
        peer.sendall(view[start : start + _PIECE])


def receive_frame(
    peer: socket.socket, deadline: Deadline, kinds: tuple[int, ...], max_bytes: int
) -> tuple[int, memoryview]:
    """Receives a frame; once it has begun, the socket's timeout holds for every part of it.

    Args:
        peer: the connection.
        deadline: when the frame has to have begun.
        kinds: those that are expected.
        max_bytes: the longest frame to take.

    Returns:
        Its kind and its bytes.

    Raises:
        TimeoutError: no frame began; the connection can still be used.
        ConnectionError: the peer has gone, stopped within a frame, or sent something else. The
            connection cannot be used any more.
    """
    _wait(peer, deadline)
    magic, kind, length = _HEAD.unpack(_exactly(peer, _HEAD.size))
    if magic != _MAGIC or kind not in kinds:
        raise ConnectionError(
            f"received {magic!r} and kind {kind}, expected {_MAGIC!r} and one of {kinds}: the peer "
            "is no hilore_jax sync, or one of another version"
        )
    if length > max_bytes:
        raise ConnectionError(
            f"received the beginning of {length} bytes, more than the {max_bytes} of max_bytes: "
            "set it higher if the peer is to be trusted"
        )
    return kind, _exactly(peer, length)


def _wait(peer: socket.socket, deadline: Deadline) -> None:
    """Until a frame begins, or the peer has gone."""
    # Not by the socket's timeout, which another thread may be sending with.
    with selectors.DefaultSelector() as selector:
        selector.register(peer, selectors.EVENT_READ)
        if not selector.select(deadline.left()):
            raise TimeoutError(f"nothing came from the trainer within {deadline.timeout} s")


def _exactly(peer: socket.socket, length: int) -> memoryview:
    view = np.empty(length, np.uint8).data  # whose pages are taken as they fill
    done = 0
    while done < length:
        try:
            count = peer.recv_into(view[done:])
        except TimeoutError:
            raise ConnectionError(
                f"the peer stopped after {done} of {length} bytes for {peer.gettimeout()} s; "
                "connect again"
            ) from None
        if count == 0:
            where = f"after {done} of {length} bytes" if done else "between messages"
            raise ConnectionError(f"the peer closed the connection {where}; connect again")
        done += count
    return view.toreadonly()
