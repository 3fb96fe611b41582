"""Settings of a command from a TOML or JSON file."""

from __future__ import annotations

import dataclasses
import difflib
import json
import tomllib
import types
import typing
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from hilore_jax.planning.bounds import refuse_faults
from hilore_jax.planning.expect import shown

T = TypeVar("T")


def read_settings(path: str | Path, kind: type[T]) -> dict[str, Any]:
    """The settings in a file, checked against the fields of a settings class.

    Args:
        path: TOML, or JSON where the name ends in `.json`, such as a run's `config.json`. Names are
            the class's fields or the command's options (`micro_rows`, `micro-rows`).
        kind: the class.

    Returns:
        The settings by field name.

    Raises:
        FileNotFoundError: no such file.
        ValueError: it cannot be read, or a list of all that is wrong: unknown names with the
            nearest known ones, values of another type.

    Example:
        >>> import tempfile
        >>> from hilore_jax.training.config import TrainConfig
        >>> path = Path(tempfile.mkdtemp()) / "run.toml"
        >>> _ = path.write_text('task = "count"' + chr(10) + "micro-rows = 4")
        >>> read_settings(path, TrainConfig)
        {'task': 'count', 'micro_rows': 4}
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"--config {path}: no such file")
    try:
        text = path.read_text("utf-8")
        found = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (ValueError, OSError) as error:
        form = "JSON" if path.suffix == ".json" else "TOML"
        raise ValueError(f"--config {path} is not {form}: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"--config {path} is {shown(found)}, expected settings by name")
    hints = typing.get_type_hints(kind, include_extras=True)
    names = [field.name for field in dataclasses.fields(typing.cast(Any, kind))]
    settings: dict[str, Any] = {}
    faults = []
    for given, value in found.items():
        name = given.replace("-", "_")
        if name == "config":  # which file a run's own settings came from
            continue
        if name not in names:
            near = difflib.get_close_matches(name, names, 1, 0.5)
            hint = f"; the nearest is {near[0]}" if near else ""
            faults.append(f"{path}: there is no setting {given!r}{hint}")
        elif name in settings:
            faults.append(f"{path}: {name} is given twice")
        elif (fault := _fault(value, hints[name])) is not None:
            faults.append(f"{path}: {name} is {shown(value)}, expected {fault}")
        else:
            real = type(value) is int and _fault(0.5, hints[name]) is None
            settings[name] = float(value) if real else value  # 1 where a real number is meant
    refuse_faults(faults)
    return settings


def _fault(value: Any, hint: Any) -> str | None:
    """What was expected instead of a value; None where it fits."""
    if typing.get_origin(hint) is Annotated:
        hint = typing.get_args(hint)[0]
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        choices = [_fault(value, each) for each in typing.get_args(hint)]
        return None if None in choices else " or ".join(str(choice) for choice in choices)
    if typing.get_origin(hint) is Literal:
        words = typing.get_args(hint)
        return None if value in words else f"one of {', '.join(map(str, words))}"
    if hint is type(None):
        return None if value is None else "null"
    if hint is float:
        good = isinstance(value, int | float) and not isinstance(value, bool)
        return None if good else "a number"
    if hint is int:
        good = isinstance(value, int) and not isinstance(value, bool)
        return None if good else "a whole number"
    words = {bool: "true or false", str: "text"}
    return None if isinstance(value, hint) else words.get(hint, str(hint))
