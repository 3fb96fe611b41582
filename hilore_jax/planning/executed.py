"""Matmuls that an optimized program executes, read from the compiler's own text."""

import re

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+)\s*\(.*\{\s*$")
_CALLED = re.compile(r"(?:calls|to_apply|body|condition)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'known_trip_count"?:\{"?n"?:"?(\d+)')
_DOT = re.compile(r"= \S+ (?:dot|convolution|ragged-dot)\(")
_KERNEL = re.compile(r'custom_call_target="[^"]*(?:gemm|matmul|cublas|fmha|conv)', re.IGNORECASE)


def executed_matmuls(text: str | None) -> int:
    """How many matmuls a compiled program runs.

    A loop's body counts as often as the compiler knows it to run (once where it does not know), a
    branch at its most. Library calls for matmuls, convolutions and fused attention count as one.

    Args:
        text: `compiled.as_text()`, which some backends leave out.

    Raises:
        ValueError: the text has no entry computation.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> scan = lambda x: jax.lax.scan(lambda c, _: (jnp.sin(c @ x), None), x, length=5)[0]
        >>> executed_matmuls(jax.jit(scan).lower(jnp.ones((64, 64))).compile().as_text())
        5
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
    counts: dict[str, int] = {}

    def count(name: str) -> int:
        if name not in counts:
            counts[name] = sum(in_line(line) for line in bodies.get(name, ()))
        return counts[name]

    def in_line(line: str) -> int:
        if _DOT.search(line) or _KERNEL.search(line):
            return 1
        trips = int(match[1]) if (match := _TRIPS.search(line)) else 1
        total = sum(count(name) for name in _CALLED.findall(line)) * trips
        if match := _BRANCHES.search(line):
            total += max(count(name.strip().lstrip("%")) for name in match[1].split(","))
        return total

    return count(entry)
