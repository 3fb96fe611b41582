"""A LoGRA run's packets, written into a folder for those who follow it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from flax import nnx
from jaxtyping import Array

from hilore_jax.logra.packet import FullSync, Packet
from hilore_jax.logra.sketches import Sketches
from hilore_jax.logra.transport import FileTransport
from hilore_jax.models.config import DecoderConfig
from hilore_jax.models.sketched import SketchedStack, sketched_stacks, stacked


class Publisher:
    """Writes a full sync at the start, a packet an update, and a full sync for who asks for one.

    Args:
        folder: of a `FileTransport`.
        config: of the sketched model.
        segments: blocks in each of its stacks.
        full_every: updates between full syncs that nobody asked for; with each of them, messages
            from before the last such one, or the start, are removed. 0: none, and nothing is.
    """

    def __init__(
        self, folder: str, config: DecoderConfig, segments: tuple[int, ...], full_every: int = 0
    ):
        if config.sketches is None:
            raise ValueError("a Publisher needs a config with sketches, found None")
        self._transport = FileTransport(folder)
        self._sketches = config.sketches.sketches
        self._stacks = sketched_stacks(config, segments)
        self._full_every, self._last, self._run = full_every, 0, ""

    def start(self, update: int, params: nnx.State, run: str) -> None:
        """Writes the weights from before an update, the first one that this process makes.

        Args:
            update: its number.
            params: the weights before it.
            run: name of the run, of all that is written from now on.

        Raises:
            ValueError: the folder is another run's, or holds other weights from before that update.
        """
        self._run, self._last = run, update
        self._send_full(update, params)

    def update(
        self, update: int, factors: Mapping[str, Array], params: nnx.State
    ) -> dict[str, int]:
        """Writes what an update did.

        Args:
            update: its number, from 0.
            factors: its `metrics["factors"]`.
            params: the weights after it.

        Returns:
            `sync/packet_bytes`, and `sync/full_bytes` of the weights that it moved.

        Raises:
            ValueError: the folder is another run's, or holds another packet of that number.
        """
        packet = Packet(
            update=update,
            sketches=self._sketches,
            factors=by_layer(self._stacks, factors),
            run=self._run,
        )
        self._transport.send(packet)
        due = self._full_every > 0 and (update + 1) % self._full_every == 0
        if due or self._transport.wanted():
            self._send_full(update + 1, params)
        if due:
            self._transport.prune(self._last)
            self._last = update + 1
        full = sum(kernel.nbytes for kernel in _kernels(self._stacks, params).values())
        return {"sync/packet_bytes": packet.nbytes, "sync/full_bytes": full}

    def _send_full(self, update: int, params: nnx.State) -> None:
        self._transport.send(full_sync(update, self._sketches, self._stacks, params, self._run))


def full_sync(
    update: int,
    sketches: Sketches,
    stacks: tuple[SketchedStack, ...],
    params: nnx.State,
    run: str = "",
) -> FullSync:
    """The weights that a run's packets move, from before an update."""
    kernels = by_layer(stacks, _kernels(stacks, params))
    return FullSync(update=update, sketches=sketches, kernels=kernels, run=run)


def by_layer(
    stacks: tuple[SketchedStack, ...], arrays: Mapping[str, Array | np.ndarray]
) -> dict[str, np.ndarray]:
    """Layer name -> its row of a stack, copied to the host.

    Args:
        stacks: which layers the rows are.
        arrays: `[n, ...]` of each stack, by its name.

    Returns:
        One array a layer.

    Example:
        >>> stack = SketchedStack(0, "q_proj", 3, 2, (1, 1))
        >>> by_layer((stack,), {"0.q_proj": np.array([[1.0], [2.0]])})
        {'blocks.3.q_proj': array([1.]), 'blocks.4.q_proj': array([2.])}
    """
    found: dict[str, Any] = {}
    for stack in stacks:
        # Copied: a host view of an array on the CPU would change with an array that is donated.
        rows = np.array(arrays[stack.name])
        found |= dict(zip(stack.layers, rows, strict=True))
    return found


def _kernels(stacks: tuple[SketchedStack, ...], params: nnx.State) -> dict[str, Array]:
    held = stacked(params, "kernel")
    return {stack.name: held[stack.name] for stack in stacks}
