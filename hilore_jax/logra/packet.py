"""The two messages from a trainer to its followers: an update's factors, or all the weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from hilore_jax.logra.counter import GENERATOR
from hilore_jax.logra.message import Buffer, Message, PacketError, decode, encode
from hilore_jax.logra.projection import KINDS, Kind
from hilore_jax.logra.sketches import Sketches

UPDATES = 2**31
"""Update numbers are below this: trainers count them in int32."""

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_RESERVED = "__metadata__"  # safetensors keeps its own header under that name
_PACKET, _FULL = "packet", "full sync"


@dataclass(frozen=True, kw_only=True, eq=False)
class Packet:
    """One update: what moves the weights of whoever holds them as they were before.

    Attributes:
        update: number of the update, from 0.
        sketches: the settings from which the projections are drawn again.
        factors: layer name, `blocks.3.q_proj` say, -> F = bf16(alpha D), bfloat16 `[out, rank]`.
        run: which trainer's run it is of; followers apply those of their own alone.
        generator: what draws them, `logra.counter.GENERATOR`.

    Raises:
        PacketError: another generator, an update number out of range, no factors, or a factor of
            another dtype or rank, or with entries that are not finite.

    Example:
        >>> factor = np.ones((3, 2), ml_dtypes.bfloat16)
        >>> packet = Packet(update=7, sketches=Sketches(rank=2), factors={"q": factor})
        >>> Packet.from_bytes(packet.to_bytes()).update, packet.nbytes
        (7, 12)
    """

    update: int
    sketches: Sketches
    factors: Mapping[str, np.ndarray]
    run: str = ""
    generator: str = GENERATOR

    def __post_init__(self):
        what = f"the packet of update {self.update}"
        _check(what, self.update, self.generator, self.factors)
        for layer, factor in self.factors.items():
            shape = (*factor.shape[:1], self.sketches.rank)
            if factor.dtype != _BFLOAT16 or factor.ndim != 2 or factor.shape != shape:
                raise PacketError(
                    f"{what} holds for {layer} a {factor.dtype} factor {factor.shape}, expected "
                    f"bfloat16 [out, {self.sketches.rank}]: the rounded factor that the trainer "
                    "itself applies"
                )
            if not _finite(factor):
                raise PacketError(
                    f"{what} holds for {layer} a factor with entries that are not finite, which "
                    "would ruin the weights; no packet is made of such an update"
                )

    @property
    def nbytes(self) -> int:
        """Bytes of the factors; the header adds some 100 a layer."""
        return sum(factor.nbytes for factor in self.factors.values())

    def to_bytes(self) -> bytes:
        """The packet as the bytes of a safetensors file; equal packets are equal bytes."""
        return encode(_PACKET, _fields(self), self.factors)

    @classmethod
    def from_bytes(cls, data: Buffer) -> Packet:
        """Reads a packet.

        Args:
            data: what `to_bytes` returned; the factors are views of it.

        Raises:
            PacketError: it is none, is damaged, or is of another version or generator.
        """
        return _packet(_expect(decode(data), _PACKET))


@dataclass(frozen=True, kw_only=True, eq=False)
class FullSync:
    """All weights that packets move, and which packet comes next; a follower's state, too.

    Attributes:
        update: number of the next packet.
        sketches: the settings of the packets to come.
        kernels: layer name -> `[in, out]`, float32 or bfloat16.
        run: which trainer's run it is of: that of the packets to come.
        generator: what draws projections, `logra.counter.GENERATOR`.

    Raises:
        PacketError: another generator, a number out of range, no kernels, or one that is no matrix
            of float32 or bfloat16.

    Example:
        >>> kernels = {"q": np.ones((3, 2), np.float32)}
        >>> full = FullSync(update=8, sketches=Sketches(rank=1), kernels=kernels)
        >>> FullSync.from_bytes(full.to_bytes()).update, full.nbytes
        (8, 24)
    """

    update: int
    sketches: Sketches
    kernels: Mapping[str, np.ndarray]
    run: str = ""
    generator: str = GENERATOR

    def __post_init__(self):
        what = f"the full sync before update {self.update}"
        _check(what, self.update, self.generator, self.kernels)
        for layer, kernel in self.kernels.items():
            if kernel.dtype not in (np.float32, _BFLOAT16) or kernel.ndim != 2:
                raise PacketError(
                    f"{what} holds for {layer} a {kernel.dtype} kernel {kernel.shape}, expected "
                    "float32 or bfloat16 [in, out]"
                )

    @property
    def nbytes(self) -> int:
        """Bytes of the kernels; the header adds some 100 a layer."""
        return sum(kernel.nbytes for kernel in self.kernels.values())

    def to_bytes(self) -> bytes:
        """The message as the bytes of a safetensors file."""
        return encode(_FULL, _fields(self), self.kernels)

    @classmethod
    def from_bytes(cls, data: Buffer) -> FullSync:
        """Reads a full sync.

        Args:
            data: what `to_bytes` returned; the kernels are views of it.

        Raises:
            PacketError: it is none, is damaged, or is of another version or generator.
        """
        return _full(_expect(decode(data), _FULL))


def read_message(data: Buffer) -> Packet | FullSync:
    """Reads either message.

    Args:
        data: what `to_bytes` of one of them returned.

    Returns:
        The message.

    Raises:
        PacketError: it is none, is damaged, or is of another version or generator.

    Example:
        >>> factor = np.ones((3, 2), ml_dtypes.bfloat16)
        >>> packet = Packet(update=7, sketches=Sketches(rank=2), factors={"q": factor})
        >>> type(read_message(packet.to_bytes())).__name__
        'Packet'
    """
    message = decode(data)
    return _full(message) if message.kind == _FULL else _packet(_expect(message, _PACKET))


def _check(what: str, update: int, generator: str, tensors: Mapping[str, np.ndarray]) -> None:
    if generator != GENERATOR:
        raise PacketError(
            f"{what} draws projections with {generator!r}, this hilore_jax with {GENERATOR!r}: "
            "the weights would drift apart. Run the same version on both sides"
        )
    if not 0 <= update < UPDATES:
        raise PacketError(f"{what}: update numbers are from 0 to 2^31 - 1")
    if not tensors or "" in tensors or _RESERVED in tensors:
        raise PacketError(
            f"{what} has the layers {sorted(tensors)}, expected at least one, each with a name "
            f"that is not {_RESERVED}"
        )


def _finite(factor: np.ndarray) -> bool:
    # On the bits: an exponent of ones is an infinity or no number. Many times faster than isfinite.
    exponent = np.uint16(0x7F80)
    return not ((factor.view(np.uint16) & exponent) == exponent).any()


def _fields(message: Packet | FullSync) -> dict[str, str]:
    return {
        "update": str(message.update),
        "run": message.run,
        "generator": message.generator,
        "rank": str(message.sketches.rank),
        "seed": str(message.sketches.seed),
        "kind": message.sketches.kind,
        "dtype": message.sketches.dtype,
    }


def _sketches(message: Message) -> Sketches:
    kinds: dict[str, Kind] = {kind: kind for kind in KINDS}
    kind = kinds.get(message.field("kind"))
    if kind is None:
        raise PacketError(
            f"the {message.kind}'s projections are {message.field('kind')!r}, expected "
            f"{' or '.join(KINDS)}; run the same hilore_jax on both sides"
        )
    rank, seed, dtype = message.number("rank"), message.number("seed"), message.field("dtype")
    try:
        return Sketches(rank=rank, seed=seed, kind=kind, dtype=dtype)
    except ValueError as error:
        raise PacketError(f"the {message.kind}'s settings: {error}") from None


def _expect(message: Message, kind: str) -> Message:
    if message.kind != kind:
        raise PacketError(
            f"the sync message is a {message.kind!r}, expected a {kind}; read_message(...) and "
            "Follower.apply(...) take packets and full syncs"
        )
    return message


def _packet(message: Message) -> Packet:
    return Packet(
        update=message.number("update"),
        run=message.field("run"),
        generator=message.field("generator"),
        sketches=_sketches(message),
        factors=message.tensors,
    )


def _full(message: Message) -> FullSync:
    return FullSync(
        update=message.number("update"),
        run=message.field("run"),
        generator=message.field("generator"),
        sketches=_sketches(message),
        kernels=message.tensors,
    )
