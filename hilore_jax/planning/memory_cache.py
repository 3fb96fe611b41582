"""Compiled memory kept on disk: one small JSON file a program, written whole or not at all."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import logging
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hilore_jax.models.bundled import cache_dir

_log = logging.getLogger("hilore_jax")
_SCHEMA = 1


@dataclass(frozen=True)
class Cache:
    """A folder of results by what they were computed from.

    Attributes:
        folder: where; None is `plans` in the library's cache folder, which `HILORE_CACHE` moves.

    Example:
        >>> import tempfile
        >>> cache = Cache(Path(tempfile.mkdtemp()))
        >>> cache.put({"program": "f"}, {"temporaries": 8})
        >>> cache.get({"program": "f"}), cache.get({"program": "g"})
        ({'temporaries': 8}, None)
    """

    folder: Path | None = None

    def path(self, identity: Mapping[str, Any]) -> Path:
        """The file of a result; `identity` says, in JSON values, what it is the result of."""
        return (self.folder or cache_dir() / "plans") / f"{_digest(identity)}.json"

    def get(self, identity: Mapping[str, Any]) -> dict[str, int] | None:
        """The result, or None where there is none.

        A file that is damaged, or of another identity, is None too, after a logged warning: what
        comes next is computed and written over it.
        """
        path = self.path(identity)
        try:
            text = path.read_text()
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            return _rebuild(path, error)
        try:
            entry = json.loads(text)
            value = entry["value"]
            if entry["schema"] != _SCHEMA:
                return _rebuild(path, f"schema {entry['schema']!r}, expected {_SCHEMA}")
            if entry["checksum"] != _digest([identity, value]):
                return _rebuild(path, "its checksum is wrong")
        except (ValueError, KeyError, TypeError) as error:
            return _rebuild(path, error)
        return value

    def put(self, identity: Mapping[str, Any], value: Mapping[str, int]) -> None:
        """Keeps a result. Where the folder cannot be written, says so and keeps nothing."""
        path = self.path(identity)
        value = dict(value)
        entry = {"schema": _SCHEMA, "checksum": _digest([identity, value]), "value": value}
        text = json.dumps(entry | {"identity": dict(identity)}, indent=1)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, text)
        except OSError as error:
            _log.warning("compiled memory is not kept: %s cannot be written (%s)", path, error)


def write_whole(path: Path, text: str) -> None:
    """Writes a file that appears complete or not at all, also under an interruption.

    Args:
        path: the file; its folder exists.
        text: what it will hold.

    Raises:
        OSError: the folder cannot be written.
    """
    # Not tempfile's: its files are for their owner's eyes only.
    scratch = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        scratch.write_text(text)
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


@functools.cache
def library_version() -> str:
    """This library's version and a digest of its source, which a checkout changes without one."""
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        digest.update(str(file.relative_to(root)).encode())
        digest.update(file.read_bytes())
    try:
        version = importlib.metadata.version("hilore-jax")
    except importlib.metadata.PackageNotFoundError:
        version = "unknown"
    return f"{version}+{digest.hexdigest()[:12]}"


def _rebuild(path: Path, reason: object) -> None:
    _log.warning("the cache entry %s is unusable and will be rebuilt: %s", path, reason)


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:40]
