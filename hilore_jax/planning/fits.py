"""Fits of a calibration's measurements: kappa by policy and block, and how well risks add up."""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hilore_jax.actions import Policy
from hilore_jax.planning.calibration import Measured


class Row(NamedTuple):
    """One gradient that was computed.

    `chosen` are `(block, entry)` pairs, entries counted from 1; none of them: the exact gradient.
    `errors` belong to them: e, and the paper's.
    """

    micro: int
    chosen: tuple[tuple[int, int], ...]
    exposure: float
    distance: float  # ||g_L - g||
    norm: float  # ||g_L||, of the exact rows ||g||
    errors: tuple[tuple[float, float], ...]


def fitted(
    rows: Sequence[Row], entries: Sequence[Policy], form: str = "squared"
) -> tuple[Measured, ...]:
    """Fits kappa through the origin, for each policy and block that were tried alone.

        kappa = max(0, sum x y / sum x x),  x = E e,  y = d;  the paper's y = d / ||g||

    Errors also have a factor of their microbatch that exposure does not know (`factors`); where
    enough was measured to tell, y is divided by it, or a unit measured on one microbatch only would
    take on that one's. The standard error of kappa comes from the residuals where a unit was
    measured more than once; where only once, from those of `log kappa = policy + block` over all
    units, as a share.

    Args:
        rows: measurements.
        entries: the policies.
        form: "squared" or "paper".

    Returns:
        Fits in order of policies, then blocks.
    """
    own = factors(rows, form)
    units: dict[tuple[int, int], list[tuple[float, float, float]]] = {}
    for row, x, y in _alone(rows, form):
        ((block, entry),) = row.chosen
        point = x, y / own.get(row.micro, 1.0), row.errors[0][form == "paper"]
        units.setdefault((entry, block), []).append(point)
    kappas = {unit: kappa(points) for unit, points in units.items()}
    spread = additive_spread(kappas)
    found = []
    for (entry, block), points in sorted(units.items()):
        value = kappas[entry, block]
        error = standard_error(value, points) if len(points) > 1 else spread * value
        mean = statistics.fmean(e for *_, e in points)
        found.append(Measured(entries[entry - 1], block, value, error, mean, len(points)))
    return tuple(found)


def factors(rows: Sequence[Row], form: str = "squared") -> dict[int, float]:
    """What each microbatch's errors are, as a multiple of what its exposure says.

    Least squares of `log(y / x) = policy + block + microbatch` over all units tried alone, scaled
    so that `sum_m (E_m f_m)^2 = sum_m E_m^2`: an update's squared error is then the predicted one.

    Returns:
        The factors; empty where fewer than twice as many units were tried as there are unknowns.

    Example:
        >>> rows = [
        ...     Row(m, ((b, p),), 1.0, (1.0 + 2 * m) * (b + 1) * p, 1.0, ((1.0, 1.0),))
        ...     for m in range(3)
        ...     for b in range(3)
        ...     for p in (1, 2)
        ... ]
        >>> {m: round(f / factors(rows)[0], 3) for m, f in factors(rows).items()}
        {0: 1.0, 1: 3.0, 2: 5.0}
    """
    points = [
        ((f"policy {row.chosen[0][1]}", f"block {row.chosen[0][0]}", row.micro), math.log(y / x))
        for row, x, y in _alone(rows, form)
        if 0 < x < math.inf and 0 < y < math.inf
    ]
    unknowns = sorted({key for keys, _ in points for key in keys}, key=str)
    if not points or len(points) < 2 * len(unknowns):
        return {}
    matrix = np.zeros((len(points), len(unknowns)))
    for i, (keys, _) in enumerate(points):
        matrix[i, [unknowns.index(key) for key in keys]] = 1
    found = np.linalg.lstsq(matrix, np.array([y for _, y in points]), rcond=None)[0]
    logs = {key: float(v) for key, v in zip(unknowns, found, strict=True) if isinstance(key, int)}
    squares = {row.micro: row.exposure**2 for row in rows if row.micro in logs}
    total = math.fsum(squares[m] * math.exp(2 * logs[m]) for m in logs)
    scale = math.sqrt(math.fsum(squares.values()) / total)
    return {m: math.exp(v) * scale for m, v in sorted(logs.items())}


def _alone(rows: Sequence[Row], form: str) -> list[tuple[Row, float, float]]:
    """The rows of one unit alone, with their x and y."""
    paper = form == "paper"
    norms = {row.micro: row.norm for row in rows if not row.chosen}
    return [
        (
            row,
            row.exposure * row.errors[0][paper],
            row.distance / norms[row.micro] if paper else row.distance,
        )
        for row in rows
        if len(row.chosen) == 1
    ]


def kappa(points: Sequence[tuple[float, ...]]) -> float:
    """The slope through the origin, not below 0; infinite where a point is not finite.

    Example:
        >>> kappa([(1.0, 2.0), (2.0, 5.0)]), kappa([(0.0, 1.0)])
        (2.4, inf)
    """
    if not all(math.isfinite(x) and math.isfinite(y) for x, y, *_ in points):
        return math.inf
    across = math.fsum(x * y for x, y, *_ in points)
    square = math.fsum(x * x for x, *_ in points)
    if square == 0:
        return math.inf if any(y for _, y, *_ in points) else 0.0
    return max(0.0, across / square)


def standard_error(slope: float, points: Sequence[tuple[float, ...]]) -> float:
    """Standard error of a slope through the origin, `sqrt(sum r^2 / (n - 1) / sum x^2)`.

    Example:
        >>> round(standard_error(2.4, [(1.0, 2.0), (2.0, 5.0)]), 6)
        0.2
    """
    square = math.fsum(x * x for x, *_ in points)
    if len(points) < 2 or not math.isfinite(slope) or square == 0:
        return math.inf
    left = math.fsum((y - slope * x) ** 2 for x, y, *_ in points)
    return math.sqrt(left / (len(points) - 1) / square)


def additive_spread(kappas: dict[tuple[int, int], float]) -> float:
    """Residual standard deviation of `log kappa = policy + block`: a share of kappa.

    Infinite where no degree of freedom is left.

    Example:
        >>> additive_spread({(1, 0): 1.0, (1, 1): 2.0, (2, 0): 3.0, (2, 1): 6.0}) < 1e-12
        True
    """
    logs = {unit: math.log(k) for unit, k in kappas.items() if 0 < k < math.inf}
    policies, blocks = {p for p, _ in logs}, {b for _, b in logs}
    freedom = len(logs) - len(policies) - len(blocks) + 1
    if freedom < 1:
        return math.inf
    by_policy, by_block = dict.fromkeys(policies, 0.0), dict.fromkeys(blocks, 0.0)
    for _ in range(50):  # alternating means; one round suffices where no unit is missing
        for p in policies:
            of = [y - by_block[b] for (q, b), y in logs.items() if q == p]
            by_policy[p] = statistics.fmean(of)
        for b in blocks:
            of = [y - by_policy[p] for (p, c), y in logs.items() if c == b]
            by_block[b] = statistics.fmean(of)
    left = math.fsum((y - by_policy[p] - by_block[b]) ** 2 for (p, b), y in logs.items())
    return math.sqrt(left / freedom)


def joint_bias(
    rows: Sequence[Row],
    measured: Sequence[Measured],
    entries: Sequence[Policy],
    form: str = "squared",
) -> tuple[float, tuple[tuple[float, float], ...]]:
    """How the error of many blocks together compares with what their fits predict.

        predicted = f sqrt(sum_b (kappa_b e_b E)^2);  the paper's: their sum, against d / ||g||

    with f the microbatch's own factor (`factors`), where enough was measured to tell.

    Returns:
        The slope of measured over predicted errors through the origin, 1.0 where none was tried,
        and the pairs of predicted and measured.
    """
    norms = {row.micro: row.norm for row in rows if not row.chosen}
    own = factors(rows, form)
    fits = {(m.policy, m.block): m.kappa * m.error for m in measured}
    pairs = []
    for row in rows:
        if len(row.chosen) < 2:
            continue
        parts = [row.exposure * fits[entries[entry - 1], block] for block, entry in row.chosen]
        predicted = math.fsum(parts) if form == "paper" else math.hypot(*parts)
        predicted *= own.get(row.micro, 1.0)
        found = row.distance / norms[row.micro] if form == "paper" else row.distance
        if math.isfinite(predicted) and math.isfinite(found):
            pairs.append((predicted, found))
    return (kappa(pairs) if pairs else 1.0), tuple(pairs)
