"""Heat strips: texts whose tokens are coloured, drawn into a PNG."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float

from hilore_jax._extras import require

_COLUMNS, _POINTS = 96, 10.0
_ADVANCE = 0.602 * _POINTS / 72  # width of a character of DejaVu Sans Mono, inches
_LINE = 0.25  # inches


@dataclasses.dataclass(frozen=True)
class Strip:
    """One text.

    Attributes:
        title: above it.
        pieces: the text of each token, without line breaks.
        heat: of each token, >= 0.
    """

    title: str
    pieces: Sequence[str]
    heat: Float[np.ndarray, "tokens"]

    def places(self) -> Iterator[tuple[str, float, int, int]]:
        """Each token's text, heat, line and column; a token that does not fit begins a line.

        Example:
            >>> list(Strip("", ["ab", "c"], np.array([1.0, 0.5])).places())
            [('ab', 1.0, 0, 0), ('c', 0.5, 0, 2)]
        """
        line = column = 0
        for piece, heat in zip(self.pieces, self.heat, strict=True):
            if column and column + len(piece) > _COLUMNS:
                line, column = line + 1, 0
            yield piece, float(heat), line, column
            column += len(piece)


def plot_strips(strips: Sequence[Strip], path: Path | str, *, title: str, label: str) -> None:
    """Writes a PNG: a text each, every token on the colour of its heat.

    Args:
        strips: from top to bottom.
        path: the file; its folder must exist.
        title: above all.
        label: of the colours.

    Raises:
        ImportError: the `[plots]` extra is missing.
        ValueError: there is nothing to draw.
    """
    if not strips:
        raise ValueError("plot_strips needs at least one Strip, found none")
    figure_type = require("matplotlib.figure", "plots", "a figure").Figure
    canvas_type = require("matplotlib.backends.backend_agg", "plots", "a figure").FigureCanvasAgg
    patch = require("matplotlib.patches", "plots", "a figure").Rectangle
    maps = require("matplotlib", "plots", "a figure").colormaps
    placed = [list(strip.places()) for strip in strips]
    counts = [max((line for *_, line, _ in places), default=0) + 1 for places in placed]
    lines = sum(counts) + 2 * len(strips)  # a title and a gap each
    most = max((heat for places in placed for _, heat, *_ in places), default=0.0) or 1.0
    width, height = _COLUMNS * _ADVANCE + 1.4, (lines + 2) * _LINE
    figure = figure_type(figsize=(width, height), dpi=150)
    canvas_type(figure)
    place = (0.2 / width, 0.5 * _LINE / height, _COLUMNS * _ADVANCE / width, lines * _LINE / height)
    axes = figure.add_axes(place)
    axes.set_xlim(0, _COLUMNS)
    axes.set_ylim(lines, 0)
    axes.axis("off")
    colours = maps["YlOrRd"]
    top = 0
    for strip, places, count in zip(strips, placed, counts, strict=True):
        axes.text(0, top + 0.5, strip.title, va="center", fontsize=_POINTS, parse_math=False)
        for piece, heat, line, column in places:
            y = top + 1 + line
            level = heat / most
            axes.add_patch(
                patch((column, y), len(piece), 0.92, facecolor=colours(level), linewidth=0)
            )
            axes.text(
                column,
                y + 0.46,
                piece,
                va="center",
                family="DejaVu Sans Mono",
                fontsize=_POINTS,
                color="white" if level > 0.7 else "black",
                parse_math=False,
            )
        top += count + 2
    bar = figure.add_axes(
        (1 - 0.85 / width, place[1] + 0.1, 0.15 / width, max(0.4, 0.8 - place[1]))
    )
    gradient = np.linspace(1, 0, 64)[:, None]
    bar.imshow(gradient, aspect="auto", cmap=colours, extent=(0, 1, 0, most))
    bar.set_xticks([])
    bar.yaxis.tick_right()
    bar.set_ylabel(label, fontsize=_POINTS)
    bar.tick_params(labelsize=_POINTS - 2)
    figure.suptitle(title, fontsize=12, y=1 - 0.5 * _LINE / height)
    with warnings.catch_warnings():
        # A character that the font lacks becomes a box.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        figure.savefig(path)
