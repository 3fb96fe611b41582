"""Cells of a plan's table: actions as letters, numbers in the unit that suits their column."""

import math
from collections.abc import Container, Iterable, Sequence

from hilore_jax.actions import Action, Compress, Offload, Policy, Recompute, Store

_SHORT = {"int8": "i8", "int4": "i4", "fp8_e4m3": "f8", "fp8_e5m2": "f8e5"}
BYTES = tuple((f"{prefix}B", 2.0 ** (10 * i)) for i, prefix in enumerate(("", "Ki", "Mi", "Gi")))
SECONDS = (("ns", 1e-9), ("µs", 1e-6), ("ms", 1e-3), ("s", 1.0))
FLOPS = (("FLOP", 1.0), ("MFLOP", 1e6), ("GFLOP", 1e9), ("TFLOP", 1e12))

Units = tuple[tuple[str, float], ...]


def column(
    values: Sequence[float | int], units: Units, total: float | int
) -> tuple[str, list[str]]:
    """Numbers of one column and their sum below, in a unit that suits both.

    Args:
        values: in bytes, seconds, ...
        units: names and sizes, ascending.
        total: what stands below.

    Returns:
        The unit; the numbers and the total, with the decimals that give the largest number three
        digits.

    Example:
        >>> column([0.0, 0.00025, 0.0005], SECONDS, total=0.1)
        ('ms', ['0', '0.250', '0.500', '100.000'])
    """
    most = max(map(abs, values), default=0.0)
    both = math.sqrt(most * abs(total))
    unit, size = next(((u, s) for u, s in reversed(units) if both >= s), units[0])
    decimals = _decimals(most / size) if unit not in ("B", "FLOP") else 0
    return unit, [f"{v / size:.{decimals}f}" if v else "0" for v in (*values, total)]


def _decimals(value: float) -> int:
    """As many as give three digits, one at least."""
    return min(max(2 - math.floor(math.log10(value)), 1), 4) if value else 0


def format_seconds(seconds: float) -> str:
    """Seconds for people.

    Example:
        >>> format_seconds(0.01254), format_seconds(0.000125), format_seconds(3e-6)
        ('12.5 ms', '0.125 ms', '3.00 µs')
    """
    value = abs(seconds)
    unit, size = next(((u, s) for u, s in reversed(SECONDS) if value >= 0.1 * s), SECONDS[0])
    return f"{seconds / size:.{_decimals(value / size)}f} {unit}"


def letter(action: Action) -> str:
    """An action in a table's cell; `legend` says what it means.

    Example:
        >>> letter(Store()), letter(Recompute()), letter(Compress("int8", axis=1, tile=32))
        ('H', 'R', 'i8/32@1')
        >>> letter(Compress("int8", axis=-1, tile=128))
        'i8'
    """
    if isinstance(action, Store):
        return "H"
    if isinstance(action, Recompute):
        return "R"
    if isinstance(action, Offload):
        return "O"
    tile = {None: "/all", 128: ""}.get(action.tile, f"/{action.tile}")
    axis = "" if action.axis == -1 else f"@{action.axis}"
    return _SHORT.get(_codec(action), _codec(action)) + tile + axis


def legend(policies: Iterable[Policy]) -> list[str]:
    """What the letters of these policies mean.

    Example:
        >>> for words in legend([Policy({"k": Compress("int8", axis=1, tile=32)})]):
        ...     print(words)
        R recomputed
        i8/32@1 kept as int8 with a scale for 32 values of axis 1
    """
    actions = {action for policy in policies for _, action in policy.actions}
    kinds = {type(action) for action in actions}
    found = ["H kept exactly"] * (Store in kinds) + ["R recomputed"]
    found += ["O kept in host memory"] * (Offload in kinds)
    compressed = {letter(a): a for a in actions if isinstance(a, Compress)}
    return found + [f"{text} {_words(compressed[text])}" for text in sorted(compressed)]


def _words(action: Compress) -> str:
    along = "the last axis" if action.axis == -1 else f"axis {action.axis}"
    kept = f"kept as {_codec(action)}"
    if action.tile == 0:
        return f"{kept} without a scale"
    return f"{kept} with a scale for {action.tile or 'all'} values of {along}"


def _codec(action: Compress) -> str:
    return action.codec if isinstance(action.codec, str) else action.codec.name


def aligned(rows: Sequence[Sequence[str]], left: Container[int] = (0,)) -> list[str]:
    """Rows of cells as lines, columns two blanks apart; those in `left` end ragged, others flush.

    Example:
        >>> aligned([("a", "b"), ("cc", "100")])
        ['a     b', 'cc  100']
    """
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
