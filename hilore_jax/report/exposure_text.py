"""A run's exposures as text: tables, and sequences with their tokens in heat."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from hilore_jax.report.run_folder import ExploredRun, heat_of, visible

_BARS = " ▁▂▃▄▅▆▇█"
# From white through yellow to red, of the 256 terminal colours; the text on them is black.
_COLOURS = (231, 230, 229, 222, 215, 209, 203, 196)


def exposure_text(
    run: ExploredRun, *, by: str = "state", top: int = 5, colour: bool = False, width: int = 100
) -> str:
    """Everything that a terminal shows of a run's exposures.

    Args:
        run: from `explore`.
        by: what the heat of a token is, see `heat_of`.
        top: most exposed sequences to show.
        colour: tokens coloured; else a line of bars below them.
        width: columns.
    """
    record = run.record
    total = sum(record.exposure)
    parts = [
        f"{run.folder}: {len(run.metrics)} updates ({run.title}); sequences recorded of "
        f"{_listed(run.recorded)}; shown is update {record.step}",
        f"exposure {total:.4g} of {sum(record.tokens)} optimized tokens",
        _groups(run),
        _microbatches(run),
        _risks(run),
        _sequences(run, by, top, colour, width),
    ]
    return "\n\n".join(part for part in parts if part)


def heat_lines(
    pieces: Sequence[str], heat: Float[np.ndarray, "tokens"], *, colour: bool, width: int
) -> list[str]:
    """A sequence's text in lines, each token as hot as it is.

    Args:
        pieces: text of each token, without line breaks.
        heat: 0 to 1.
        colour: tokens coloured; else each line is followed by one of bars.
        width: columns.

    Example:
        >>> print(
        ...     *heat_lines(["two", " by"], np.array([1.0, 0.1]), colour=False, width=20),
        ...     sep=chr(10),
        ... )
        two by
        ███▁▁▁
    """
    lines: list[tuple[str, str]] = [("", "")]
    used = 0
    for piece, hot in zip(pieces, heat, strict=True):
        columns = sum(1 + (unicodedata.east_asian_width(c) in "WF") for c in piece)
        if used and used + columns > width:
            lines.append(("", ""))
            used = 0
        level = float(np.clip(hot, 0, 1)) if np.isfinite(hot) else 0.0
        text, bars = lines[-1]
        if colour:
            shade = _COLOURS[round(level * (len(_COLOURS) - 1))]
            piece = f"\x1b[38;5;16m\x1b[48;5;{shade}m{piece}\x1b[0m"
        bar = _BARS[int(np.ceil(level * (len(_BARS) - 1)))]
        lines[-1] = text + piece, bars + columns * bar
        used += columns
    if colour:
        return [text for text, _ in lines]
    return [line.rstrip() for pair in lines for line in pair]


def _sequences(run: ExploredRun, by: str, top: int, colour: bool, width: int) -> str:
    record = run.record
    shown = heat_of(run, by, top)
    if not shown:
        return ""
    most = max(float(np.max(heat, initial=0)) for *_, heat in shown) or 1.0
    what = {
        "state": "of the state at a token: |omega| of it and of all tokens after it",
        "token": "of a token: its |omega|",
    }[by]
    scale = "white to red" if colour else "the height of the bar"
    lines = [f"most exposed sequences; {scale} is the exposure {what}, to {most:.3g}"]
    for (row, pieces, heat), sequence in zip(shown, record.sequences, strict=False):
        place = "left out" if record.micro[row] < 0 else f"microbatch {record.micro[row]}"
        lines.append(
            f"\nrow {row}, group {record.group[row]}, {place}, reward {record.reward[row]:g}, "
            f"advantage {record.advantage[row]:+.2f}, exposure {record.exposure[row]:.4g}"
        )
        prompt = visible(sequence.prompt.strip())
        cut = max(width - 12, 1)
        lines.append("  prompt  " + (prompt if len(prompt) <= cut else "..." + prompt[3 - cut :]))
        lines += [
            "  " + line for line in heat_lines(pieces, heat / most, colour=colour, width=width - 2)
        ]
        if record.tokens[row] > len(pieces):
            lines.append(f"  ... {record.tokens[row] - len(pieces)} tokens more")
    return "\n".join(lines)


def _groups(run: ExploredRun) -> str:
    record = run.record
    group, reward = np.asarray(record.group), np.asarray(record.reward)
    exposures = np.asarray(record.exposure, np.float64)
    rows = []
    for g in np.unique(group):
        mine = group == g
        low, high = reward[mine].min(), reward[mine].max()
        rewards = f"{low:g}" if low == high else f"{low:g} to {high:g}"
        rows.append([str(g), str(mine.sum()), rewards, *_share(exposures[mine].sum(), exposures)])
    return _table(["group", "rows", "rewards", "exposure", "share", ""], rows)


def _microbatches(run: ExploredRun) -> str:
    record = run.record
    micro, tokens = np.asarray(record.micro), np.asarray(record.tokens)
    exposures = np.asarray(record.exposure, np.float64)
    rows = []
    for m in np.unique(micro):
        mine = micro == m
        name = "left out" if m < 0 else str(m)
        counts = [str(mine.sum()), str(tokens[mine].sum())]
        rows.append([name, *counts, *_share(exposures[mine].sum(), exposures)])
    return _table(["microbatch", "rows", "tokens", "exposure", "share", ""], rows)


def _risks(run: ExploredRun) -> str:
    used, budget = run.series("risk_used"), run.series("risk_budget")
    error, predicted = run.series("gradient_error"), run.series("predicted_error")
    lines = []
    seen = np.isfinite(used) & np.isfinite(budget)
    if seen.any():
        above = int(np.sum(used[seen] > budget[seen] * (1 + 1e-6)))
        lines.append(
            f"risk used: mean {used[seen].mean():.4g}, most {used[seen].max():.4g} of a budget of "
            f"{budget[seen].max():.4g} in {seen.sum()} updates, {above} above it"
        )
    else:
        lines.append("risk used: not known, the run has no plan, ladder or gate")
    measured = np.isfinite(error)
    if measured.any():
        text = (
            f"gradient error: measured in {measured.sum()} updates, "
            f"mean {error[measured].mean():.4g}, most {error[measured].max():.4g}"
        )
        both = measured & np.isfinite(predicted)
        if both.any():
            text += (
                f"; predicted mean {predicted[both].mean():.4g}; "
                f"{int(np.sum(error[both] > predicted[both]))} of {both.sum()} above the prediction"
            )
        lines.append(text)
    else:
        lines.append("gradient error: not measured; train with --measure-error-every N to have it")
    return "\n".join(lines)


def _share(mine: float, exposures: np.ndarray) -> list[str]:
    total = float(exposures.sum())
    share = mine / total if total else 0.0
    return [f"{mine:.4g}", f"{share:.1%}", "█" * round(30 * share)]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns to the right, the last to the left."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = []
    for row in (head, *rows):
        cells = [cell.rjust(width) for cell, width in zip(row[:-1], widths, strict=False)]
        lines.append("  ".join([*cells, row[-1]]).rstrip())
    return "\n".join(lines)


def _listed(steps: Sequence[int]) -> str:
    shown = [str(step) for step in steps]
    if len(shown) > 6:
        shown = [*shown[:3], "...", *shown[-2:]]
    return f"update{'s' * (len(steps) > 1)} {', '.join(shown)}"
