"""`hilore exposure` from the command line."""

import importlib.util

import pytest

from hilore_jax import cli


def test_text_and_pictures(run_folder, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert cli.main(["exposure", str(run_folder), "--top", "1", "--out", str(tmp_path / "o")]) == 0
    out = capsys.readouterr().out
    assert "shown is update 3" in out and "microbatch" in out and "█" in out
    assert sorted(p.name for p in (tmp_path / "o").iterdir()) == [
        f"exposure_{name}.png" for name in ("error", "groups", "tokens", "updates")
    ]
    assert str(tmp_path / "o" / "exposure_tokens.png") in out and "\x1b" not in out


def test_text_alone_needs_no_extra(run_folder, capsys, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name)
    )
    options = ["exposure", "--run-dir", str(run_folder), "--update", "1", "--colour", "always"]
    assert cli.main([*options, "--no-plots"]) == 0
    out = capsys.readouterr().out
    assert "shown is update 1" in out and "\x1b[48;5;" in out
    assert not list(run_folder.glob("*.png"))
    assert cli.main(options) == 2
    found = capsys.readouterr()
    assert "shown is update 1" in found.out and "hilore_jax[plots]" in found.err


@pytest.mark.parametrize(
    ("options", "message"),
    [(["--top", "0"], "top must be >= 1"), (["--update", "7"], "update 7 was not recorded")],
)
def test_bad_input(run_folder, capsys, options, message):
    assert cli.main(["exposure", str(run_folder), *options]) == 2
    assert message in capsys.readouterr().err
