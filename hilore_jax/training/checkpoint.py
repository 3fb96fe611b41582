"""Checkpoints of the step state in a folder: which there are, and the newest whole one read.

A folder `00000050` holds `state` (orbax's) and `meta.json`, the settings and every file's digest.
It has that name only when all of it is written: `training.saver`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

logger = logging.getLogger("hilore_jax")

UNFINISHED = ".writing-"  # begins the name of a checkpoint that is not whole


def place(folder: Path, step: int) -> Path:
    """Where a checkpoint lies.

    Example:
        >>> place(Path("run"), 50).name
        '00000050'
    """
    return folder / f"{step:08d}"


def steps(folder: Path) -> list[int]:
    """Steps of the checkpoints in a folder, ascending."""
    if not folder.is_dir():
        return []
    found = [entry.name for entry in folder.iterdir() if re.fullmatch("[0-9]{8,}", entry.name)]
    return sorted(map(int, found))


def unfinished(folder: Path) -> list[Path]:
    """Checkpoints that are being written, or whose writing was interrupted."""
    return sorted(folder.glob(f"{UNFINISHED}*"))


def newest_meta(folder: Path) -> dict[str, Any]:
    """The plain values of a folder's newest checkpoint; empty where none can be read."""
    for step in reversed(steps(folder)):
        meta = _meta(place(folder, step))
        if isinstance(meta, dict):
            return meta
    return {}


def best(folder: Path) -> int | None:
    """The step of the checkpoint with the highest score, of equal ones the newest.

    Args:
        folder: folder of checkpoints.

    Returns:
        The step; None where no checkpoint that can be read has a finite score.
    """
    scores = {}
    for step in steps(folder):
        meta = _meta(place(folder, step))
        score = meta.get("score") if isinstance(meta, dict) else None
        if isinstance(score, int | float) and math.isfinite(score):
            scores[step] = score
    return max(scores, key=lambda step: (scores[step], step), default=None)


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
    found = steps(folder)
    for path in unfinished(folder):
        logger.warning(
            "skipped the half-written checkpoint %s: it is being written, or that was interrupted "
            "(then the next save removes it)",
            path,
        )
    for step in reversed(found):
        path = place(folder.absolute(), step)
        meta = checked_meta(path)
        if isinstance(meta, str):
            logger.warning("skipped the damaged checkpoint %s: %s", path, meta)
            continue
        _check_fingerprint(path, meta.get("fingerprint", {}), fingerprint)
        return read_state(path, target), meta
    if found:
        raise ValueError(
            f"none of the checkpoints {found} in {folder} can be read (see the warnings above); "
            "start anew in another run folder"
        )
    return None


def checked_meta(path: Path) -> dict[str, Any] | str:
    """A checkpoint's plain values, once every file of it is known to be whole.

    Args:
        path: a checkpoint's folder.

    Returns:
        Its `meta.json`, or what is wrong with the checkpoint.
    """
    # Found here, because orbax may hang or leave threads behind on a file that is cut short.
    meta = _meta(path)
    if isinstance(meta, str):
        return meta
    if not isinstance(meta.get("sha256"), dict):
        return "meta.json lists no digests of the files"
    try:
        return _damaged(path, meta["sha256"]) or meta
    except OSError as error:
        return f"{type(error).__name__}: {error}"


def read_state(path: Path, target: Any) -> Any:
    """The arrays of a checkpoint, each in the sharding of its place in `target`.

    The checkpoint may have been saved from another number of devices.

    Args:
        path: a checkpoint's folder, found whole.
        target: pytree of arrays, or of shapes with shardings.

    Returns:
        The tree of `target`, with the checkpoint's values.
    """
    import orbax.checkpoint as ocp  # lazily: it takes two seconds

    with ocp.StandardCheckpointer() as checkpointer:
        found = checkpointer.restore(path / "state", named(target, abstract=True))
    return _unnamed(found, target)


def read_shapes(path: Path) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape and dtype of each array of a checkpoint, by its name there, on the first device."""
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        tree = checkpointer.metadata(path / "state").item_metadata.tree
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here)
        for name, leaf in tree.items()
    }


def read_some(path: Path, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """Some of a checkpoint's arrays, by the names of `read_shapes`; the others are not read."""
    import orbax.checkpoint as ocp

    item = dict(wanted)
    args = ocp.args.PyTreeRestore(
        item=item,
        restore_args=ocp.checkpoint_utils.construct_restore_args(item),
        partial_restore=True,
    )
    with ocp.PyTreeCheckpointer() as checkpointer:
        return checkpointer.restore(path / "state", args=args)


def _meta(path: Path) -> dict[str, Any] | str:
    """A checkpoint's plain values, or why they cannot be read."""
    try:
        meta = json.loads((path / "meta.json").read_text())
    except (OSError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    if not isinstance(meta, dict):
        return f"meta.json is {str(meta)[:40]!r}, expected an object of names and values"
    return meta


def digests(folder: Path) -> dict[str, str]:
    """The sha256 of every file of a checkpoint but `meta.json`, by its path in the folder."""
    found = {}
    for file in sorted(folder.rglob("*")):
        if file.is_file() and file.name != "meta.json":
            with file.open("rb") as stream:
                digest = hashlib.file_digest(stream, "sha256").hexdigest()
            found[file.relative_to(folder).as_posix()] = digest
    return found


def _damaged(folder: Path, expected: Mapping[str, str]) -> str:
    """What is wrong with a checkpoint's files; empty when nothing is."""
    found = digests(folder)
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


def named(tree: Any, *, abstract: bool = False) -> dict[str, Any]:
    """The arrays of a tree as a checkpoint holds them: by path, keys as their bits."""
    # Names from the tree's own paths: another structure then shows as a missing or extra name.
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    found = {}
    for path, leaf in leaves:
        if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        if abstract:
            leaf = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
        found[jax.tree_util.keystr(path, simple=True, separator=".")] = leaf
    return found


def _unnamed(found: Mapping[str, Any], target: Any) -> Any:
    def pick(path, like):
        leaf = found[jax.tree_util.keystr(path, simple=True, separator=".")]
        if jax.numpy.issubdtype(like.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(leaf, impl=jax.random.key_impl(like))
        return leaf

    return jax.tree_util.tree_map_with_path(pick, target)
