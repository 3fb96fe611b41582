"""Metrics survive an interruption and are cut back at a resume."""

import io
import json
import logging

import numpy as np
import pytest

from hilore_jax.training.metrics import MetricsWriter, Progress, console_line, read_metrics


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_line_is_on_disk_before_the_next(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        for step in (1, 2):
            writer.write({"step": step, "reward": np.float32(0.5), "loss": float("nan")})
            assert lines(path)[-1] == {"step": step, "reward": 0.5, "loss": None}


def test_an_error_inside_keeps_what_was_written(tmp_path):
    path = tmp_path / "metrics.jsonl"

    def interrupted():
        with MetricsWriter(path) as writer:
            writer.write({"step": 1})
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert lines(path) == [{"step": 1}]


def test_resume_drops_later_lines_and_a_line_cut_short(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"step": 4, "rew')
    with caplog.at_level(logging.WARNING, "hilore_jax"), MetricsWriter(path, 2) as writer:
        writer.write({"step": 3, "again": True})
    assert "cut short" in caplog.text
    assert lines(path) == [{"step": 1}, {"step": 2}, {"step": 3, "again": True}]


def test_without_resume_the_file_starts_anew(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 9}\n')
    with MetricsWriter(path):
        pass
    assert path.read_text() == ""


def test_a_damaged_line_in_the_middle_is_an_error(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\nnonsense\n{"step": 3}\n')
    with pytest.raises(ValueError, match="line 2 is not JSON"):
        read_metrics(path)


def test_console_line_shows_what_is_there():
    line = console_line({"step": 3, "reward": 0.125, "exposure": 0.0}, 10)
    assert line == "update 3/10  reward 0.125  exposure 0.000"


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_bar_on_a_terminal_only():
    pipe, terminal, silent = io.StringIO(), Terminal(), io.StringIO()
    for stream, quiet in ((pipe, False), (terminal, False), (silent, True)):
        progress = Progress(2, stream=stream, quiet=quiet)
        progress.update({"step": 1, "reward": 0.5})
        progress.close()
    assert pipe.getvalue() == "update 1/2  reward 0.500\n"
    assert "1/2" in terminal.getvalue() and "\r" in terminal.getvalue()
    assert silent.getvalue() == ""
