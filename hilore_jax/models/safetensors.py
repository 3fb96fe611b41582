"""The safetensors file format: header checks before data, one tensor at a time.

Format: 8 bytes little-endian header length ``n``; ``n`` bytes of JSON, name -> ``dtype``,
``shape`` and ``data_offsets``, relative to the end of the header; then the data.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

_DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_MAX_HEADER = 100_000_000  # the reference implementation's own limit


@dataclass(frozen=True)
class Entry:
    """Where one tensor lies: file, dtype, shape, and first and last byte + 1 in the file."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    def read(self) -> np.ndarray:
        """Maps the tensor's bytes as an array of the file's dtype (read-only, not copied)."""
        if self.begin == self.end:
            return np.zeros(self.shape, _DTYPES[self.dtype])
        raw = np.memmap(self.path, np.uint8, "r", self.begin, (self.end - self.begin,))
        return raw.view(_DTYPES[self.dtype]).reshape(self.shape)


def read_header(path: Path | str) -> dict[str, Entry]:
    """Reads and checks a safetensors header; no tensor data is touched.

    Args:
        path: a ``.safetensors`` file.

    Returns:
        Tensor name -> `Entry`.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is cut short, is no safetensors file, or holds a dtype other than
            F32, F16 and BF16.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no safetensors file at {path}")
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER):
            raise ValueError(
                f"{path} is cut short or is no safetensors file: its header should take {length} "
                f"bytes, the file has {size}. Download it again."
            )
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise ValueError(f"{path}: the safetensors header is not JSON ({error}).") from error
    header.pop("__metadata__", None)
    return {name: _entry(path, name, info, 8 + length, size) for name, info in header.items()}


def _entry(path: Path, name: str, info: Mapping, start: int, size: int) -> Entry:
    dtype, shape = info["dtype"], tuple(info["shape"])
    begin, end = (start + offset for offset in info["data_offsets"])
    if end > size:
        raise ValueError(
            f"{path} is cut short: tensor {name} {shape} ends at byte {end}, the file has {size}. "
            "Download it again."
        )
    if dtype not in _DTYPES:
        raise ValueError(
            f"{path}: tensor {name} has dtype {dtype}; supported are {', '.join(_DTYPES)}. "
            "Use an unquantized checkpoint."
        )
    expected = math.prod(shape) * _DTYPES[dtype].itemsize
    if begin < start or end - begin != expected:
        raise ValueError(
            f"{path}: tensor {name} {dtype} {shape} needs {expected} bytes, "
            f"its data_offsets give {end - begin}. The file is damaged; download it again."
        )
    return Entry(path, dtype, shape, begin, end)


def write(path: Path | str, tensors: Iterable[tuple[str, np.ndarray]]) -> None:
    """Writes arrays as one safetensors file, with an atomic rename at the end.

    Args:
        path: the file to write.
        tensors: (name, array) pairs; float32, float16 or bfloat16.

    Example:
        >>> import numpy as np, tempfile, pathlib
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "x.safetensors"
        >>> write(path, [("a", np.arange(3, dtype=np.float32))])
        >>> read_header(path)["a"].read().tolist()
        [0.0, 1.0, 2.0]
    """
    arrays = dict(tensors)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, array in arrays.items():
        if array.dtype not in _NAMES:
            raise ValueError(f"tensor {name} is {array.dtype}; writable are {', '.join(_DTYPES)}.")
        header[name] = {
            "dtype": _NAMES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [offset, offset + array.nbytes],
        }
        offset += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors start 8-byte aligned
    path = Path(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for array in arrays.values():
                file.write(np.ascontiguousarray(array).view(np.uint8).data)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
