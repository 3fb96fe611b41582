"""Sync messages as bytes: safetensors files whose header also names, versions and checks them."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

SCHEMA = 2
"""Raised when the format, the drawing of projections or the merge changes."""

Buffer = bytes | bytearray | memoryview
"""What messages are read from."""

_DTYPES = {"F32": np.dtype(np.float32), "BF16": np.dtype(ml_dtypes.bfloat16)}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_METADATA = "__metadata__"
# The checksum stands first, so that its place is known. It is taken with zeros in that place: all
# other bytes are covered, the header's too.
_START = b'{"__metadata__":{"checksum":"'
_AT = 8 + len(_START)
_DIGITS = 64
_REMEDY = "ask the trainer for a full sync"


class SyncError(ValueError):
    """What a follower is given and does not apply; a full sync brings it back."""


class PacketError(SyncError):
    """A message that is damaged, of another format, or does not fit the follower's weights."""


class GapError(SyncError):
    """A packet of another update than the follower's next one."""


class Message(NamedTuple):
    """A checked message: its kind, its fields, and its tensors by name (read-only views)."""

    kind: str
    fields: dict[str, str]
    tensors: dict[str, np.ndarray]

    def field(self, name: str) -> str:
        """A field's text; `PacketError` where it is missing."""
        if name not in self.fields:
            raise PacketError(
                f"the {self.kind} lacks the field {name!r}, it has {', '.join(self.fields)}; "
                f"{_REMEDY}"
            )
        return self.fields[name]

    def number(self, name: str) -> int:
        """A field that is a whole number, 0 or more; `PacketError` where it is none."""
        text = self.field(name)
        if not re.fullmatch("[0-9]{1,20}", text):
            raise PacketError(
                f"the {self.kind}'s {name} is {text!r}, expected a whole number; {_REMEDY}"
            )
        return int(text)


def encode(kind: str, fields: Mapping[str, str], tensors: Mapping[str, np.ndarray]) -> bytes:
    """A message as the bytes of a safetensors file; equal messages are equal bytes.

    Args:
        kind: what it is, such as "packet".
        fields: the rest of its header.
        tensors: float32 or bfloat16, by name.

    Returns:
        The bytes. Their checksum is BLAKE2b's, 256 bits, of all of them.

    Example:
        >>> data = encode("packet", {"update": "7"}, {"q": np.ones((1, 2), np.float32)})
        >>> decode(data).number("update"), decode(data).tensors["q"].tolist()
        (7, [[1.0, 1.0]])
    """
    # Wide numbers first, as the format's own writers have it: then all of them are aligned.
    order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    metadata = {"checksum": "0" * _DIGITS, "message": kind, "schema": str(SCHEMA), **fields}
    header: dict[str, Any] = {_METADATA: metadata}
    end = 0
    for name in order:
        array, begin = tensors[name], end
        end += array.nbytes
        header[name] = {
            "dtype": _NAMES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    parts = [np.ascontiguousarray(tensors[name]).reshape(-1).view(np.uint8).data for name in order]
    digest = _digest([head, *parts])
    return b"".join([head[:_AT], digest.encode(), head[_AT + _DIGITS :], *parts])


def decode(data: Buffer) -> Message:
    """Reads a message and checks all of it.

    Args:
        data: what `encode` returned.

    Returns:
        The message; its tensors are views of `data`.

    Raises:
        PacketError: no message, one cut short, one of a newer version, or a damaged one.
    """
    view = memoryview(data).cast("B")
    header, start = _header(view)
    fields = _fields(header)
    spans, size = _spans(header)
    if size != len(view) - start:
        how = "is cut short" if size > len(view) - start else "has bytes after its end"
        raise PacketError(
            f"the sync message {how}: {len(view)} bytes, expected {start + size}; {_REMEDY}"
        )
    told = fields["checksum"]
    found = _digest([view[:_AT], b"0" * _DIGITS, view[_AT + _DIGITS :]])
    if bytes(view[8 : _AT + _DIGITS]) != _START + told.encode() or found != told:
        raise PacketError(
            f"the sync message's checksum is wrong: it says {told[:12]}..., its bytes give "
            f"{found[:12]}...; it was damaged on its way, {_REMEDY}"
        )
    tensors = {
        name: np.frombuffer(view, dtype, math.prod(shape), start + begin).reshape(shape)
        for name, (dtype, shape, begin) in spans.items()
    }
    return Message(fields.pop("message"), fields, tensors)


def _digest(parts: list) -> str:
    digest = hashlib.blake2b(digest_size=_DIGITS // 2)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def _header(view: memoryview) -> tuple[dict[str, Any], int]:
    """The header's JSON object, and where the tensors' bytes start."""
    length = int.from_bytes(view[:8], "little")
    if len(view) < 8 or length > len(view) - 8:
        raise PacketError(
            f"no sync message, or one cut short in its header: {len(view)} bytes; {_REMEDY}"
        )
    try:
        header = json.loads(bytes(view[8 : 8 + length]))
    except (ValueError, RecursionError) as error:
        raise PacketError(
            f"no sync message, or a damaged one: its header is no JSON ({error}); {_REMEDY}"
        ) from None
    if not isinstance(header, dict):
        raise PacketError(f"no sync message: its header is no JSON object; {_REMEDY}")
    return header, 8 + length


def _fields(header: dict[str, Any]) -> dict[str, str]:
    """The metadata of a message of a schema that is known here."""
    metadata = header.pop(_METADATA, None)
    needed = {"checksum", "message", "schema"}
    if not isinstance(metadata, dict) or not needed <= metadata.keys():
        raise PacketError(
            "no sync message: a safetensors file without the header of one. Packets are made by "
            "hilore_jax.logra.make_packet(...).to_bytes()"
        )
    if not all(isinstance(value, str) for value in metadata.values()):
        raise PacketError(f"the sync message's header holds values that are no text; {_REMEDY}")
    schema = metadata["schema"]
    if schema.isdecimal() and int(schema[:20]) > SCHEMA:
        raise PacketError(
            f"the sync message has schema {schema}, this hilore_jax reads up to {SCHEMA}: the "
            "trainer runs a newer version. Install the same one here"
        )
    if schema != str(SCHEMA):
        raise PacketError(
            f"the sync message has schema {schema!r}, expected {SCHEMA}; {_REMEDY}, from a "
            "trainer with the same hilore_jax"
        )
    return dict(metadata)


def _spans(
    header: dict[str, Any],
) -> tuple[dict[str, tuple[np.dtype, tuple[int, ...], int]], int]:
    """Dtype, shape and first byte of each tensor, and the bytes of all: they lie side by side."""
    spans, size = {}, 0
    try:
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            dtype, shape = _DTYPES[entry["dtype"]], tuple(entry["shape"])
            begin, end = entry["data_offsets"]
            if not all(type(n) is int and n >= 0 for n in (*shape, begin, end)):
                raise ValueError("sizes that are no whole numbers")
            if begin != size or end - begin != math.prod(shape) * dtype.itemsize:
                raise ValueError(f"{entry['dtype']} {shape} from byte {begin} to {end}")
            spans[name], size = (dtype, shape, begin), end
    except (KeyError, TypeError, ValueError) as error:
        raise PacketError(
            f"the sync message's header describes no tensors that fit ({error}); {_REMEDY}"
        ) from None
    return spans, size
