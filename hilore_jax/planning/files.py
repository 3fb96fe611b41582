"""The kinds of JSON files that this library writes, told apart by what they hold."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True)
class Kind:
    """One kind of file.

    Attributes:
        name: with its article, as errors call it.
        fields: sets of fields; a file that has all of one set is of this kind.
        takes: what to give such a file to.
        make: how to get one.
    """

    name: str
    fields: tuple[frozenset[str], ...]
    takes: str
    make: str


def _kind(name: str, fields: str, takes: str, make: str = "") -> Kind:
    sets = tuple(frozenset(each.split()) for each in fields.split(" | "))
    return Kind(name, sets, takes, make)


KINDS: dict[str, Kind] = {
    "plan": _kind(
        "a plan",
        "policies menu gc",
        "hilore accept, hilore train --plan, hilore plan --cost (a measured one), hilore explain",
        "hilore plan --out FILE writes one",
    ),
    "ladder": _kind(
        "a ladder of plans",
        "edges plans",
        "hilore accept, hilore train --ladder, hilore explain",
        "hilore plan --calibration CALIBRATION --ladder FILE writes one",
    ),
    "calibration": _kind(
        "a calibration",
        "measured norm exposures",
        "hilore plan --calibration, hilore explain",
        "hilore calibrate --out FILE writes one",
    ),
    "measurements": _kind(
        "the measurements of a calibration that is not finished",
        "identity norms rows",
        "the hilore calibrate that began it, which goes on from there",
        "remove it",
    ),
    "policy": _kind(
        "a policy",
        "schema actions",
        "hilore train --policy, hilore explain --policy",
        "Policy.to_json() is the text of one",
    ),
    "target": _kind(
        "a target", "platform flops | like", "hilore plan --target", "the README says what it holds"
    ),
    "model": _kind(
        "a model's config.json", "num_hidden_layers | architectures", "--model, as its folder"
    ),
    "record": _kind(
        "a record of exposures",
        "step sequences exposure",
        "hilore exposure, as its run folder",
        "hilore train --log-exposure-every 1 writes one an update",
    ),
    "settings": _kind(
        "the settings of a run", "run_dir policy updates", "hilore exposure, as its folder"
    ),
}


def kind_of(fields: Any) -> str | None:
    """The kind of a file from the JSON value that it holds, one of `KINDS`; None: none of ours.

    Example:
        >>> kind_of({"schema": 1, "edges": [1.0], "plans": []}), kind_of([1])
        ('ladder', None)
    """
    if not isinstance(fields, dict):
        return None
    found = (k for k, kind in KINDS.items() if any(each <= fields.keys() for each in kind.fields))
    return next(found, None)


def read(path: str | Path, kind: str, option: str = "") -> Any:
    """The JSON value of a file of one kind.

    Args:
        path: the file.
        kind: what is expected, one of `KINDS`.
        option: that named the file, such as `--plan`, for errors.

    Returns:
        What the file holds; a value of no kind that is known is returned too, for the kind's own
        reader to say what is missing.

    Raises:
        FileNotFoundError: no such file; says how to get one.
        OSError: a folder, or a file that may not be read.
        ValueError: no text, no JSON, or a file of another kind; says what takes that.

    Example:
        >>> read("none.json", "plan", "--plan")
        Traceback (most recent call last):
        ...
        FileNotFoundError: --plan none.json: no such file; hilore plan --out FILE writes one.
    """
    where = f"{option} {path}".strip()
    wanted = KINDS[kind]
    make = f"; {wanted.make}." if wanted.make else "."
    wrong = f"{where} is not a {kind} file"
    try:
        fields = json.loads(Path(path).read_bytes().decode())
    except FileNotFoundError:
        raise FileNotFoundError(f"{where}: no such file{make}") from None
    except OSError as error:
        raise OSError(f"{where} cannot be read: {error.strerror}{make}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{wrong}: it is no text ({error}){make}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{wrong}: it is no JSON, or was cut off ({error}){make}") from None
    check_kind(fields, kind, where)
    return fields


def kind_among(path: str | Path, kinds: Sequence[str]) -> str:
    """The kind of a file, of those that an option takes.

    Args:
        path: the file.
        kinds: some of `KINDS`.

    Returns:
        Its kind; the first one where it is of none of them or cannot be read, which is for the
        reader of that kind to say.

    Example:
        >>> kind_among("none.json", ("plan", "ladder"))
        'plan'
    """
    try:
        found = kind_of(json.loads(Path(path).read_bytes().decode()))
    except (OSError, ValueError, RecursionError):
        found = None
    return kinds[0] if found is None or found not in kinds else found


def check_kind(fields: Any, kind: str, where: str) -> None:
    """Refuses a file of another kind.

    Args:
        fields: what it holds.
        kind: what is expected, one of `KINDS`.
        where: what errors call it.

    Raises:
        ValueError: it is of another kind that is known; says what takes it.
    """
    found = kind_of(fields)
    if found is not None and found != kind:
        other, make = KINDS[found], KINDS[kind].make
        raise ValueError(
            f"{where} is not a {kind} file: it holds {other.name}, which is for {other.takes}"
            + (f"; {make}." if make else ".")
        )


def check_output(path: str | Path, option: str, kind: str | None = None) -> None:
    """Refuses a place where no file can be written, before the work whose result it is for.

    Args:
        path: the file to write.
        option: that named it, such as `--out`.
        kind: what will be written, one of `KINDS`; a file of another kind is then not replaced.

    Raises:
        ValueError: a folder, a file in no folder or in one that cannot be written, or a file of
            another kind.

    Example:
        >>> check_output("no/such/plan.json", "--out")
        Traceback (most recent call last):
        ...
        ValueError: --out no/such/plan.json: the folder no/such does not exist. Make it (mkdir -p
        no/such), or name another.
    """
    place, where = Path(path), f"{option} {path}".rstrip()
    if not str(path):
        raise ValueError(f"{option} is empty: name the file to write.")
    if place.is_dir():
        raise ValueError(f"{where} is a folder: name a file in it.")
    if not place.parent.exists():
        raise ValueError(
            f"{where}: the folder {place.parent} does not exist. Make it (mkdir -p "
            f"{place.parent}), or name another."
        )
    check_folder(place.parent, where)
    if kind is None or not place.exists():
        return
    try:
        found = kind_of(json.loads(place.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return
    if found not in (None, kind):
        raise ValueError(
            f"{where} would replace {KINDS[found].name} by {KINDS[kind].name}: name another file, "
            "or remove it."
        )


def check_folder(folder: str | Path, where: str) -> None:
    """Refuses a folder in which nothing can be written; one that is not there can be made.

    Args:
        folder: the folder.
        where: what errors call it.

    Raises:
        ValueError: it, or what it would be made in, is a file or may not be written.
    """
    place = Path(folder).absolute()
    while not os.path.lexists(place):
        place = place.parent
    if not place.is_dir():
        raise ValueError(f"{where}: {place} is a file, expected a folder. Name another.")
    if not os.access(place, os.W_OK | os.X_OK):
        raise ValueError(f"{where}: the folder {place} may not be written. Name another.")
