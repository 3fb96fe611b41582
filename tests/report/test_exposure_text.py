"""The tables and sequences that `hilore exposure` prints."""

import re

import numpy as np

from hilore_jax.report.exposure_text import _COLOURS, exposure_text, heat_lines
from hilore_jax.report.run_folder import explore


def cells(text, start):
    (line,) = [line for line in text.splitlines() if line.split()[:1] == [start] and "%" in line]
    return line.split()


def test_groups_and_microbatches_add_up_to_the_update(run_folder):
    text = exposure_text(explore(run_folder))
    head, groups, micro = text.split("\n\n")[1:4]
    assert head == "exposure 3.25 of 33 optimized tokens"
    assert cells(groups, "0")[:6] == ["0", "2", "0", "1", "30.8%", "█" * 9]
    assert cells(groups, "1")[:7] == ["1", "2", "0.5", "to", "1", "2.25", "69.2%"]
    assert "left out     1       5         0   0.0%" in micro
    assert cells(micro, "1")[:5] == ["1", "2", "25", "2.25", "69.2%"]


def test_risk_and_error_are_summed_up_or_said_to_be_missing(run_folder, make_run, tmp_path):
    text = exposure_text(explore(run_folder))
    assert "risk used: mean 0.01, most 0.016 of a budget of 0.015 in 4 updates, 1 above it" in text
    assert (
        "gradient error: measured in 2 updates, mean 0.01, most 0.015; predicted mean 0.0075; 1 of "
        "2 above the prediction" in text
    )
    gone = dict.fromkeys(("risk_used", "risk_budget", "gradient_error", "predicted_error"), "gone")
    text = exposure_text(explore(make_run(tmp_path / "plain", **gone)))
    assert "the run has no plan, ladder or gate" in text and "--measure-error-every" in text


def test_the_most_exposed_sequence_comes_first_with_its_place(run_folder):
    text = exposure_text(explore(run_folder), top=1, width=80)
    assert "row 3, group 1, microbatch 1, reward 1, advantage +2.00, exposure 2" in text
    assert "row 0" not in text and "prompt  What is 3 + 4?" in text
    lines = text.splitlines()
    place = lines.index("  Let me add:⏎3 + $4_ = 7<12>")
    bars = lines[place + 1]
    assert bars[2] == "█" and len(bars) == len(lines[place])
    heights = [" ▁▂▃▄▅▆▇█".index(bar) for bar in bars[2:]]
    assert heights == sorted(heights, reverse=True) and heights[-1] == 1
    assert lines[place + 2] == "  ... 7 tokens more"
    assert "\x1b" not in text  # what the model wrote reaches no terminal


def test_colours_are_those_of_the_heat_and_nothing_else_changes(run_folder):
    run = explore(run_folder)
    text = exposure_text(run, colour=True, width=80)
    shades = [int(code) for code in re.findall(r"\x1b\[48;5;(\d+)m", text)]
    levels = [_COLOURS.index(shade) for shade in shades]
    assert levels[:13] == sorted(levels[:13], reverse=True) and len(levels) == 16
    assert levels[0] == len(_COLOURS) - 1 and levels[12] <= 1
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    assert "  Let me add:⏎3 + $4_ = 7<12>" in plain and "█\n" not in plain.split("most exposed")[1]
    # By token each of one sequence has the same shade.
    text = exposure_text(run, by="token", colour=True)
    shades = re.findall(r"\x1b\[48;5;(\d+)m", text)
    assert len(set(shades[:13])) == 1


def test_lines_are_wrapped_at_tokens_and_wide_characters_count_twice():
    pieces, heat = ["中文", " ab", "cdefg", "h"], np.array([1.0, 0.5, np.nan, 0.0])
    found = heat_lines(pieces, heat, colour=False, width=7)
    assert found == ["中文 ab", "████▄▄▄", "cdefgh", ""]
    assert heat_lines([], np.zeros(0), colour=False, width=7) == ["", ""]
