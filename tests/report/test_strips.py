"""Texts whose tokens are coloured."""

import numpy as np
import pytest

from hilore_jax.report.strips import Strip, plot_strips


def test_a_token_that_does_not_fit_begins_a_line():
    strip = Strip("", ["a" * 90, "b" * 6, "c", "d" * 200, "e"], np.arange(5.0))
    assert [(line, column) for *_, line, column in strip.places()] == [
        (0, 0),
        (0, 90),
        (1, 0),
        (2, 0),
        (3, 0),
    ]
    assert [heat for _, heat, *_ in strip.places()] == [0, 1, 2, 3, 4]


def test_hot_tokens_are_darker_and_any_text_is_drawn(tmp_path):
    imread = pytest.importorskip("matplotlib.image").imread
    path = tmp_path / "strips.png"
    pieces = ["x" * 48, "$_^{" * 12]  # as formulas these would fail
    strips = [Strip("two $", pieces, np.array([2.0, 0.2])), Strip("中", ["中"], np.zeros(1))]
    plot_strips(strips, path, title="a $ title", label="exposure")
    image = imread(path)[..., :3]
    height, width, _ = image.shape
    left, right = (slice(width // 8, width // 4), slice(width * 5 // 8, width * 3 // 4))
    reddest = [float((image[:, part, 0] - image[:, part, 2]).max()) for part in (left, right)]
    darkest = [float(np.median(image[:, part].min(axis=(1, 2)))) for part in (left, right)]
    assert reddest[0] > 0.3 and min(darkest) >= 0
    greens = [
        np.median(row[row[:, 0] - row[:, 2] > 0.05][:, 1])
        for row in (image[:, left].reshape(-1, 3), image[:, right].reshape(-1, 3))
    ]
    assert greens[0] < greens[1] - 0.3  # dark red on the left, light yellow on the right
    assert height < width


def test_nothing_to_draw_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="at least one Strip"):
        plot_strips([], tmp_path / "a.png", title="", label="")
