"""A calibration's measurements, kept in a file so that an interruption loses one pass at most."""

import hashlib
import json
import logging
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hilore_jax.actions import Policy
from hilore_jax.planning.fields import Field, parsed
from hilore_jax.planning.fits import Row
from hilore_jax.planning.memory_cache import write_whole
from hilore_jax.planning.values import alike, content, sketch

_LOG = logging.getLogger("hilore_jax")

# How far the same program may come out elsewhere: a calibration can go on on another machine.
_EXPOSURE_DIGITS, _NORM_DIGITS = 1e-3, 1e-2


def check_record(path: str | Path, identity: str) -> None:
    """Refuses a file with measurements of another calibration, before there are microbatches.

    Args:
        path: the file; none is fine.
        identity: a hash of all that measurements depend on beside the microbatches' values.

    Raises:
        ValueError: another calibration's, damaged, or a file of another kind.
    """
    if Path(path).exists():
        _body(path, identity)


def _body(path: str | Path, identity: str) -> dict[str, Field]:
    file = parsed(path, "measurements", "Remove it.")
    body = file.value if isinstance(file.value, dict) else {}
    # Looked at first: a file of another version of this library may have other fields.
    if isinstance(body.get("identity"), str) and body["identity"] != identity:
        raise ValueError(
            f"{path} holds measurements of another calibration (its model, policies, passes, "
            "microbatches, seed, or the version of jax or hilore_jax differ). Give the settings of "
            "that one to go on with it, name another file, or remove it."
        )
    found = file.fields((*Subject._fields, "norms", "seconds", "rows"))
    found["identity"].text()
    return found


class Subject(NamedTuple):
    """What is measured.

    Attributes:
        identity: as for `check_record`.
        program: a hash of the traced gradient, with the constants in it.
        content: a hash of the parameters, the arguments, and what of the microbatches is no float.
        floats: `values.sketch` of each microbatch.
    """

    identity: str
    program: str
    content: str
    floats: list[list[list[float]]]


def subject(
    identity: str, program: str, params: Any, args: Any, microbatches: Sequence[Any]
) -> Subject:
    """What is measured, from its values.

    The microbatches' floats are compared but for rounding: an interrupted run samples them again,
    and a log-prob that is computed again, in another order of summation, differs in its last bits.
    Weights are read from a file or drawn from a key, and come out the same to the bit.
    """
    exact = [content(params), content(args), *(content(m, floats=False) for m in microbatches)]
    return Subject(identity, program, digest(exact), [sketch(m) for m in microbatches])


class Record:
    """Measurements, kept in a file where one is given.

    Args:
        path: the file, or None.
        about: what is measured; not needed without a file.
        began: when this call did, in seconds of `time.perf_counter`.

    Raises:
        ValueError: as `check_record`, or measurements of another loss or of other values.
    """

    def __init__(self, path: str | Path | None, about: Subject | None, began: float):
        self.rows: list[Row] = []
        self.norms: dict[str, float] = {}
        self._path, self._about = (None, None) if path is None else (Path(path), about)
        self._began, self._before = began, 0.0
        if self._path is None or about is None or not self._path.exists():
            return
        body = _body(self._path, about.identity)
        if body["program"].text() != about.program:
            raise ValueError(
                f"{path} holds measurements of another loss: its traced program, or an array that "
                "it captures, differs. Give the loss and the settings of that one to go on with "
                "it, name another file, or remove it."
            )
        floats = [[_numbers(leaf) for leaf in micro.items()] for micro in body["floats"].items()]
        same = len(floats) == len(about.floats) and all(map(alike, floats, about.floats))
        if body["content"].text() != about.content or not same:
            raise ValueError(
                f"{path} holds measurements of other weights, arguments of the loss or "
                "microbatches (the task or its sampling differs). Name another file, or remove it."
            )
        self.rows = [_read_row(row) for row in body["rows"].items()]
        norms = body["norms"]
        values = norms.value if isinstance(norms.value, dict) else norms.refuse("an object")
        self.norms = {name: norms.at(each, name).number() for name, each in values.items()}
        self._before = body["seconds"].number()

    @property
    def seconds(self) -> float:
        """What the measurements took, in this call and in those before it."""
        return self._before + time.perf_counter() - self._began

    def exact(self) -> Row | None:
        """The first exact gradient on record."""
        return next((row for row in self.rows if not row.chosen), None)

    def check(self, row: Row, exposure: float, norm: float) -> None:
        """Refuses measurements whose exact gradient does not come out again.

        Args:
            row: an exact gradient on record.
            exposure: of its microbatch, now.
            norm: of its gradient, now.

        Raises:
            ValueError: either is another number, beyond rounding: the loss is not the same.
        """
        same = math.isclose(exposure, row.exposure, rel_tol=_EXPOSURE_DIGITS)
        if not (same and math.isclose(norm, row.norm, rel_tol=_NORM_DIGITS)):
            raise ValueError(
                f"{self._path} holds an exact gradient of microbatch {row.micro} of norm "
                f"{row.norm:.6g} at exposure {row.exposure:.6g}; now they are {norm:.6g} and "
                f"{exposure:.6g}: the loss is another one. Name another file, or remove it."
            )

    def has(self, micro: int, index: Sequence[int]) -> bool:
        """Whether a microbatch was measured under a choice."""
        chosen = pairs_of(index)
        return any(row.micro == micro and row.chosen == chosen for row in self.rows)

    def add(self, row: Row) -> bool:
        """Keeps a measurement; False where it is known."""
        if any(old[:2] == row[:2] for old in self.rows):
            return False
        self.rows.append(row)
        self.write()
        return True

    def write(self) -> None:
        """Writes the file whole."""
        if self._path is not None and self._about is not None:
            body = {**self._about._asdict(), "norms": self.norms, "seconds": self.seconds}
            write_whole(self._path, json.dumps({**body, "rows": self.rows}) + "\n")


def _numbers(field: Field) -> list[float]:
    return [each.number(least=-math.inf) for each in field.items()]


def _read_row(row: Field) -> Row:
    fields = row.items()
    if len(fields) != 6:
        row.refuse("[microbatch, choices, exposure, distance, norm, errors]")
    micro, chosen, exposure, distance, norm, errors = fields
    pairs = [pair.pair("[block, policy]") for pair in chosen.items()]
    both = [pair.pair("[error, the paper's]") for pair in errors.items()]
    if len(both) != len(pairs):
        errors.refuse(f"one pair for each of {len(pairs)} choices")
    return Row(
        micro.whole(),
        tuple((block.whole(), entry.whole(1)) for block, entry in pairs),
        exposure.any_number(),
        distance.any_number(),
        norm.any_number(),
        tuple((own.any_number(), paper.any_number()) for own, paper in both),
    )


def pairs_of(index: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """The blocks that do not run exactly, and their entries."""
    return tuple((block, entry) for block, entry in enumerate(index) if entry)


def row_of(micro: int, index: Sequence[int], found: Any, entries: Sequence[Policy]) -> Row:
    """A pass's row; one that is not finite is logged with its blocks."""
    chosen = pairs_of(index)
    errors = tuple((float(found.errors[b, 0]), float(found.errors[b, 1])) for b, _ in chosen)
    if not (math.isfinite(found.distance) and np.all(np.isfinite(errors))):
        units = ", ".join(f"block {b} under {entries[e - 1]}" for b, e in chosen[:3])
        _LOG.warning(
            "the gradient of microbatch %d is not finite with %s%s: not to be used",
            micro,
            units,
            " and others" if len(chosen) > 3 else "",
        )
    return Row(micro, chosen, found.exposure, found.distance, found.norm, errors)


def digest(value: Any) -> str:
    """A hash of JSON values."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]
