"""Bounds of the numbers among a command's settings: every fault at once, before any other work."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from hilore_jax.planning import expect

WHOLE = 2**31 - 1  # the most: int32, which counts and positions on the device have
SEED = (
    2**32 - 1
)  # the most: `jax.random.key` reads 32 bits, a longer seed would be another's stream
RANK = 2**16  # the most: wider than any model
REAL = 3.4e38  # the most: float32, in which the device computes


@dataclasses.dataclass(frozen=True)
class Whole:
    """A whole number.

    Attributes:
        least: the smallest that is allowed.
        most: the largest.
        why: what is said of the smallest, for errors.
        optional: None is allowed too.
    """

    least: int = 1
    most: int = WHOLE
    why: str = ""
    optional: bool = False

    def fault(self, name: str, value: Any) -> str:
        """What is wrong with a value, in a sentence; empty: nothing."""
        if not expect.is_whole(value):
            return f"{name} must be a whole number, found {expect.shown(value)}"
        if value < self.least:
            why = f" ({self.why})" if self.why else ""
            return f"{name} must be >= {self.least}{why}, found {expect.shown(value)}"
        if value > self.most:
            return f"{name} must be <= {self.most}, found {expect.shown(value)}"
        return ""


@dataclasses.dataclass(frozen=True)
class Real:
    """A real number, 0 or more.

    Attributes:
        positive: 0 is not allowed.
        infinite: infinity is allowed.
        optional: None is allowed too.
    """

    positive: bool = False
    infinite: bool = False
    optional: bool = False

    def fault(self, name: str, value: Any) -> str:
        """What is wrong with a value, in a sentence; empty: nothing."""
        if not expect.is_number(value):
            return f"{name} must be a number, found {expect.shown(value)}"
        if value == math.inf and self.infinite:
            return ""
        inside = value > 0 if self.positive else value >= 0
        if not inside or value == math.inf:
            finite = "" if self.infinite else "finite and "
            return f"{name} must be {finite}{'>' if self.positive else '>='} 0, found {value}"
        if value > REAL:
            return f"{name} must be <= {REAL:g}, found {expect.shown(value)}"
        return ""


def number_faults(config: Any, bounds: dict[str, Whole | Real] | None = None) -> dict[str, str]:
    """What is wrong with the numbers of some settings.

    Args:
        config: the settings.
        bounds: of some of them, by name; None: those of the settings' class, `config.BOUNDS`.

    Returns:
        A sentence for each that is out of its bounds, by name.

    Example:
        >>> import types
        >>> config = types.SimpleNamespace(rows=0, beta=float("nan"), turns=3)
        >>> list(
        ...     number_faults(config, {"rows": Whole(), "beta": Real(), "turns": Whole()}).values()
        ... )
        ['rows must be >= 1, found 0', 'beta must be finite and >= 0, found nan']
    """
    found = {}
    for name, bound in (config.BOUNDS if bounds is None else bounds).items():
        value = getattr(config, name)
        if not (value is None and bound.optional) and (fault := bound.fault(name, value)):
            found[name] = fault
    return found


def refuse_faults(faults: Sequence[str]) -> None:
    """Raises one error that lists all faults, if there are any.

    Raises:
        ValueError: the faults, a line each.
    """
    if faults:
        raise ValueError(
            f"{len(faults)} fault{'s' * (len(faults) > 1)} in the settings:\n"
            + "\n".join(f"  - {fault}" for fault in faults)
        )


def divisors(number: int, near: int, most: int = 16) -> list[int]:
    """The divisors of a number that are nearest to another one, ascending.

    Example:
        >>> divisors(32, near=5), divisors(2**30, near=8, most=3)
        ([1, 2, 4, 8, 16, 32], [2, 4, 8])
    """
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    found = {*small, *(number // n for n in small)}
    return sorted(sorted(found, key=lambda n: (abs(n - near), n))[:most])
