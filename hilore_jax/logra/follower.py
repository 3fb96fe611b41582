"""A rollout engine's side of the sync: weights, and the number of the packet that comes next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import jax
import numpy as np
from jaxtyping import Array

from hilore_jax.logra.merge import ROWS
from hilore_jax.logra.message import Buffer, PacketError, SyncError
from hilore_jax.logra.packet import FullSync, Packet, read_message
from hilore_jax.logra.sketches import Sketches
from hilore_jax.logra.sync import apply_packet, make_full_sync


@runtime_checkable
class Receiver(Protocol):
    """A transport's end at the follower, `FileTransport` or `SocketClient`."""

    def receive(self, update: int, timeout: float = ...) -> Buffer:
        """The packet of an update, or whatever comes in its place."""
        ...

    def full_sync(self, at_least: int, timeout: float = ...) -> Buffer:
        """Asks for a full sync, from before an update with that number or a later one."""
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class Follower:
    """Weights that follow a trainer. Frozen: `apply` returns the next one, or raises.

    Attributes:
        kernels: layer name -> `[in, out]`, float32 or bfloat16, as the trainer's.
        update: number of the next packet.
        sketches: the settings of the packets.
        run: the trainer's run, as its full sync names it; packets of others are refused.
        donate: `apply` moves kernels in place; the follower before cannot be used afterwards.
        rows: rows of a kernel that are moved at a time; None: all, where rows are sharded.

    Example:
        >>> import jax.numpy as jnp
        >>> from hilore_jax.logra.sync import make_packet
        >>> sketches, kernels = Sketches(rank=1), {"q": jnp.zeros((4, 3))}
        >>> follower = Follower.start(make_full_sync(0, sketches, kernels))
        >>> packet = make_packet(0, sketches, {"q": jnp.ones((3, 1), jnp.bfloat16)})
        >>> follower = follower.apply(packet.to_bytes())
        >>> follower.update, follower.kernels["q"][:, 0].tolist()
        (1, [1.0, -1.0, -1.0, 1.0])
    """

    kernels: Mapping[str, Array]
    update: int
    sketches: Sketches
    run: str = ""
    donate: bool = True
    rows: int | None = ROWS

    @classmethod
    def start(
        cls, full: FullSync | Buffer, *, donate: bool = True, rows: int | None = ROWS
    ) -> Follower:
        """A follower with the weights of a full sync, on the default device.

        For weights that are sharded, make a `Follower` of arrays where they belong: a full sync
        that it applies later is put into the same places.

        Args:
            full: the message, or its bytes; also what `state` returned, after a restart.
            donate: as the attribute.
            rows: as the attribute.

        Returns:
            The follower.

        Raises:
            PacketError: no full sync, or a damaged one.
        """
        message = full if isinstance(full, FullSync) else FullSync.from_bytes(full)
        # Always a copy: an array that shares the message's bytes must never be donated.
        kernels = {
            layer: jax.device_put(np.asarray(kernel), may_alias=False)
            for layer, kernel in message.kernels.items()
        }
        return cls(
            kernels=kernels,
            update=message.update,
            sketches=message.sketches,
            run=message.run,
            donate=donate,
            rows=rows,
        )

    def apply(self, message: Packet | FullSync | Buffer) -> Follower:
        """The follower after one message.

        A full sync is taken whatever its number is; it may be of another run, with other settings.

        Args:
            message: a packet, a full sync, or the bytes of one.

        Returns:
            The next follower; this one stays as it is, except for donated kernels.

        Raises:
            GapError: the packet is of another update than the next.
            PacketError: damaged, or of another run, other layers or shapes. Nothing is changed
                then: ask for a full sync, and apply that.
        """
        if not isinstance(message, Packet | FullSync):
            message = read_message(message)
        if isinstance(message, FullSync):
            return self._restart(message)
        kernels = apply_packet(
            self.kernels,
            message,
            expected=self.update,
            sketches=self.sketches,
            run=self.run,
            donate=self.donate,
            rows=self.rows,
        )
        return replace(self, kernels=kernels, update=message.update + 1)

    def state(self) -> FullSync:
        """All of it, to be kept for a restart: `Follower.start(state)` goes on from there."""
        return make_full_sync(self.update, self.sketches, self.kernels, run=self.run)

    def _restart(self, full: FullSync) -> Follower:
        found = {layer: (kernel.shape, kernel.dtype) for layer, kernel in full.kernels.items()}
        held = {layer: (kernel.shape, kernel.dtype) for layer, kernel in self.kernels.items()}
        if found != held:
            wrong = sorted(k for k in found.keys() | held.keys() if found.get(k) != held.get(k))
            first = wrong[0]
            raise PacketError(
                f"the full sync before update {full.update} differs in {len(wrong)} layers: it has "
                f"{first} {found.get(first)}, the follower {held.get(first)}. It is of another "
                "model: follow it with Follower.start(...)"
            )
        kernels = {
            layer: jax.device_put(np.asarray(full.kernels[layer]), kernel.sharding, may_alias=False)
            for layer, kernel in self.kernels.items()
        }
        return replace(
            self, kernels=kernels, update=full.update, sketches=full.sketches, run=full.run
        )


def follow(follower: Follower, receiver: Receiver, timeout: float = 60.0) -> Follower:
    """Waits for the next update and applies it; where it is refused, asks for a full sync.

    Args:
        follower: before the update.
        receiver: the transport's end at the follower.
        timeout: seconds to wait, for a packet and for a full sync each.

    Returns:
        The follower after the update, or after a full sync.

    Raises:
        SyncError: the full sync was refused as well.
        TimeoutError: nothing came; where a message was refused before, it says why.
        ConnectionError: the trainer has gone; as before.

    Example:
        >>> import tempfile
        >>> import jax.numpy as jnp
        >>> from hilore_jax.logra.transport import FileTransport
        >>> from hilore_jax.logra.sync import make_packet
        >>> full = make_full_sync(0, Sketches(rank=1), {"q": jnp.zeros((4, 3))})
        >>> transport = FileTransport(tempfile.mkdtemp())
        >>> packet = make_packet(0, full.sketches, {"q": jnp.ones((3, 1), jnp.bfloat16)})
        >>> path = transport.send(packet)
        >>> follow(Follower.start(full), transport).update
        1
    """
    try:
        return follower.apply(receiver.receive(follower.update, timeout))
    except SyncError as refused:
        reason = refused
    try:
        full = receiver.full_sync(follower.update + 1, timeout)
    except (TimeoutError, ConnectionError) as error:
        kind = TimeoutError if isinstance(error, TimeoutError) else ConnectionError
        raise kind(f"{error}. It was asked for since a message was refused: {reason}") from reason
    return follower.apply(full)
