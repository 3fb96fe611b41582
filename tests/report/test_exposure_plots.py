"""The pictures of a run's exposures."""

import contextlib

import numpy as np
import pytest

from hilore_jax.report import exposure_plots
from hilore_jax.report.exposure_plots import plot_exposure, update_panels
from hilore_jax.report.run_folder import explore


def test_every_picture_that_the_run_has_data_for_is_written(run_folder, make_run, tmp_path):
    imread = pytest.importorskip("matplotlib.image").imread
    written = plot_exposure(explore(run_folder), tmp_path)
    names = [f"exposure_{name}.png" for name in ("tokens", "groups", "updates", "error")]
    assert written == [tmp_path / name for name in names]
    for path in written:
        assert imread(path)[..., :3].std() > 0.05, path.name  # not blank
    unmeasured = make_run(tmp_path / "plain", gradient_error="gone", predicted_error="gone")
    out = tmp_path / "out"
    out.mkdir()
    assert [p.name for p in plot_exposure(explore(unmeasured), out)] == names[:3]


def test_panels_are_what_the_metrics_hold(run_folder, make_run, tmp_path):
    micro, risk = update_panels(explore(run_folder))
    (curves,) = micro.curves.values()
    at, mean, low, high = curves.band()
    assert at.tolist() == [1, 2, 3, 4]
    assert (mean.tolist(), low.tolist(), high.tolist()) == (
        [1.5, 2, 2.5, 4],
        [1, 2, 2, 4],
        [2, 2, 3, 4],
    )
    assert not micro.log and list(risk.curves) == ["risk used", "risk budget", "measured error"]
    np.testing.assert_allclose(risk.curves["risk used"].values, [[0.004, 0.008, 0.012, 0.016]])
    far = make_run(tmp_path / "far", micro_exposure=[0.01, 2.0])
    assert update_panels(explore(far))[0].log
    bare = make_run(tmp_path / "bare", **dict.fromkeys(["micro_exposure", "risk_used"], "gone"))
    panels = update_panels(explore(bare))
    assert [list(p.curves) for p in panels] == [["risk budget", "measured error"]]


def test_groups_are_bars_of_their_completions(run_folder, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    drawn = []

    @contextlib.contextmanager
    def drawing(*args, **options):
        with original(*args, **options) as axes:
            yield axes
            drawn.extend(axes)

    original = exposure_plots.drawing
    monkeypatch.setattr(exposure_plots, "drawing", drawing)
    exposure_plots.plot_groups(explore(run_folder), tmp_path / "groups.png")
    by_group, by_micro = drawn
    assert sum(bar.get_height() for bar in by_group.patches) == 3.25
    assert max(bar.get_y() + bar.get_height() for bar in by_group.patches) == 2.25
    assert by_micro.get_title() == "by microbatch (rows left out: 1)"
    assert len(by_micro.patches) == 3
    # The key's colours are those of the bars: the first group's only exposure is a fall.
    rise, fall = (handle.get_facecolor() for handle in by_group.get_legend().get_patches())
    colours = {bar.get_facecolor() for bar in by_group.patches if bar.get_height()}
    assert colours == {rise, fall} and rise != fall
    assert {b.get_facecolor() for b in by_group.patches if b.get_height() == 1.0} == {fall}
