"""What is read of a run folder, and what is said where it is not there."""

import copy
import dataclasses
import json
import re
import shutil

import numpy as np
import pytest

from hilore_jax.report.exposure_text import exposure_text
from hilore_jax.report.run_folder import explore, heat_of, visible
from hilore_jax.training.exposures import read_record, record_paths, write_record


def test_the_last_record_is_looked_at_or_the_one_asked_for(run_folder):
    run = explore(run_folder)
    assert run.record.step == 3 and run.recorded == (1, 3)
    assert explore(str(run_folder), 1).record.step == 1
    assert run.title == "tiny, count, a.json"
    assert run.steps.tolist() == [1, 2, 3, 4]
    np.testing.assert_array_equal(run.series("gradient_error"), [0.005, np.nan, 0.015, np.nan])
    np.testing.assert_array_equal(run.micro_exposures(), [[1, 2, 3, 4], [2, np.nan, 2, np.nan]])
    with pytest.raises(ValueError, match=r"update 2 was not recorded; recorded are \[1, 3\]"):
        explore(run_folder, 2)


def test_an_update_that_was_not_exposed_is_looked_at_only_if_asked_for(run_folder):
    (_, path) = record_paths(run_folder)
    quiet = dataclasses.replace(read_record(path), step=5, exposure=(0.0,) * 4)
    write_record(run_folder, quiet)
    assert explore(run_folder).record.step == 3
    run = explore(run_folder, 5)
    assert run.record.step == 5 and heat_of(run, "state", 5) == []
    assert "no sequence of this update is exposed" in exposure_text(run)


def test_numbers_that_were_not_finite_are_left_out(make_run, tmp_path):
    run = explore(make_run(tmp_path / "run", gradient_error=None, micro_exposure=[None]))
    assert np.isnan(run.series("gradient_error")).all()
    assert np.isnan(run.micro_exposures()).all()


def test_a_folder_without_records_names_the_remedy(run_folder, tmp_path):
    shutil.rmtree(run_folder / "exposure")
    with pytest.raises(ValueError, match=r"no record of exposures.*--resume --log-exposure-every"):
        explore(run_folder)
    with pytest.raises(ValueError, match=r"is no run folder.*--run-dir"):
        explore(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("config.json", "{", "config.json is not a settings file"),
        ("config.json", "[]", "config.json is a damaged settings file: all of it is"),
        ("config.json", '{"plan": 3}', "plan is 3, expected a text"),
        ("metrics.jsonl", "[]\n", r"line 1 is \[\], expected an object; remove"),
        ("metrics.jsonl", '{"step": ' + "1" * 5000 + '}\n{"step": 1}\n', "line 1 is not JSON"),
        ("metrics.jsonl", "[" * 100_000 + '\n{"step": 1}\n', "line 1 is not JSON"),
        ("metrics.jsonl", '{"loss": 1}\n', r"line 1\.step is null"),
        ("metrics.jsonl", '{"step": 1, "risk_used": "a"}\n', r"line 1\.risk_used is \"a\""),
        ("metrics.jsonl", '{"step": 1, "micro_exposure": [[]]}\n', r"micro_exposure\[0\] is \[\]"),
    ],
)
def test_damaged_files_are_named(run_folder, name, text, said):
    (run_folder / name).write_text(text)
    with pytest.raises(ValueError, match=said):
        explore(run_folder)


def test_what_is_no_text_or_no_record_is_told(run_folder):
    (run_folder / "exposure" / "5x.json").write_text("{}")
    assert explore(run_folder).recorded == (1, 3)
    (run_folder / "metrics.jsonl").write_bytes(b"\xff\xfe\n")
    with pytest.raises(ValueError, match=r"metrics\.jsonl is not a metrics file: it is no text"):
        explore(run_folder)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), 1e300, -1e300, None, "?", 10**400])
def test_numbers_of_a_record_that_cannot_be_shown_are_named(run_folder, wrong):
    path = record_paths(run_folder)[-1]
    fields = json.loads(path.read_text())
    for name, change in {
        "exposure[1]": lambda found: found["exposure"].__setitem__(1, wrong),
        "sequences[0].omega[2]": lambda found: found["sequences"][0]["omega"].__setitem__(2, wrong),
    }.items():
        change(damaged := copy.deepcopy(fields))
        path.write_text(json.dumps(damaged))
        said = f"{path.name} is a damaged record file: {name} is "
        with pytest.raises(ValueError, match=re.escape(said)):
            explore(run_folder)


def test_heat_is_the_states_or_the_tokens(run_folder):
    run = explore(run_folder)
    (row, pieces, heat), (other, short, _) = heat_of(run, "state", 5)
    assert (row, other) == (3, 0)
    # 13 tokens of 2/13 each: a state is read by its own token and all after it.
    np.testing.assert_allclose(heat, 2 * np.arange(13, 0, -1) / 13, rtol=1e-6)
    assert pieces[4] == "⏎" and pieces[-1] == "<12>" and short[-1] == "\\x1b[31m"
    (_, _, own), *rest = heat_of(run, "token", 1)
    np.testing.assert_allclose(own, np.full(13, 2 / 13), rtol=1e-6)
    assert not rest


def test_what_a_terminal_would_act_on_is_shown_instead():
    assert visible("\r\x07é中") == "\\r\\x07é中"
