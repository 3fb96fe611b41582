"""Curves: what is drawn (means, bands, averages), and that matplotlib's own state is untouched."""

import importlib.util

import numpy as np
import pytest

from hilore_jax.report.plots import Curves, Panel, plot_curves


@pytest.fixture
def curves():
    return Curves(np.arange(1, 6), np.array([[0.1, 0.2, 0.4, 0.4, 0.9], [0.3, 0.2, 0.2, 0.6, 0.5]]))


def test_band_is_mean_least_and_greatest_over_runs(curves):
    at, mean, low, high = curves.band()
    np.testing.assert_array_equal(at, [1, 2, 3, 4, 5])
    np.testing.assert_allclose(mean, [0.2, 0.2, 0.3, 0.5, 0.7])
    np.testing.assert_allclose(low, [0.1, 0.2, 0.2, 0.4, 0.5])
    np.testing.assert_allclose(high, [0.3, 0.2, 0.4, 0.6, 0.9])


def test_a_point_that_no_run_has_is_left_out():
    values = np.array([[0.5, np.nan, np.nan], [0.1, np.nan, 0.3]])
    at, mean, _, _ = Curves(np.array([1, 2, 3]), values).band()
    np.testing.assert_array_equal(at, [1, 3])
    np.testing.assert_allclose(mean, [0.3, 0.3])


def test_average_looks_back_only(curves):
    averaged = curves.averaged(3).values
    np.testing.assert_allclose(averaged[0], [0.1, 0.15, 0.7 / 3, 1.0 / 3, 1.7 / 3])
    np.testing.assert_array_equal(curves.averaged(1).values, curves.values)


def test_the_figure_is_written_and_no_global_state_is_left(curves, tmp_path):
    matplotlib = pytest.importorskip("matplotlib")
    imread = pytest.importorskip("matplotlib.image").imread
    before = dict(matplotlib.rcParams)
    panels = [
        Panel("reward", "share", {"gc": curves, "int8": curves}, {"chance": 0.1}, average=2),
        Panel("error", "relative", {"int8": curves}, log=True, markers=True),
    ]
    path = tmp_path / "figure.png"
    plot_curves(panels, path, title="two panels")
    two = imread(path)
    plot_curves(panels[:1], path, title="one panel")
    one = imread(path)
    assert two.shape[0] == one.shape[0] and two.shape[1] == 2 * one.shape[1]
    assert one[..., :3].std() > 0.05  # not blank
    assert dict(matplotlib.rcParams) == before


def test_no_panel_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="at least one Panel"):
        plot_curves([], tmp_path / "figure.png", title="")


def test_a_missing_extra_is_named(curves, tmp_path, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name)
    )
    with pytest.raises(ImportError, match=r'pip install "hilore_jax\[plots\]"'):
        plot_curves([Panel("a", "b", {"c": curves})], tmp_path / "figure.png", title="")
