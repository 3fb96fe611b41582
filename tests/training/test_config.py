"""Settings are checked as a whole, before anything is loaded."""

import dataclasses
import json
import math
from pathlib import Path

import pytest

import hilore_jax as hl
from hilore_jax.planning.menu import Entry
from hilore_jax.training import checkpoint
from hilore_jax.training.config import TrainConfig, check, faults
from hilore_jax.training.trainer import train
from plans import bare_plan


@pytest.fixture
def config(tmp_path):
    return TrainConfig(run_dir=str(tmp_path / "run"))


def changed(config, **changes):
    return dataclasses.replace(config, **changes)


def test_defaults_are_sound(config):
    assert faults(config) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"group": 1, "micro_rows": 4}, "group must be >= 2"),
        ({"micro_rows": 5}, r"4 x 8 = 32 rows, found 5; legal values are \[1, 2, 4, 8, 16, 32\]"),
        ({"prompts": 0}, "prompts must be >= 1, found 0"),
        ({"completion_length": 0}, "completion_length must be >= 1"),
        ({"learning_rate": float("nan")}, "learning_rate must be finite and > 0"),
        ({"clip": 0.0}, "clip must be"),
        ({"beta": -1.0}, "beta must be"),
        ({"temperature": -0.1}, "temperature must be"),
        ({"temperature": 0.0}, "temperature must be > 0, found 0: greedy"),
        ({"top_p": 0.0}, "top_p must be"),
        ({"top_k": -2}, "top_k must be"),
        ({"policy": "mlp_gate"}, "policy: .*name=action"),
        ({"policy": "mlp_gate=int3"}, "policy: .*int3"),
        ({"policy": "missing.json"}, "policy: .*missing.json"),
        ({"task_args": "min_terms"}, "task_args: .*key=value"),
        ({"ladder": "missing.json"}, r"--ladder missing\.json: no such file; hilore plan"),
        ({"ladder": "l.json", "policy": "store"}, "policy 'store' and a ladder"),
        ({"ladder": "l.json", "plan": "p.json"}, "plan 'p.json' and ladder 'l.json': a run is und"),
        ({"plan": "p.json", "policy": "store"}, "policy 'store' and a plan: it holds the policies"),
        ({"plan": "config.json"}, r"--plan config\.json is not a plan file: it holds a policy"),
        ({"policy": "plan.json"}, r"policy: plan\.json is not a policy file: it holds a plan"),
        ({"run_dir": "config.json/run"}, r"config\.json is a file, expected a folder"),
        ({"resume": True}, "nothing to resume"),
    ],
)
def test_each_fault_is_named(config, changes, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text('{"schema": 1, "actions": {}}')
    Path("plan.json").write_text('{"policies": [], "menu": [], "gc": {}}')
    with pytest.raises(ValueError, match=message):
        check(changed(config, **changes))


def test_all_faults_come_in_one_message_before_anything_is_loaded(config):
    wrong = changed(config, group=1, micro_rows=4, top_p=2.0, policy="x", model="?", task="?")
    with pytest.raises(ValueError, match=r"^3 faults") as caught:
        train(wrong)
    for name in ("group", "top_p", "policy"):
        assert f"- {name}" in str(caught.value)


def test_a_run_folder_in_use_is_not_overwritten(config, tmp_path):
    (tmp_path / "run").mkdir()
    assert faults(config) == []
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1}\n')
    assert "left no checkpoint; name another folder" in faults(config)[0]
    assert "holds no checkpoint; name another run folder" in faults(changed(config, resume=True))[0]
    (tmp_path / "run" / "checkpoints" / "00000001").mkdir(parents=True)
    assert "already holds a run; pass --resume" in faults(config)[0]
    assert faults(changed(config, resume=True)) == []


def test_a_folder_that_a_failed_start_left_is_free(config, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text("{}")
    (tmp_path / "run" / "metrics.jsonl").write_text("")
    assert faults(config) == []
    (fault,) = faults(changed(config, resume=True))
    assert "holds no checkpoint; leave --resume out to start anew" in fault


def test_fingerprint_ignores_what_may_change_and_reads_policy_files(config, tmp_path):
    longer = changed(config, updates=99, resume=True, save_every=1, quiet=True)
    assert longer.fingerprint() == config.fingerprint()
    assert changed(config, seed=1).fingerprint() != config.fingerprint()
    file = tmp_path / "policy.json"
    spelled = changed(config, policy="mlp_gate=int8")
    file.write_text(spelled.parsed_policy.to_json())
    assert changed(config, policy=str(file)).fingerprint() == spelled.fingerprint()


GC, UP = hl.Policy({}), hl.Policy({"mlp_up": hl.Compress("int8")})
GATED = {
    "block_risks": ((0.0, 0.002), (0.0, 0.004)),
    "exposure": 0.5,
    "norm": 0.25,
    "paper": False,
}
MENU = (Entry(GC, 0, 3.0, 1, 1, 0.0), Entry(UP, 8, 1.0, 0, 0, 0.004))


@pytest.mark.parametrize(
    ("changes", "name", "said"),
    [
        ({"block_risks": ((0.0, 0.002), (0.0, 0.003))}, "block_risks", r"\[0.002, 0.003\]"),
        ({"exposure": 0.25}, "exposure", "0.25"),
        ({"norm": 0.5}, "norm", "0.5"),
        ({"norm": None}, "norm", "None"),
        ({"paper": True}, "form", "'paper'"),
        (
            {"menu": (MENU[0], dataclasses.replace(MENU[1], seconds=2.0))},
            "seconds",
            r"\[1.0, 1.0\]",
        ),
        (
            {"menu": (dataclasses.replace(MENU[0], seconds=5.0), MENU[1])},
            "seconds",
            r"\[4.0, 4.0\]",
        ),
    ],
)
def test_another_gate_is_another_run(config, tmp_path, changes, name, said):
    plan, saved = tmp_path / "plan.json", tmp_path / "checkpoint"
    gated = changed(config, plan=str(plan), gate=True)
    made = bare_plan([UP] * 2, MENU, **GATED)
    made.save(plan)
    saved.mkdir()
    before = json.loads(json.dumps(gated.fingerprint()))  # as a checkpoint keeps it
    checkpoint._check_fingerprint(saved, before, gated.fingerprint())
    dataclasses.replace(made, **changes).save(plan)
    with pytest.raises(ValueError, match=f"gate {name}: checkpoint .*, this run {said}") as caught:
        checkpoint._check_fingerprint(saved, before, gated.fingerprint())
    assert str(caught.value).count(": checkpoint ") == 1
    # A run that is under the plan as it is reads nothing of that.
    static = changed(gated, gate=False)
    after = static.fingerprint()
    made.save(plan)
    assert static.fingerprint() == after and "gate norm" not in after


def test_a_verdict_does_not_make_another_run_and_another_bucket_does(config, tmp_path):
    path = tmp_path / "ladder.json"
    laddered = changed(config, ladder=str(path))
    low, exact = bare_plan([UP] * 2, MENU, **GATED), bare_plan([GC] * 2, MENU, **GATED)
    ladder = hl.Ladder((0.5, math.inf), (low, exact), 0.015)
    ladder.save(path)
    before = laddered.fingerprint()
    found = {"accepted": True, "reason": "good", "peak": 1, "measured": None, "errors": (0.001,)}
    found |= {"removed": (), "predicted": 0.001, "error": 0.001, "limit": 0.015}
    tried = dataclasses.replace(low, accepted=True, acceptance=found)
    dataclasses.replace(ladder, plans=(tried, exact)).save(path)
    assert laddered.fingerprint() == before
    risks = ((0.0, 0.002), (0.0, 0.005))
    for other in (
        dataclasses.replace(ladder, edges=(0.25, math.inf)),
        dataclasses.replace(ladder, risk=0.02),
        dataclasses.replace(ladder, share=0.5),
        dataclasses.replace(ladder, plans=(exact, exact)),
        dataclasses.replace(ladder, plans=(dataclasses.replace(low, norm=1.0), exact)),
        dataclasses.replace(ladder, plans=(dataclasses.replace(low, block_risks=risks), exact)),
    ):
        other.save(path)
        found = laddered.fingerprint()
        assert found["ladder"] != before["ladder"]
        assert {**found, "ladder": None} == {**before, "ladder": None}
