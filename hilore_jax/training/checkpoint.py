"""Checkpoints of the step state through orbax: atomic, the newest few kept, never half-read."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

logger = logging.getLogger("hilore_jax")


def save(
    folder: Path, step: int, tree: Any, meta: Mapping[str, Any], *, keep_latest: int = 2
) -> Path:
    """Writes one checkpoint; it appears under its final name only when it is complete.

    Args:
        folder: folder of checkpoints, made if needed.
        step: names the checkpoint; an older one of the same step is replaced.
        tree: pytree of arrays and PRNG keys.
        meta: plain JSON values; `meta["fingerprint"]` is compared at restore.
        keep_latest: older checkpoints than the newest this many are removed.

    Returns:
        The checkpoint's folder.
    """
    import orbax.checkpoint as ocp  # lazily: it takes two seconds

    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    scratch, final = folder / f".writing-{step}", folder / f"{step:08d}"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(scratch / "state", _named(tree))
        checkpointer.wait_until_finished()
    meta = {"step": step, **meta, "sha256": _digests(scratch)}
    (scratch / "meta.json").write_text(json.dumps(meta, indent=2))
    shutil.rmtree(final, ignore_errors=True)
    os.replace(scratch, final)
    for old in steps(folder)[:-keep_latest]:
        shutil.rmtree(folder / f"{old:08d}")
    return final


def steps(folder: Path) -> list[int]:
    """Steps of the checkpoints in a folder, ascending."""
    if not folder.is_dir():
        return []
    return sorted(int(entry.name) for entry in folder.iterdir() if entry.name.isdecimal())


def newest_meta(folder: Path) -> dict[str, Any]:
    """The plain values of a folder's newest checkpoint; empty where none can be read."""
    for step in reversed(steps(folder)):
        with contextlib.suppress(OSError, ValueError):
            return json.loads((folder / f"{step:08d}" / "meta.json").read_text())
    return {}


def restore(
    folder: Path, target: Any, fingerprint: Mapping[str, Any]
) -> tuple[Any, dict[str, Any]] | None:
    """The newest readable checkpoint, laid out like `target`.

    Args:
        folder: folder of checkpoints.
        target: pytree of arrays (or shapes with shardings) with the wanted structure.
        fingerprint: the run's settings, which must equal the checkpoint's.

    Returns:
        (tree, meta), or None where there is no checkpoint. A checkpoint that cannot be read is
        skipped with a logged warning and the one before it is tried.

    Raises:
        ValueError: the checkpoint is of other settings (each difference is named), or no
            checkpoint of the folder can be read.
    """
    import orbax.checkpoint as ocp

    found = steps(folder)
    for step in reversed(found):
        path = folder.absolute() / f"{step:08d}"
        try:
            meta = json.loads((path / "meta.json").read_text())
            damaged = _damaged(path, meta["sha256"])
        except (OSError, json.JSONDecodeError, KeyError) as error:
            damaged = f"{type(error).__name__}: {error}"
        # Found here, because orbax may hang or leave threads behind on a file that is cut short.
        if damaged:
            logger.warning("skipped the damaged checkpoint %s: %s", path, damaged)
            continue
        _check_fingerprint(path, meta.get("fingerprint", {}), fingerprint)
        with ocp.StandardCheckpointer() as checkpointer:
            named = checkpointer.restore(path / "state", _named(target, abstract=True))
        return _unnamed(named, target), meta
    if found:
        raise ValueError(
            f"none of the checkpoints {found} in {folder} can be read (see the warnings above); "
            "start anew in another run folder"
        )
    return None


def _digests(folder: Path) -> dict[str, str]:
    digests = {}
    for file in sorted(folder.rglob("*")):
        if file.is_file() and file.name != "meta.json":
            with file.open("rb") as stream:
                digest = hashlib.file_digest(stream, "sha256").hexdigest()
            digests[file.relative_to(folder).as_posix()] = digest
    return digests


def _damaged(folder: Path, expected: Mapping[str, str]) -> str:
    """What is wrong with a checkpoint's files; empty when nothing is."""
    found = _digests(folder)
    missing = sorted(set(expected) - set(found))
    changed = sorted(name for name in found if found[name] != expected.get(name))
    return "; ".join(
        f"{len(names)} files {kind}, such as {names[0]}"
        for kind, names in (("are missing", missing), ("have changed", changed))
        if names
    )


def _check_fingerprint(path: Path, saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    wanted = json.loads(json.dumps(wanted))
    names = sorted(name for name in {*saved, *wanted} if saved.get(name) != wanted.get(name))
    if names:
        different = "; ".join(
            f"{name}: checkpoint {saved.get(name)!r}, this run {wanted.get(name)!r}"
            for name in names
        )
        raise ValueError(
            f"{path} is of a run with other settings ({different}); use the same settings or "
            "another run folder"
        )


def _named(tree: Any, *, abstract: bool = False) -> dict[str, Any]:
    # Names from the tree's own paths: another structure then shows as a missing or extra name.
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    named = {}
    for path, leaf in leaves:
        if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        if abstract:
            leaf = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
        named[jax.tree_util.keystr(path, simple=True, separator=".")] = leaf
    return named


def _unnamed(named: Mapping[str, Any], target: Any) -> Any:
    def pick(path, like):
        leaf = named[jax.tree_util.keystr(path, simple=True, separator=".")]
        if jax.numpy.issubdtype(like.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(leaf, impl=jax.random.key_impl(like))
        return leaf

    return jax.tree_util.tree_map_with_path(pick, target)
