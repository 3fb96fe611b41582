"""The command line: help, dispatch, and errors without tracebacks."""

import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from hilore_jax import cli


def run(capsys, *argv):
    try:
        code = cli.main(argv)
    except SystemExit as stop:  # tyro's own exits
        code = stop.code
    out = capsys.readouterr()
    return code, out.out, out.err


def test_help_lists_every_command(capsys):
    code, out, _ = run(capsys, "--help")
    assert code == 0
    assert all(f"  {name}" in out for name in cli.COMMANDS)
    assert all(callable(getattr(cli, f"_{name}")) for name in cli.COMMANDS)


def test_help_imports_nothing_heavy():
    heavy = "{'orbax', 'orbax.checkpoint', 'tyro', 'reasoning_gym', 'gguf', 'tokenizers'}"
    program = (
        "import sys; from hilore_jax.cli import main; main(['--help']); "
        f"sys.exit(bool({heavy} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert found.returncode == 0, found.stderr


def test_unknown_command(capsys):
    code, _, err = run(capsys, "trian")
    assert code == 2
    assert "unknown command 'trian'" in err and "train" in err


@pytest.mark.parametrize("command", ["train", "demo", "explain", "doctor"])
def test_each_command_has_help(capsys, command):
    code, out, _ = run(capsys, command, "--help")
    assert code == 0
    assert f"hilore {command}" in out


def test_faults_are_printed_together_without_a_traceback(capsys, tmp_path):
    folder = str(tmp_path / "run")
    wrong = "--group 1 --micro-rows 4 --top-p 2 --policy x".split()
    code, _, err = run(capsys, "train", *wrong, "--run-dir", folder)
    assert code == 2
    assert "3 faults" in err and "Traceback" not in err
    assert not (tmp_path / "run").exists()


def test_unknown_model_and_task_are_errors_of_one_line(capsys, tmp_path):
    folder = str(tmp_path / "run")
    code, _, err = run(capsys, "train", "--task", "count", "--model", "nope", "--run-dir", folder)
    assert code == 2
    assert "no model 'nope'" in err
    code, _, err = run(capsys, "train", "--task", "chainsum", "--run-dir", folder)
    assert code == 2
    assert "chainsum" in err and "chain_sum" in err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_run_exits_with_its_signal_and_says_how_to_go_on(
    capsys, tmp_path, monkeypatch, number
):
    stopped = SimpleNamespace(stopped_by=number)
    monkeypatch.setattr("hilore_jax.training.trainer.train", lambda config: stopped)
    folder = str(tmp_path / "run")
    code, _, err = run(capsys, "train", "--task", "count", "--run-dir", folder)
    assert code == 128 + number
    assert number.name in err and folder in err and "--resume" in err


def test_a_run_stopped_at_once(capsys, tmp_path, monkeypatch):
    def interrupted(config):
        raise KeyboardInterrupt

    monkeypatch.setattr("hilore_jax.training.trainer.train", interrupted)
    code, _, err = run(capsys, "train", "--task", "count", "--run-dir", str(tmp_path / "run"))
    assert (code, "stopped at once" in err) == (130, True)


def test_doctor_names_versions_devices_and_extras(capsys):
    code, out, _ = run(capsys, "doctor")
    assert code == 0
    assert all(text in out for text in ("jax", "python", "device", "[tasks]"))


def test_explain_prints_a_block_of_a_model_without_weights(capsys):
    code, out, _ = run(
        capsys, "explain", "--policy", "mlp_gate=int8,attn_out=store", "--rows", "1", "--seq", "16"
    )
    assert code == 0
    assert "mlp_gate" in out and "int8" in out


def test_an_unknown_activation_name_lists_those_seen(capsys):
    code, _, err = run(capsys, "explain", "--policy", "mlp_gat=int8", "--seq", "16")
    assert code == 2
    assert "mlp_gat" in err and "mlp_gate" in err
