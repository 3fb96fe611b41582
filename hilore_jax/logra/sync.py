"""Packets of a trainer's updates, and how they move the weights of whoever follows it.

The weights outside the factors are taken to be frozen: packets do not carry them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, UInt32

from hilore_jax.logra.merge import ROWS, merge_factor
from hilore_jax.logra.message import GapError, PacketError
from hilore_jax.logra.packet import FullSync, Packet
from hilore_jax.logra.projection import layer_key, update_key
from hilore_jax.logra.sketches import Sketches

_REMEDY = "ask the trainer for a full sync"
Kernels = Mapping[str, Array]
"""Layer name, `blocks.3.q_proj` say -> `[in, out]`, float32 or bfloat16."""


def make_packet(
    update: int,
    sketches: Sketches,
    factors: Mapping[str, Float[Array | np.ndarray, "_ _"]],
    *,
    run: str = "",
) -> Packet:
    """The packet of one update, for followers to apply.

    Args:
        update: number of the update, from 0.
        sketches: the run's settings.
        factors: layer name -> F = bf16(alpha D), bfloat16 `[out, rank]`: the very factors that the
            trainer merges. They are copied to the host.
        run: name of the trainer's run; a random one tells runs apart that nobody has named.

    Returns:
        The packet.

    Raises:
        PacketError: a factor of another dtype or rank, or one that is not finite; no factors.

    Example:
        >>> factors = {"q": jnp.ones((3, 2), jnp.bfloat16)}
        >>> make_packet(0, Sketches(rank=2), factors).nbytes
        12
    """
    return Packet(update=update, sketches=sketches, factors=_on_host(factors), run=run)


def make_full_sync(
    update: int,
    sketches: Sketches,
    kernels: Mapping[str, Float[Array | np.ndarray, "_ _"]],
    *,
    run: str = "",
) -> FullSync:
    """All weights that packets move, for followers that start late or have lost a packet.

    Args:
        update: number of the next packet: that of the last update in these weights, and 1.
        sketches: the run's settings.
        kernels: layer name -> `[in, out]`, in the dtype that the followers hold. They are copied
            to the host.
        run: name of the trainer's run, as in its packets.

    Returns:
        The message.

    Raises:
        PacketError: a kernel that is no matrix of float32 or bfloat16; no kernels.

    Example:
        >>> make_full_sync(0, Sketches(rank=2), {"q": jnp.ones((4, 3))}).nbytes
        48
    """
    return FullSync(update=update, sketches=sketches, kernels=_on_host(kernels), run=run)


def apply_packet(
    kernels: Kernels,
    packet: Packet,
    *,
    expected: int,
    sketches: Sketches | None = None,
    run: str | None = None,
    donate: bool = False,
    rows: int | None = ROWS,
) -> dict[str, Array]:
    """The kernels moved as the trainer moved its own: `move_kernels`, after all checks.

    Args:
        kernels: what the packet moves, all of it and nothing else.
        packet: the update.
        expected: number of the follower's next update.
        sketches: the settings that the follower expects; None: the packet's.
        run: the run that the follower follows; None: the packet's.
        donate: as for `move_kernels`.
        rows: as for `move_kernels`.

    Returns:
        The kernels, moved.

    Raises:
        GapError: the packet is of another update: some are missing, or it was applied before.
        PacketError: another run, other settings, layers or shapes than the follower's. Either is
            raised before any kernel is touched.

    Example:
        >>> kernels = {"q": jnp.zeros((4, 3))}
        >>> packet = make_packet(0, Sketches(rank=1), {"q": jnp.ones((3, 1), jnp.bfloat16)})
        >>> apply_packet(kernels, packet, expected=0)["q"][:, 0].tolist()
        [1.0, -1.0, -1.0, 1.0]
    """
    check_packet(kernels, packet, expected, sketches, run)
    return move_kernels(
        kernels, packet.factors, packet.sketches, packet.update, donate=donate, rows=rows
    )


def check_packet(
    kernels: Kernels,
    packet: Packet,
    expected: int,
    sketches: Sketches | None = None,
    run: str | None = None,
) -> None:
    """Refuses a packet that does not continue these kernels.

    Args:
        kernels: what the packet is to move; only shapes and dtypes are read.
        packet: the update.
        expected: number of the follower's next update.
        sketches: the settings that the follower expects; None: the packet's.
        run: the run that the follower follows; None: the packet's.

    Raises:
        GapError: the packet is of another update.
        PacketError: another run, other settings, layers or shapes.
    """
    what = f"the packet of update {packet.update}"
    # First: of another run, the number says nothing.
    if run is not None and packet.run != run:
        raise PacketError(
            f"{what} is of the run {packet.run!r}, the follower's weights are of the run {run!r}: "
            f"it would move weights that it was not made for; {_REMEDY}"
        )
    if packet.update > expected:
        raise GapError(
            f"{what} came where that of update {expected} was expected: "
            f"{packet.update - expected} missing; {_REMEDY}"
        )
    if packet.update < expected:
        raise GapError(
            f"{what} was applied before, that of update {expected} is expected; if the trainer "
            f"went back to an earlier checkpoint, {_REMEDY}"
        )
    if sketches is not None and packet.sketches != sketches:
        raise PacketError(
            f"{what} has the settings {packet.sketches}, expected {sketches}; {_REMEDY}, and check "
            "that it is of this run"
        )
    _check_layers(what, packet.factors, kernels)
    for layer, factor in packet.factors.items():
        kernel = kernels[layer]
        if not isinstance(kernel, jax.Array | jax.ShapeDtypeStruct) or kernel.ndim != 2:
            raise PacketError(
                f"the follower's {layer} is a {type(kernel).__name__} {kernel.shape}, expected a "
                "jax array [in, out]; stacked blocks are one kernel each here"
            )
        if kernel.dtype not in (jnp.float32, jnp.bfloat16):
            raise PacketError(
                f"the follower's {layer} is {kernel.dtype}, expected float32 or bfloat16 weights, "
                "the trainer's own"
            )
        if factor.shape[0] != kernel.shape[1]:
            raise PacketError(
                f"{what} moves {factor.shape[0]} outputs of {layer}, the follower's kernel is "
                f"{kernel.shape}, [in, out]: another model; {_REMEDY}, and check that it is of "
                "this run"
            )


def _check_layers(what: str, found: Mapping[str, Any], kernels: Mapping[str, Any]) -> None:
    lacked, untouched = sorted(found.keys() - kernels), sorted(kernels.keys() - found)
    if not lacked and not untouched:
        return
    parts = [(lacked, "the follower does not have"), (untouched, "are missing from it")]
    text = "; ".join(f"{', '.join(x[:4])} ({len(x)}) {how}" for x, how in parts if x)
    raise PacketError(
        f"{what} is of other layers: {text}. Follow the trainer's target layers: {_REMEDY}"
    )


def move_kernels(
    kernels: Kernels,
    factors: Mapping[str, Float[Array | np.ndarray, "_ _"]],
    sketches: Sketches,
    update: int,
    *,
    donate: bool = False,
    rows: int | None = ROWS,
) -> dict[str, Array]:
    """`W <- W - (F A)^T` for every layer: one program a shape, for trainer and followers alike.

    The result is bit-equal wherever backend, shapes and sharding are; other programs around
    `merge_factor` may add up in another order, and differ in the last place.

    Args:
        kernels: layer name -> `[in, out]`, float32 or bfloat16.
        factors: layer name -> `[out, rank]`, bfloat16, for the same layers.
        sketches: the settings of the projections.
        update: number of the update.
        donate: move kernels in place; those passed cannot be used afterwards. An interruption then
            loses the weights, while without it the old ones stay whole.
        rows: rows of a kernel at a time; None: all, where rows are sharded over devices.

    Returns:
        The kernels, moved, in the order of `kernels`.

    Raises:
        ValueError: shapes do not fit.

    Example:
        >>> kernels, factors = {"q": jnp.zeros((4, 3))}, {"q": jnp.ones((3, 1), jnp.bfloat16)}
        >>> move_kernels(kernels, factors, Sketches(rank=1), 0)["q"][:, 0].tolist()
        [1.0, -1.0, -1.0, 1.0]
    """
    move = _move_in_place if donate else _move
    number = np.int32(update)
    return {
        layer: move(kernel, factors[layer], layer_key(sketches.seed, layer), number, sketches, rows)
        for layer, kernel in kernels.items()
    }


def _moved(
    kernel: Float[Array, "d_in d_out"],
    factor: Float[Array, "d_out rank"],
    layer: UInt32[Array, "2"],
    update: Int[Array, ""],
    sketches: Sketches,
    rows: int | None,
) -> Float[Array, "d_in d_out"]:
    key = update_key(layer, update)
    a = sketches.projection(key, kernel.shape[0])
    return merge_factor(kernel, factor, a, key, rows=rows)


_STATIC = ("sketches", "rows")
_move = jax.jit(_moved, static_argnames=_STATIC)
_move_in_place = jax.jit(_moved, static_argnames=_STATIC, donate_argnames="kernel")


def packet_bytes(kernels: Mapping[str, Any], rank: int) -> int:
    """`Packet.nbytes` of an update of these kernels.

    Args:
        kernels: layer name -> anything with a shape `[in, out]`, `jax.ShapeDtypeStruct` say.
        rank: r of the sketches.

    Returns:
        Bytes: 2 for each of `out * rank` entries of a layer.

    Example:
        >>> packet_bytes({"q": jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)}, 256)
        2097152
    """
    return sum(2 * kernel.shape[1] * rank for kernel in kernels.values())


def full_sync_bytes(kernels: Mapping[str, Any], dtype: DTypeLike | None = None) -> int:
    """`FullSync.nbytes` of these kernels: what a packet is compared with.

    Args:
        kernels: layer name -> anything with a shape and a dtype.
        dtype: that they are sent in; None: their own.

    Returns:
        Bytes.

    Example:
        >>> full_sync_bytes({"q": jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)})
        33554432
    """
    return sum(math.prod(k.shape) * jnp.dtype(dtype or k.dtype).itemsize for k in kernels.values())


def _on_host(arrays: Mapping[str, Array | np.ndarray]) -> dict[str, np.ndarray]:
    # Copied: a host view of an array on the CPU would change with an array that is donated.
    return {name: np.array(array) for name, array in arrays.items()}
