"""The shape of a model as a person names it, for command lines."""

from pathlib import Path
from typing import Any

from hilore_jax.models.config import DecoderConfig
from hilore_jax.models.shapes import family, from_folder


def shape_of(model: str, **overrides: Any) -> DecoderConfig:
    """The shape of a model that a person names: a family, its instruct release, or a folder.

    Args:
        model: one of `FAMILIES`, with or without `-instruct`, or a folder with a config.json.
        **overrides: fields of `DecoderConfig` to set otherwise.

    Returns:
        The config; no weights are needed.

    Example:
        >>> shape_of("smollm2-135m-instruct") == shape_of("smollm2-135m")
        True
    """
    if Path(model).is_dir():
        return from_folder(model, **overrides)
    return family(model.removesuffix("-instruct"), **overrides)
