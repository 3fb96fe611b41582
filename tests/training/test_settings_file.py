"""Settings from a file: read, overridden, and refused with all that is wrong."""

import dataclasses
import json
from pathlib import Path

import pytest

from hilore_jax import cli
from hilore_jax.training import config as config_module
from hilore_jax.training.config import TrainConfig, faults
from hilore_jax.training.settings_file import read_settings

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def given(monkeypatch):
    """The settings with which `hilore train` would have begun."""
    seen = []

    class Checked(Exception):
        pass

    def check(config):
        seen.append(config)
        raise ValueError("not run")

    monkeypatch.setattr(config_module, "check", check)

    def parse(*argv):
        seen.clear()
        assert cli.main(["train", *argv]) == 2
        return seen[0] if seen else None

    return parse


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda p: p.name)
def test_the_examples_are_sound(path, tmp_path):
    config = TrainConfig(**read_settings(path, TrainConfig))
    assert faults(dataclasses.replace(config, run_dir=str(tmp_path / "run"))) == []


def test_a_file_s_settings_are_defaults(given, tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('task = "count"\nmicro-rows = 4\nclip_high = 1\nskip_rows = true\n')
    config = given("--config", str(path), "--micro-rows", "2", "--no-skip-rows")
    assert (config.task, config.micro_rows, config.clip_high) == ("count", 2, 1)
    assert not config.skip_rows and config.updates == TrainConfig().updates
    assert config.config == str(path)
    assert TrainConfig(config="x").fingerprint() == TrainConfig().fingerprint()


def test_a_run_s_own_settings_can_be_given_again(given, tmp_path):
    made = TrainConfig(loss="gspo", clip_high=0.3, lora_rank=4, run_dir="runs/other", config="x")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(dataclasses.asdict(made)))
    assert given("--config", str(path)) == dataclasses.replace(made, config=str(path))


def test_all_that_is_wrong_comes_in_one_message(tmp_path, capsys):
    path = tmp_path / "run.toml"
    path.write_text(
        'micro_row = 4\nqqqq = 1\ngroup = "8"\nbeta = true\nloss = "ppo"\nskip-rows = 1\n'
        "clip_high = []\ntask = 3\nprompts = 2.0\nskip_rows = true\n"
    )
    assert cli.main(["train", "--config", str(path)]) == 2
    said = capsys.readouterr().err
    for line in (
        "9 faults in the settings",
        "there is no setting 'micro_row'; the nearest is micro_rows",
        "there is no setting 'qqqq'\n",
        "group is '8', expected a whole number",
        "beta is True, expected a number",
        "loss is 'ppo', expected one of dapo, grpo, dr_grpo, bnpo, gspo, cispo",
        "skip_rows is 1, expected true or false",
        "clip_high is [], expected a number or null",
        "task is 3, expected text",
        "prompts is 2.0, expected a whole number",
    ):
        assert line in said


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("run.toml", "a = = 1", "is not TOML"),
        ("run.json", "{", "is not JSON"),
        ("run.json", "[1]", r"is \[1\], expected settings by name"),
        ("run.toml", "micro_rows = 2\nmicro-rows = 4", "micro_rows is given twice"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(name, text, message, tmp_path):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_settings(path, TrainConfig)
    with pytest.raises(FileNotFoundError, match="no such file"):
        read_settings(tmp_path / "other.toml", TrainConfig)
