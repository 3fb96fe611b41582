"""Fields of JSON files that the planner reads back: each checked, each error names it."""

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

from hilore_jax.actions import Policy
from hilore_jax.planning.files import read

T = TypeVar("T")
_SHOWN = 60  # characters of a found value in an error
_LARGEST = 2**63 - 1  # of whole numbers: JSON has longer ones, which no float holds


@dataclasses.dataclass(frozen=True)
class Field:
    """A value of a JSON file, and what errors about it say.

    Attributes:
        value: as JSON has it.
        file: the file's path, as it was given.
        kind: what the file holds, such as "plan".
        remedy: what to do about a damaged file, such as "Plan again.".
        where: the field's place in the file, such as `menu[3].risk`; "" for all of it.

    Example:
        >>> field = Field({"menu": [{"nbytes": -1}]}, "plan.json", "plan", "Plan again.")
        >>> field.fields(("menu",))["menu"].items()[0].fields(("nbytes",))["nbytes"].whole()
        Traceback (most recent call last):
        ValueError: plan.json is a damaged plan file: menu[0].nbytes is -1, expected a whole
        number, 0 or more. Plan again.
    """

    value: Any
    file: str | Path
    kind: str
    remedy: str
    where: str = ""

    def refuse(self, expected: str) -> NoReturn:
        """Raises the error of a value that is not what it should be."""
        self.damaged(f"{self.where or 'all of it'} is {_shown(self.value)}, expected {expected}")

    def damaged(self, what: str) -> NoReturn:
        """Raises the error of a file with which something is wrong."""
        raise ValueError(f"{self.file} is a damaged {self.kind} file: {what}. {self.remedy}")

    def at(self, value: Any, place: str) -> "Field":
        """A part of this value."""
        joined = place if place.startswith("[") or not self.where else f".{place}"
        return dataclasses.replace(self, value=value, where=self.where + joined)

    def fields(self, names: Sequence[str], optional: Sequence[str] = ()) -> dict[str, "Field"]:
        """The fields of an object: all of `names`, and those of `optional` that are there."""
        if not isinstance(self.value, dict):
            self.refuse(f"an object with the fields {', '.join(names)}")
        inside = f" of {self.where}" if self.where else ""
        if missing := [name for name in names if name not in self.value]:
            self.damaged(f"the field {missing[0]}{inside} is missing")
        if unknown := [name for name in self.value if name not in (*names, *optional)]:
            self.damaged(f"the field {unknown[0]}{inside} is unknown")
        return {name: self.at(value, name) for name, value in self.value.items()}

    def items(self, least: int = 0) -> list["Field"]:
        """The elements of a list with at least so many."""
        if not isinstance(self.value, list):
            self.refuse("a list")
        if len(self.value) < least:
            self.refuse(f"a list of {least} or more")
        return [self.at(value, f"[{i}]") for i, value in enumerate(self.value)]

    def whole(self, least: int = 0, most: int = _LARGEST) -> int:
        """A whole number between bounds, which 64 bits hold."""
        if type(self.value) is not int or self.value < least:
            self.refuse(f"a whole number, {least} or more")
        if self.value > most:
            self.refuse(f"a whole number, {most} or less")
        return self.value

    def number(self, least: float = 0.0, above: float = -math.inf, most: float = math.inf) -> float:
        """A finite number between bounds."""
        good = self._is_number() and math.isfinite(self.value)
        if not good or not (self.value >= least and above < self.value <= most):
            bounds = [f"of {least:g} or more"] * (least > -math.inf and least > above)
            bounds += [f"above {above:g}"] * (above >= least)
            bounds += [f"of at most {most:g}"] * (most < math.inf)
            self.refuse(f"a finite number {' and '.join(bounds)}".rstrip())
        return float(self.value)

    def any_number(self) -> float:
        """A number, whichever: not finite too."""
        if not self._is_number():
            self.refuse("a number")
        return float(self.value)

    def number_or_inf(self) -> float:
        """A number of 0 or more, or infinity in Python's spelling of it."""
        return math.inf if self.value == math.inf else self.number()

    def _is_number(self) -> bool:
        kind = type(self.value)
        return kind is float or (kind is int and abs(self.value) <= _LARGEST)

    def number_or_infinity(self) -> float:
        """A number of 0 or more, or null, which stands for infinity: JSON has no word for it."""
        return math.inf if self.value is None else self.number()

    def text(self, among: Sequence[str] = ()) -> str:
        """A text, not empty, or one of some."""
        if not isinstance(self.value, str) or not self.value or (among and self.value not in among):
            self.refuse(f"one of {', '.join(among)}" if among else "a text")
        return self.value

    def any_text(self) -> str:
        """A text, which may be empty."""
        if not isinstance(self.value, str):
            self.refuse("a text")
        return self.value

    def flag(self) -> bool:
        """True or false."""
        if not isinstance(self.value, bool):
            self.refuse("true or false")
        return self.value

    def texts(self) -> dict[str, str]:
        """An object of texts."""
        if not isinstance(self.value, dict):
            self.refuse("an object of texts")
        wrong = [name for name, value in self.value.items() if not isinstance(value, str)]
        if wrong:
            self.at(self.value[wrong[0]], wrong[0]).refuse("a text")
        return dict(self.value)

    def policy(self) -> Policy:
        """A policy as `Policy.to_json` writes it."""
        try:
            return Policy.from_json(json.dumps(self.value))
        except (ValueError, TypeError) as error:
            self.damaged(f"{self.where} is {_shown(self.value)}, {error}".rstrip("."))

    def maybe(self, read: "Callable[[Field], T]") -> "T | None":
        """None where the value is null, or what `read` makes of it."""
        return None if self.value is None else read(self)

    def pair(self, expected: str) -> tuple["Field", "Field"]:
        """A list of two."""
        if not isinstance(self.value, list) or len(self.value) != 2:
            self.refuse(expected)
        first, second = self.items()
        return first, second

    def made(self, make: Callable[..., T], **values: Any) -> T:
        """What `make` makes of values that were read here, by name; its own checks count too."""
        try:
            return make(**values)
        except ValueError as error:
            self.damaged(f"{error}".rstrip("."))


class Format(NamedTuple):
    """What is known of a kind of file before its fields are read.

    Attributes:
        kind: what it holds, such as "plan".
        schemas: those that this library reads, ascending.
        again: what makes such a file anew, such as "plan again".
        marks: fields that tell such a file from others that have a schema.
    """

    kind: str
    schemas: tuple[int, ...]
    again: str
    marks: tuple[str, ...]


def read_json(path: str | Path, form: Format) -> tuple[int, Field]:
    """A JSON file of a known schema.

    Args:
        path: the file.
        form: what it should be.

    Returns:
        The schema, and the file's object without it.

    Raises:
        OSError: it cannot be read.
        ValueError: no JSON, no object with a schema, or another schema; says which, and the remedy.
    """
    remedy = form.again[0].upper() + form.again[1:] + "."
    return checked_schema(parsed(path, form.kind, remedy), form)


def parsed(path: str | Path, kind: str, remedy: str) -> Field:
    """A JSON file, whatever is in it; see `read_json`."""
    return Field(read(path, kind), path, kind, remedy)


def checked_schema(field: Field, form: Format) -> tuple[int, Field]:
    """An object's schema, which must be a known one, and the rest; see `read_json`."""
    value, path, kind = field.value, field.file, field.kind
    inside = f" in {field.where}" if field.where else ""
    fault = None
    if not isinstance(value, dict):
        fault = f"expected an object{inside}, found {_shown(value)}"
    elif not any(mark in value for mark in form.marks):
        fault = f"it has none of the fields {', '.join(form.marks)}{inside}"
    elif "schema" not in value:
        fault = f"the field schema is missing{inside}"
    if fault:
        raise ValueError(f"{path} is not a {kind} file: {fault}. {field.remedy}")
    schema = value["schema"]
    if type(schema) is not int or schema not in form.schemas:
        newer = type(schema) is int and schema > form.schemas[-1]
        raise ValueError(
            f"{path} has {kind} schema {_shown(schema)}{inside}, this hilore_jax reads "
            f"{', '.join(map(str, form.schemas))}: "
            + ("install a newer hilore_jax." if newer else f"{form.again}.")
        )
    rest = {name: part for name, part in value.items() if name != "schema"}
    return schema, dataclasses.replace(field, value=rest)


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 4] + " ..."
