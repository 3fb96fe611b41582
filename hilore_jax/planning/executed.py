"""Matmuls that an optimized program executes, read from the compiler's own text."""

import math
import re
from collections.abc import Iterable
from typing import NamedTuple

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+)\s*\(.*\{\s*$")
_CALLED = re.compile(r"(?:calls|to_apply|body|condition)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'known_trip_count"?:\{"?n"?:"?(\d+)')
_DOT = re.compile(r"= \S+ (?:dot|convolution|ragged-dot)\(")
# Fused attention is none of them: it is no matmul of a traced program either.
_KERNEL = re.compile(r'custom_call_target="[^"]*(?:gemm|matmul|cublas|conv)', re.IGNORECASE)
_DEFINED = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = \(?\w+\[([\d,]*)\]")
_FIRST_OPERAND = re.compile(r" (?:dot|custom-call)\((?:\w+\[\S* )?%?([\w.\-]+)")
_CONTRACTED = re.compile(r'lhs_contracting_dim(?:ension)?s"?[=:][{\[]([\d,"]*)[}\]]')


class Executed(NamedTuple):
    """Matmuls that a compiled program runs.

    Attributes:
        matmuls: how many. Compilers join some that read the same operand.
        flops: of all, a multiply-add counted as two; None where one of them does not show its own.
    """

    matmuls: int
    flops: int | None

    def times(self, n: int) -> "Executed":
        """Of n runs."""
        return Executed(n * self.matmuls, None if self.flops is None else n * self.flops)


def executed_matmuls(text: str | None) -> Executed:
    """The matmuls that a compiled program runs, and their FLOPs.

    A loop's body counts as often as the compiler knows it to run (once where it does not know), a
    branch at its most. Library calls for matmuls and convolutions count as one.

    Args:
        text: `compiled.as_text()`, which some backends leave out.

    Raises:
        ValueError: the text has no entry computation.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> scan = lambda x: jax.lax.scan(lambda c, _: (jnp.sin(c @ x), None), x, length=5)[0]
        >>> executed_matmuls(jax.jit(scan).lower(jnp.ones((64, 64))).compile().as_text())
        Executed(matmuls=5, flops=2621440)
    """
    bodies: dict[str, list[str]] = {}
    current: list[str] = []
    entry = None
    for line in (text or "").splitlines():
        if match := _COMPUTATION.match(line):
            current = bodies.setdefault(match[1], [])
            entry = match[1] if line.startswith("ENTRY") else entry
        else:
            current.append(line)
    if entry is None:
        raise ValueError("the text has no ENTRY computation: expected compiled.as_text().")
    counts: dict[str, Executed] = {}

    def count(name: str) -> Executed:
        if name not in counts:
            lines = bodies.get(name, [])
            shapes = {m[1]: _numbers(m[2]) for m in map(_DEFINED.match, lines) if m}
            counts[name] = _total(in_line(line, shapes) for line in lines)
        return counts[name]

    def in_line(line: str, shapes: dict[str, list[int]]) -> Executed:
        if _DOT.search(line) or _KERNEL.search(line):
            return Executed(1, _flops(line, shapes))
        trips = int(match[1]) if (match := _TRIPS.search(line)) else 1
        total = _total(count(name) for name in _CALLED.findall(line)).times(trips)
        if match := _BRANCHES.search(line):
            branches = [count(name.strip().lstrip("%")) for name in match[1].split(",")]
            total = _total((total, max(branches, key=lambda each: each.matmuls)))
        return total

    return count(entry)


def _total(parts: Iterable[Executed]) -> Executed:
    matmuls, flops = 0, 0
    for part in parts:
        matmuls += part.matmuls
        flops = None if flops is None or part.flops is None else flops + part.flops
    return Executed(matmuls, flops)


def _flops(line: str, shapes: dict[str, list[int]]) -> int | None:
    """Of a product, from its own shape and its first operand's; None of anything else."""
    made, operand = _DEFINED.match(line), _FIRST_OPERAND.search(line)
    contracted = _CONTRACTED.search(line)
    if not (made and operand and contracted) or operand[1] not in shapes:
        return None
    left = shapes[operand[1]]
    return 2 * math.prod(_numbers(made[2])) * math.prod(left[d] for d in _numbers(contracted[1]))


def _numbers(text: str) -> list[int]:
    return [int(n) for n in text.replace('"', "").split(",") if n]
