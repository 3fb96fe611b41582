"""Pretrained decoders: loaded from a name, a Hugging Face folder or a GGUF file; saved back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from flax import nnx

from hilore_jax.models import hf, shapes
from hilore_jax.models.adapters import add_lora
from hilore_jax.models.adapters import merge_lora as merge_lora_into
from hilore_jax.models.bundled import BUNDLED, bundled_file, cached_folder
from hilore_jax.models.config import DecoderConfig, LoraConfig
from hilore_jax.models.decoder import Decoder
from hilore_jax.models.gguf import open_gguf
from hilore_jax.models.gguf_hf import config_from_gguf, hf_tensors
from hilore_jax.models.params import from_params, to_params
from hilore_jax.models.tensors import LazyTensors


def load(
    path_or_name: str | Path,
    *,
    dtype: str = "float32",
    param_dtype: str | None = None,
    lora: LoraConfig | None = None,
    segments: tuple[int, ...] | None = None,
    seed: int = 0,
) -> Decoder:
    """Loads a pretrained decoder; names and shapes are checked before any data is read.

    Args:
        path_or_name: a name in `hilore_jax.models.bundled.BUNDLED`, a Hugging Face folder
            (``config.json`` and safetensors) or a ``.gguf`` file.
        dtype: compute dtype, "float32" or "bfloat16".
        param_dtype: storage dtype of the base weights; `dtype` where None.
        lora: adapters to add, freshly initialized.
        segments: lengths of the per-policy stacks of layers; one stack where None.
        seed: of the adapters.

    Returns:
        The decoder.

    Raises:
        FileNotFoundError: an unknown name or path (the message lists the names), a missing shard.
        ImportError: the package that a name or a quantized file needs is missing.
        ValueError: a file that is cut short, weights that do not fit the config (tensor, found and
            expected shape are named), an architecture or setting that is not supported.

    Example:
        >>> load("no-such-model")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        FileNotFoundError: no model 'no-such-model': it is neither a Hugging Face folder, nor ...
    """
    config, tensors = open_source(path_or_name)
    config = replace(config, dtype=dtype, param_dtype=param_dtype or dtype)
    model = to_params(tensors, config, segments=segments)
    return model if lora is None else add_lora(model, lora, rngs=nnx.Rngs(seed))


def open_source(path_or_name: str | Path) -> tuple[DecoderConfig, LazyTensors]:
    """The config and the checked, still unread tensors behind a name or path of `load`.

    Args:
        path_or_name: as for `load`.

    Returns:
        The config (float32) and the tensors, Hugging Face names, ``[out, in]``.

    Raises:
        FileNotFoundError, ImportError, ValueError: as for `load`.
    """
    if path_or_name in BUNDLED:
        path = cached_folder(bundled_file(str(path_or_name)), str(path_or_name))
    else:
        path = Path(path_or_name)
    if path.is_dir():
        config, tensors = shapes.from_folder(path), hf.open_folder(path)
    elif path.suffix == ".gguf":
        file = open_gguf(path)
        config, tensors = config_from_gguf(file), hf_tensors(file)
    else:
        raise FileNotFoundError(
            f"no model {str(path_or_name)!r}: it is neither a Hugging Face folder, nor a .gguf "
            f"file, nor one of the names {', '.join(BUNDLED)}"
        )
    hf.check(tensors, config)
    return config, tensors


def save_hf(
    model: Decoder,
    folder: str | Path,
    *,
    merge_lora: bool = False,
    dtype: str | None = None,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Writes a folder that `transformers` loads with the same logits.

    Args:
        model: the decoder, in any segments.
        folder: a new or empty folder.
        merge_lora: fold the adapters into the weights.
        dtype: dtype of the file, "float32", "bfloat16" or "float16"; the weights' own where None.
        max_shard_bytes: bytes of tensors a file.

    Raises:
        ValueError: the model has adapters and `merge_lora` is not set.
        FileExistsError: the folder holds a model already.
    """
    plain = merge_lora_into(model) if merge_lora else model
    tensors = from_params(plain)
    config = replace(plain.config, param_dtype=dtype or plain.config.param_dtype)
    hf.write_folder(
        folder,
        config,
        tensors,
        dtype=np.dtype(config.storage_dtype),
        max_shard_bytes=max_shard_bytes,
    )
