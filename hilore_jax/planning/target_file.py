"""A target of the user's, from a JSON file."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from hilore_jax.planning.budget import parse_bytes
from hilore_jax.planning.files import check_kind
from hilore_jax.planning.target import Target, known_targets, parse_target

_REQUIRED = ("platform", "memory", "flops", "bandwidth")
_OPTIONAL = ("name", "count", "link", "host_link", "description", "description_file")
_PREFIX = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_PREFIX |= {f"{p}i": 1024.0 ** (i + 1) for i, p in enumerate("KMGT")}
_RATE = re.compile(r"([0-9.]+(?:e[0-9]+)?)\s*([KMGTP]?i?)(B|FLOP|OP)/s", re.IGNORECASE)


def load_target(path: str | Path) -> Target:
    """Reads a target file.

    A JSON object with `platform` ("cpu", "cuda" or "tpu"), `memory` ("24GiB"), `flops` (dense peak
    by dtype, `{"bfloat16": "165TFLOP/s"}`), `bandwidth` ("1008GB/s"), and where they apply `count`
    (1), `link`, `host_link` ("32GB/s"), `name` (the file's), and what XLA compiles for: a
    `description` (text; a TPU slice's name) or a `description_file` beside the file (an XLA
    `GpuTargetConfigProto` as text). Or `like`, a known target whose fields these replace.
    Numbers without quotes are bytes, bytes/s and FLOP/s.

    Args:
        path: the file.

    Returns:
        The target, its `source` "file".

    Raises:
        ValueError: no JSON object, a field is missing, unknown, or without its unit.
        FileNotFoundError: no such file.

    Example:
        >>> import pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "half.json"
        >>> _ = path.write_text('{"like": "cuda:l40s-48", "memory": "24GiB"}')
        >>> load_target(path).memory // 2**30, load_target(path).name
        (24, 'half')
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(
            f"no target file {path}; targets known by name: {', '.join(known_targets())}."
        )
    try:
        fields = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"target file {path} is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"target file {path} holds a {type(fields).__name__}, not an object.")
    where = f"target file {path}"
    check_kind(fields, "target", str(path))
    base = _base(fields.pop("like", None), where)
    _check_names(fields, base, where)
    merged = base | fields
    return Target(
        name=str(merged.get("name", path.stem)),
        platform=_platform(merged["platform"], where),
        count=_count(merged.get("count", 1), where),
        memory=_memory(merged["memory"], where),
        flops=_flops(merged["flops"], where),
        bandwidth=_rate(merged["bandwidth"], f"{where}: 'bandwidth'", "B"),
        link=_rate(merged.get("link", 0), f"{where}: 'link'", "B", least=0.0),
        host_link=_rate(merged.get("host_link", 0), f"{where}: 'host_link'", "B", least=0.0),
        description=_description(merged, path),
        source="file",
    )


def _base(like: Any, where: str) -> dict[str, Any]:
    """The fields of the target that a file builds on."""
    if like is None:
        return {}
    if not isinstance(like, str):
        raise ValueError(f"{where}: 'like' is {like!r}, expected the name of a target.")
    target = parse_target(like)
    fields = ("platform", "count", "memory", "bandwidth", "link", "host_link", "description")
    return {name: getattr(target, name) for name in fields} | {"flops": dict(target.flops)}


def _check_names(fields: dict[str, Any], base: dict[str, Any], where: str) -> None:
    if missing := [name for name in _REQUIRED if name not in fields and name not in base]:
        raise ValueError(f"{where} lacks {missing}; it needs {list(_REQUIRED)} (or 'like').")
    known = (*_REQUIRED, *_OPTIONAL)
    if unknown := [name for name in fields if name not in known]:
        raise ValueError(f"{where} has unknown fields {unknown}; known: {[*known, 'like']}.")
    if "description" in fields and "description_file" in fields:
        raise ValueError(f"{where} has a 'description' and a 'description_file'; give one.")


def _platform(value: Any, where: str) -> str:
    if value not in ("cpu", "cuda", "tpu"):
        raise ValueError(f"{where}: 'platform' is {value!r}, expected 'cpu', 'cuda' or 'tpu'.")
    return value


def _count(value: Any, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{where}: 'count' is {value!r}, expected a whole number of devices.")
    return value


def _memory(value: Any, where: str) -> int:
    try:
        nbytes = parse_bytes(value)
    except ValueError:
        nbytes = 0
    if nbytes < 2**20:
        raise ValueError(
            f"{where}: 'memory' is {value!r}, expected a size with its unit, \"24GiB\", or a whole "
            "number of bytes."
        )
    return nbytes


def _flops(value: Any, where: str) -> tuple[tuple[str, float], ...]:
    if not isinstance(value, dict) or not value:
        raise ValueError(
            f"{where}: 'flops' is {value!r}, expected dense peaks by dtype, such as "
            '{"float32": "82TFLOP/s", "bfloat16": "165TFLOP/s"}.'
        )
    return tuple(
        (dtype, _rate(rate, f"{where}: 'flops' of {dtype}", "FLOP|OP"))
        for dtype, rate in value.items()
    )


def _rate(value: Any, what: str, unit: str, *, least: float = 1e6) -> float:
    """A rate a second, from a number or from text with its unit."""
    number = None
    if isinstance(value, int | float) and not isinstance(value, bool):
        number = float(value)
    elif isinstance(value, str) and (match := _RATE.fullmatch(value.strip())):
        prefix = {key.lower(): factor for key, factor in _PREFIX.items()}.get(match[2].lower())
        if prefix is not None and match[3].upper() in unit.split("|"):
            number = float(match[1]) * prefix
    if number is None or not least <= number < float("inf"):
        example = "1008GB/s" if unit == "B" else "165TFLOP/s"
        raise ValueError(
            f'{what} is {value!r}, expected text with its unit, "{example}", or a plain number '
            f"of {'bytes' if unit == 'B' else 'FLOP'} a second."
        )
    return number


def _description(fields: dict[str, Any], path: Path) -> str:
    if "description_file" in fields:
        beside = path.parent / str(fields["description_file"])
        if not beside.is_file():
            raise ValueError(f"target file {path}: no description file {beside}.")
        return beside.read_text()
    return str(fields.get("description", ""))
