"""The command line: help, dispatch, and errors without tracebacks."""

import json
import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

import hilore_jax as hl
from hilore_jax import cli
from hilore_jax.models.shapes import family, to_hf
from hilore_jax.planning.menu import Entry
from plans import bare_plan


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


@pytest.mark.parametrize("command", ["train", "demo", "doctor"])
def test_each_command_has_help(capsys, command):
    code, out, _ = run(capsys, command, "--help")
    assert code == 0
    assert f"hilore {command}" in out


@pytest.mark.parametrize(
    ("command", "argument"), [("accept", "PLAN"), ("exposure", "RUN"), ("explain", "[PLAN]")]
)
def test_help_shows_what_a_command_takes_beside_options(capsys, command, argument):
    code, out, _ = run(capsys, command, "--help")
    assert code == 0 and f"hilore {command} [-h] [OPTIONS] {argument}\n" in out
    assert f"  {command} {argument} " in run(capsys, "--help")[1]


@pytest.mark.parametrize("option", [["none"], ["--plan", "none"], ["--plan=none"]])
def test_a_file_beside_the_options_may_have_its_option(capsys, option):
    code, _, err = run(capsys, "accept", *option, "--updates", "1")
    assert (code, "--plan none: no such file; hilore plan --out" in err) == (2, True)


@pytest.mark.parametrize("command", ["train", "plan", "calibrate", "accept", "explain"])
def test_adapters_have_the_same_option_everywhere(capsys, command):
    _, out, _ = run(capsys, command, "--help")
    assert "--lora INT, --lora-rank INT" in out


def test_explain_prints_ladders_and_calibrations_and_names_other_files(capsys, tmp_path):
    gc = hl.Policy({})
    made = bare_plan([gc], [Entry(gc, 0, 0.0, 0, 0, 0.0)])
    hl.Ladder((1.0, float("inf")), (made, made)).save(tmp_path / "ladder.json")
    hl.Calibration((), 1.0, 1.0, (0.5,), {}, 1, 1.0, 1, {}).save(tmp_path / "calibration.json")
    (tmp_path / "policy.json").write_text(gc.to_json())
    for name, text in (("ladder", "ladder of 2 plans"), ("calibration", "calibration of ")):
        code, out, _ = run(capsys, "explain", str(tmp_path / f"{name}.json"))
        assert code == 0 and text in out
    code, _, err = run(capsys, "explain", str(tmp_path / "policy.json"))
    assert code == 2 and "it holds a policy, which is for" in err
    code, _, err = run(capsys, "explain", "--policy", str(tmp_path / "ladder.json"))
    assert code == 2 and "--policy" in err and "it holds a ladder of plans" in err
    code, _, err = run(capsys, "explain", str(tmp_path / "ladder.json"), "--seq", "8")
    assert code == 2 and "leave the other options out" in err


def test_a_signal_ends_the_process_though_a_compiler_is_at_work():
    """A thread that never ends stands for the compiler's: an ordinary end would wait for it."""
    program = (
        "import os, signal, sys, threading, time; from hilore_jax import cli\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's & ignores it
        "threading.Thread(target=threading.Event().wait).start()\n"
        "def compiling(argv):\n"
        "    print('compiling')\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    time.sleep(60)\n"
        "cli._plan, sys.argv = compiling, ['hilore', 'plan']\n"
        "cli.run()"
    )
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60
    )
    assert (found.returncode, found.stdout) == (130, "compiling\n")
    assert found.stderr == "hilore plan: stopped at once\n"


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
    assert all(text in out for text in ("jax", "python", "device"))
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    for extra in project["optional-dependencies"]:
        assert f"[{extra}]" in out
    assert "[cpu]             installed" in out


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


@pytest.mark.parametrize("option", ["rows", "seq"])
def test_explain_needs_tokens(capsys, option):
    code, _, err = run(capsys, "explain", f"--{option}", "0")
    assert (code, f"{option} must be >= 1, found 0" in err) == (2, True)


def test_explain_takes_the_bundled_name_and_a_folder(capsys, tmp_path):
    shape = family("smollm2-135m")
    (tmp_path / "config.json").write_text(json.dumps(to_hf(shape)))
    tables = [
        run(capsys, "explain", "--model", model, "--seq", "8")
        for model in ("smollm2-135m", "smollm2-135m-instruct", str(tmp_path))
    ]
    assert tables[0][0] == 0 and tables[0] == tables[1] == tables[2]


def test_a_model_without_weights_and_a_wrong_task_argument_say_what_to_do(capsys, tmp_path):
    train = ["train", "--run-dir", str(tmp_path / "run"), "--task", "count"]
    code, _, err = run(capsys, *train, "--model", "qwen2.5-0.5b")
    assert code == 2 and "hf download" in err and "--model FOLDER" in err
    code, _, err = run(capsys, *train, "--task-args", "limits=3")
    assert code == 2 and "no arguments ['limits']; it has ['limit']" in err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("set_before", [None, "0"])
def test_a_cuda_plugin_without_a_gpu_is_quiet(set_before):
    """The variable is there before anything starts jax's backends, unless the user set it."""
    program = (
        "import glob, os; glob.glob = lambda pattern: []; from hilore_jax.cli import main; "
        "main(['--help']); print('found', os.environ['JAX_SKIP_CUDA_CONSTRAINTS_CHECK'])"
    )
    clean = {k: v for k, v in os.environ.items() if k != "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"}
    if set_before:
        clean["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = set_before
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=clean
    )
    assert f"found {set_before or 1}" in found.stdout
