"""Budgets: bytes in people's spelling, and a bound on the gradient's relative error."""

import dataclasses
import math
import re
from collections.abc import Callable

from hilore_jax.planning import expect

_UNITS = {"B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12} | {
    f"{letter}iB": 2 ** (10 * (i + 1)) for i, letter in enumerate("KMGT")
}
_LARGEST = 2**63 - 1  # bytes: what 64 bits hold
_NUMBER = r"((?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[0-9]+)?)"
_BYTES = re.compile(_NUMBER + r"\s*([KMGT]?i?B)", re.IGNORECASE)
_RELATIVE = re.compile(_NUMBER + r"\s*x[\s-]*gc", re.IGNORECASE)
_BY_LOWER = {name.lower(): factor for name, factor in _UNITS.items()}


@dataclasses.dataclass(frozen=True)
class Budget:
    """What a plan may use.

    Attributes:
        memory: peak bytes a device: a number of bytes, `"46GiB"`, or `"1.10x gc"`, a multiple of
            the compiled peak of the update with every block recomputed.
        risk: R, bound on the relative error of the update's whole gradient (HiLoRe's risk budget;
            methods 1.6). 0 admits no compression.
        baseline: another update `(policies, state, batch)` whose peak with every block recomputed
            `"1.10x gc"` refers to, such as one with whole logits. None: the planned update.

    Example:
        >>> import hilore_jax as hl
        >>> hl.Budget("1.10x gc", risk=0.01).times_gc, hl.Budget("46GiB").nbytes
        (1.1, 49392123904)
    """

    memory: int | str
    risk: float = 0.015
    baseline: Callable | None = None

    def __post_init__(self) -> None:
        if self.times_gc is None:
            parse_bytes(self.memory)
        if not expect.is_number(self.risk):
            expect.refuse("Budget(risk=...)", self.risk, "a relative error of 0 or more")
        if not self.risk >= 0:
            raise ValueError(f"Budget(risk={self.risk!r}): expected a relative error of 0 or more.")
        if self.baseline is not None:
            update = "another update(policies, *args) -> (state, metrics), or None"
            expect.function("Budget(baseline=...)", self.baseline, update)
        if self.baseline is not None and self.times_gc is None:
            raise ValueError(
                f"Budget(memory={self.memory!r}) is absolute, so that its baseline is not used; "
                'give memory as "1.10x gc", or leave the baseline out.'
            )

    @property
    def times_gc(self) -> float | None:
        """The factor of a relative memory budget, or None."""
        match = _RELATIVE.fullmatch(self.memory.strip()) if isinstance(self.memory, str) else None
        return float(match[1]) if match and 0 < float(match[1]) < math.inf else None

    @property
    def nbytes(self) -> int:
        """The bytes of an absolute memory budget."""
        return parse_bytes(self.memory)


def parse_bytes(text: int | str) -> int:
    """Bytes from a number or from text with a unit.

    Raises:
        ValueError: not a size, or a number in text without its unit.

    Example:
        >>> parse_bytes("1.5 KiB"), parse_bytes(10)
        (1536, 10)
    """
    accepted = 'expected bytes as a whole number, "46GiB" or "48GB", or "1.10x gc".'
    if isinstance(text, int) and not isinstance(text, bool):
        if not 0 < text <= _LARGEST:
            raise ValueError(f"a memory budget of {expect.shown(text)} bytes: {accepted}")
        return text
    match = _BYTES.fullmatch(text.strip()) if isinstance(text, str) else None
    if match and 1 <= (found := float(match[1]) * _BY_LOWER[match[2].lower()]) < _LARGEST:
        return int(found)
    if isinstance(text, str) and re.fullmatch(_NUMBER, text.strip()):
        raise ValueError(f'memory budget "{text}" has no unit (GiB, GB, ...): {accepted}')
    raise ValueError(f"memory budget {text!r} is not a size: {accepted}")
