"""The scripts in experiments/ run, on their smoke settings."""

import importlib.util
import json
import re
import signal
import sys
from pathlib import Path

import jax
import pytest

FOLDER = Path(__file__).parents[1] / "experiments"


@pytest.fixture
def script(monkeypatch):
    """Loads a script of experiments/ as a module."""

    def load(name):
        spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)  # dataclasses look their module up
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture
def unoptimized():
    """XLA compiles fast and badly: these programs run for a moment only."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


def test_learning_check_quick(script, unoptimized, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    module, out = script("learning_check"), tmp_path / "quick.json"
    assert module.main(["--quick", "--out", str(out)]) == 0
    assert str(FOLDER.parent) not in out.read_text()
    result = json.loads(out.read_text())
    assert result["complete"]
    (run,) = result["runs"]
    assert (run["policy"], run["seed"], len(run["reward"])) == ("int8", 0, 3)
    # A random model guesses: 1/11 with a standard error of 0.01 over an update's 768 letters.
    assert run["reward"][0] == pytest.approx(1 / 11, abs=0.04)
    assert set(run["gradient_error"]) == {"1", "2", "3"}
    assert all(1e-3 < error < 0.1 for error in run["gradient_error"].values())
    kept = result["kept"]["int8"]
    assert kept["vjp_residual_bytes_by_dtype"]["int8"] == 128 * 7 * (64 + 32 + 32 + 64 + 192 + 192)
    assert "int8" not in module.kept_by("gc")["vjp_residual_bytes_by_dtype"]
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr()
    assert "gradient_error_median" in printed.out and printed.err == ""


def test_learning_check_interrupted_keeps_what_it_has(script, monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    module, out = script("learning_check"), tmp_path / "out.json"
    out.write_text("an earlier result")

    def interrupted(settings, runs, shown):
        runs.append({"policy": "gc", "seed": 0, "reward": [0.1, 0.2], "gradient_error": {}})
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(module, "run_all", interrupted)
    monkeypatch.setattr(module, "kept_by", lambda policy: {})
    assert module.main(["--out", str(out)]) == 130
    partial = json.loads((tmp_path / "out.partial.json").read_text())
    assert not partial["complete"] and partial["runs"][0]["reward"] == [0.1, 0.2]
    assert (tmp_path / "out.partial.png").exists()
    assert out.read_text() == "an earlier result"


def test_learning_check_result_is_of_this_script(script):
    result = json.loads((FOLDER / "results" / "learning_check.json").read_text())
    module = script("learning_check")
    assert result["complete"]
    assert result["policies"] == module.Settings().policies
    assert set(result["summary"]) == {"gc", "int8", "int4"}
    for label in ("gc", "int8"):
        (final,) = (v for k, v in result["summary"][label].items() if re.match("reward_of_last", k))
        assert result["summary"][label]["reward_at_update_1"] < 0.15 < 0.8 < final


def test_reverse_task_rewards_each_letter(script):
    task = script("learning_check").reverse_task(seed=3)
    item = task.draw(5)
    assert item == task.draw(5) and item.answer == item.question[::-1] and len(item.question) == 3
    assert task.score(item.answer, item) == 1.0
    assert task.score(item.answer[:2], item) == pytest.approx(2 / 3)
    assert task.score(item.answer + "a", item) == pytest.approx(3 / 4)
    assert task.score("zzz", item) == 0.0


def test_zero_rows_quick(script, unoptimized, tmp_path, capsys):
    out = tmp_path / "rows.json"
    assert script("zero_rows").main(["--quick", "--turns", "1", "--out", str(out)]) == 0
    whole, micro, skipped = json.loads(out.read_text())["rows"]
    assert (whole["microbatches"], micro["microbatches"], skipped["microbatches"]) == (4, 4, 2)
    assert (micro["rows_skipped"], skipped["rows_skipped"]) == (0, 8)
    assert skipped["n_tokens"] == micro["n_tokens"] == whole["n_tokens"]
    assert max(micro["gradient_difference"], skipped["gradient_difference"]) < 1e-5
    assert whole["grad_norm"] > 0 and "without dead rows" in capsys.readouterr().out
