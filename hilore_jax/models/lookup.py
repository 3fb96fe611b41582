"""The shape of a model as a person names it, for command lines."""

import dataclasses
from pathlib import Path
from typing import Any

from hilore_jax.models.config import DecoderConfig
from hilore_jax.models.gguf import open_gguf
from hilore_jax.models.gguf_hf import config_from_gguf
from hilore_jax.models.shapes import family, from_folder


def shape_of(model: str, **overrides: Any) -> DecoderConfig:
    """The shape of a model that a person names: a family, its instruct release, folder or file.

    Args:
        model: one of `FAMILIES`, with or without `-instruct`, a folder with a config.json, or a
            GGUF file.
        **overrides: fields of `DecoderConfig` to set otherwise.

    Returns:
        The config; no weights are needed.

    Raises:
        ValueError: an unknown family; lists those that are known.
        FileNotFoundError: a path where there is no model.

    Example:
        >>> shape_of("smollm2-135m-instruct") == shape_of("smollm2-135m")
        True
    """
    path = Path(model)
    if path.is_dir():
        return from_folder(model, **overrides)
    if path.suffix == ".gguf" and path.is_file():
        return dataclasses.replace(config_from_gguf(open_gguf(path)), **overrides)
    if path.suffix == ".gguf" or len(path.parts) > 1 or model.startswith((".", "~")):
        raise FileNotFoundError(
            f"no model {model!r}: it is neither a folder with a config.json, nor a .gguf file. "
            "Families known by name need neither, such as qwen2.5-3b."
        )
    return family(model.removesuffix("-instruct"), **overrides)
