"""Hugging Face model folders: read with every name checked first, written in shards."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from hilore_jax.models import safetensors
from hilore_jax.models.config import DecoderConfig
from hilore_jax.models.shapes import tensor_shapes, to_hf
from hilore_jax.models.tensors import LazyTensors, check_shapes

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


def open_folder(folder: Path | str) -> LazyTensors:
    """Reads the headers of a folder's safetensors files.

    Args:
        folder: holds ``model.safetensors``, or ``model.safetensors.index.json`` and its shards.

    Returns:
        Lazily read arrays in the dtype of the file.

    Raises:
        FileNotFoundError: no weights, or a shard of the index is missing.
        ValueError: a file is cut short, or a shard lacks a tensor that the index places there.
    """
    folder = Path(folder)
    if (folder / _SINGLE).is_file():
        entries = safetensors.read_header(folder / _SINGLE)
    elif (folder / _INDEX).is_file():
        entries = _sharded(folder)
    else:
        raise FileNotFoundError(
            f"no {_SINGLE} and no {_INDEX} in {folder}. Weights in another format (.bin, .pth) "
            "are not read: save them with transformers' save_pretrained first."
        )
    shapes = {name: entry.shape for name, entry in entries.items()}
    return LazyTensors(shapes, lambda name: entries[name].read(), str(folder))


def _sharded(folder: Path) -> dict[str, safetensors.Entry]:
    weight_map = json.loads((folder / _INDEX).read_text())["weight_map"]
    files = sorted(set(weight_map.values()))
    missing = [file for file in files if not (folder / file).is_file()]
    if missing:
        raise FileNotFoundError(
            f"{folder}: {len(missing)} of {len(files)} shards that {_INDEX} lists are missing: "
            f"{', '.join(missing)}. Download them into the folder."
        )
    headers = {file: safetensors.read_header(folder / file) for file in files}
    absent = [name for name, file in weight_map.items() if name not in headers[file]]
    if absent:
        raise ValueError(
            f"{folder / weight_map[absent[0]]} lacks tensor {absent[0]}, which {_INDEX} places "
            f"there ({len(absent)} such). Index and shards are of different downloads; renew both."
        )
    return {name: headers[file][name] for name, file in weight_map.items()}


def check(tensors: LazyTensors, config: DecoderConfig) -> None:
    """Raises unless the tensors are those of the config, by name and shape.

    A tied model's ``lm_head.weight`` and the ``inv_freq`` buffers of old checkpoints may be there;
    they are copies of what the decoder has.

    Args:
        tensors: from `open_folder` or `gguf_hf.hf_tensors`.
        config: the model's shape.

    Raises:
        ValueError: names tensors that are missing, unexpected or of another shape.
    """

    def ignored(name: str) -> bool:
        tied = config.tie_embeddings and name == "lm_head.weight"
        return tied or name.endswith("rotary_emb.inv_freq")

    check_shapes(tensors.shapes, tensor_shapes(config), tensors.source, ignored=ignored)


def write_folder(
    folder: Path | str,
    config: DecoderConfig,
    tensors: LazyTensors,
    *,
    dtype: np.dtype | None = None,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Writes ``config.json`` and safetensors that `transformers` loads.

    Args:
        folder: made if need be; must not hold a model yet.
        config: the shape.
        tensors: Hugging Face names, ``[out, in]``; one shard's worth is held in memory.
        dtype: dtype to write, of the array read where None.
        max_shard_bytes: bytes of tensors a file; one larger tensor gets a file alone.

    Raises:
        FileExistsError: the folder holds a model already.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    old = [p.name for p in sorted(folder.iterdir()) if p.name == "config.json" or _is_weights(p)]
    if old:
        raise FileExistsError(
            f"{folder} holds a model already ({', '.join(old)}); use a new folder"
        )
    # A shape is known before its array is read; without a dtype the first array tells it.
    itemsize = np.dtype(dtype or tensors["model.norm.weight"].dtype).itemsize
    shapes = tensor_shapes(config)
    shards = _shards({k: math.prod(v) * itemsize for k, v in shapes.items()}, max_shard_bytes)

    def array(name: str) -> np.ndarray:
        return tensors[name] if dtype is None else tensors[name].astype(dtype, copy=False)

    total = _write_shards(folder, shards, array)
    if len(shards) > 1:
        weight_map = {name: _shard_name(i, len(shards)) for i, s in enumerate(shards) for name in s}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / _INDEX).write_text(json.dumps(index, indent=2))
    (folder / "config.json").write_text(json.dumps(to_hf(config), indent=2))


def _is_weights(path: Path) -> bool:
    return path.suffix == ".safetensors" or path.name == _INDEX


def _shard_name(index: int, count: int) -> str:
    return _SINGLE if count == 1 else f"model-{index + 1:05d}-of-{count:05d}.safetensors"


def _shards(nbytes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Consecutive names whose bytes stay within the limit."""
    shards: list[list[str]] = [[]]
    used = 0
    for name, size in nbytes.items():
        if shards[-1] and used + size > limit:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += size
    return shards


def _write_shards(folder: Path, shards: list[list[str]], array: Callable[[str], np.ndarray]) -> int:
    total = 0
    for i, names in enumerate(shards):
        arrays = {name: array(name) for name in names}
        total += sum(a.nbytes for a in arrays.values())
        safetensors.write(folder / _shard_name(i, len(shards)), arrays.items())
    return total
