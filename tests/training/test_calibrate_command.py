"""`hilore calibrate`, a calibrated plan, `hilore accept` and `train --plan`, on a tiny model."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import jax
import optax
import pytest

import hilore_jax as hl
from hilore_jax import cli
from hilore_jax.models.config import LoraConfig
from hilore_jax.models.shapes import to_hf
from hilore_jax.planning.menu import Entry
from hilore_jax.planning.plan import Plan
from hilore_jax.training import accept_command, calibrate_command, trainer
from hilore_jax.training.abstract import training_update
from hilore_jax.training.accept_command import AcceptOptions, run_accept
from hilore_jax.training.calibrate_command import CalibrateConfig, run_calibrate
from hilore_jax.training.config import TrainConfig, check
from hilore_jax.training.parts import check_model
from hilore_jax.training.planned import run_policies
from hilore_jax.training.rollouts import Measured, real_updates
from hilore_jax.training.step import init_state
from plans import bare_plan

SIZES: Any = {
    "prompts": 1,
    "group": 4,
    "micro_rows": 2,
    "prompt_length": 12,
    "completion_length": 4,
}
UP = "mlp_up=int8:axis=-1:tile=32"
OTHERS = {"identity": "x", "content": "y", "norms": {}, "seconds": 1.0, "rows": []}


class Stopped:
    """What the command reads of a run."""

    stopped_by = None


@pytest.fixture
def graded(parts):
    """Parts whose rewards differ within a group: by what was sampled."""
    made = parts(max_seq=64)
    score = lambda answer, item: (sum(map(ord, answer)) % 7) / 7 if answer else 0.0  # noqa: E731
    return dataclasses.replace(made, task=dataclasses.replace(made.task, score=score))


def test_the_commands_in_order(graded, tmp_path, capsys, monkeypatch):
    """As in the README: after the first, each takes from its file what the run is."""
    out, where = tmp_path / "calibration.json", tmp_path / "plan.json"
    shape = graded.model.config
    (tmp_path / "config.json").write_text(json.dumps(to_hf(shape)))
    for module in (calibrate_command, accept_command):
        monkeypatch.setattr(module, "load_parts", lambda *args: graded)
    codecs = (hl.Compress("int8", tile=32),)  # one, for a small menu
    monkeypatch.setattr("hilore_jax.planning.solve.recommended_codecs", lambda: codecs)

    sizes = [text for name, n in SIZES.items() for text in (f"--{name.replace('_', '-')}", str(n))]
    measured = ["--microbatches", "2", "--passes", "20", "--policies", "0", "--also", UP]
    model = ["--model", str(tmp_path)]
    assert cli.main(["calibrate", *model, *sizes, *measured, "--out", str(out)]) == 0
    made = hl.Calibration.load(out)
    assert made.compilations <= 3 and {m.block for m in made.measured} == {0, 1}
    said = capsys.readouterr()
    assert "calibration of 2 blocks" in said.out and "sampling 2 microbatches" in said.err

    budgets = ["--target", "cpu", "--memory", "9x-gc", "--risk", "0.9"]
    assert cli.main(["plan", "--calibration", str(out), *budgets, "--out", str(where)]) == 0
    said = capsys.readouterr().err
    assert f"taken from {out}: --model {tmp_path}" in said and "--batch 2x16" in said
    assert re.search(r"compilation 1: 2 x gc: \d+\.\d s, peak 0\.\d{3} GiB", said)
    assert Plan.load(where).block_risks is not None

    assert cli.main(["accept", str(where), "--group", "4", "--updates", "1", "--limit", "0.9"]) == 0
    accepted = Plan.load(where)
    assert accepted.accepted
    said = capsys.readouterr()
    assert "accepted: peak" in said.out and "--prompts 1" in said.err
    assert re.search(r"step 1: exact gradient of an update: \d+\.\d s", said.err)
    assert "gradient of an update under the plan: " in said.err

    trained = []
    monkeypatch.setattr(trainer, "train", lambda c: (trained.append(c), Stopped)[1])
    run = ["--group", "4", "--run-dir", str(tmp_path / "run")]
    assert cli.main(["train", "--plan", str(where), *run]) == 0
    check_model(trained[0], shape)
    with pytest.raises(ValueError, match=r"tokens of a sequence: the plan has 16, this run has 24"):
        check_model(dataclasses.replace(trained[0], prompt_length=20), shape)
    training = TrainConfig(plan=str(where))
    assert run_policies(training, graded.model.config) == accepted.policies

    found = {**(accepted.acceptance or {}), "accepted": False, "reason": "it is bad"}
    rejected = dataclasses.replace(accepted, accepted=False, acceptance=found)
    rejected.save(where)
    with pytest.raises(ValueError, match=r"was rejected: it is bad.*--allow-rejected"):
        run_policies(training, graded.model.config)
    allowed = dataclasses.replace(training, allow_rejected=True)
    assert run_policies(allowed, graded.model.config) == accepted.policies
    larger = dataclasses.replace(graded.model.config, n_layers=3)
    with pytest.raises(ValueError, match="blocks: the plan has 2, this run has 3"):
        run_policies(training, larger)


def test_rollouts_without_a_difference_are_named(graded):
    flat = dataclasses.replace(graded.task, score=lambda answer, item: 0.0)
    config = CalibrateConfig(**SIZES).training()
    with pytest.raises(ValueError, match=r"of 12 prompts .* only 0 have rewards that differ"):
        real_updates(config, dataclasses.replace(graded, task=flat), 1)
    found = real_updates(config, graded, 1)
    assert found.updates[0].tokens.shape == (2, 2, 16)
    assert float(jax.numpy.abs(found.updates[0].advantages).max()) > 0.1


@pytest.fixture
def no_work(monkeypatch):
    """Whatever samples or loads weights is an error."""

    def work(*args, **how):
        raise AssertionError("too late")

    for module in (calibrate_command, accept_command):
        monkeypatch.setattr(module, "real_updates", work)
    return work


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"microbatches": 3}, "--microbatches 3: expected a multiple of 2"),
        ({"microbatches": 0}, "--microbatches 0: expected a multiple of 2"),
        ({"passes": 3}, "passes=3: allow more passes"),
        ({"also": ("mlp_up=store",)}, "0 policies that compress"),
        ({"also": ("mlp_u=int8",)}, "mlp_u"),
        ({"also": ("none.json",)}, r"--also none\.json: no such file"),
        ({"policies": -1}, "--policies -1"),
        ({"target": "cuda:h1"}, "unknown target"),
        ({"out": "no/such.json"}, r"--out no/such\.json: the folder no does not exist"),
        ({"out": "."}, r"--out \. is a folder"),
        ({"out": "other.json"}, r"other\.partial\.json holds measurements of another calibration"),
        ({"out": "policy.json"}, "would replace a policy by a calibration"),
    ],
)
def test_calibrate_checks_before_sampling(graded, no_work, changes, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("policy.json").write_text(hl.Policy({}).to_json())
    Path("other.partial.json").write_text(json.dumps(OTHERS))
    quick = {"microbatches": 2, "passes": 20, "policies": 0, "also": (UP,)}
    monkeypatch.setattr(calibrate_command, "load_parts", lambda config, also: loaded(config, also))

    def loaded(config, also):
        check_model(config, graded.model.config, also)
        return graded

    with pytest.raises((ValueError, FileNotFoundError), match=message):
        run_calibrate(CalibrateConfig(**SIZES, **{**quick, **changes}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"plan": "none.json"}, r"--plan none\.json: no such file"),
        ({"plan": "policy.json"}, r"--plan policy\.json is not a plan file: it holds a policy"),
        ({"updates": 0}, "--updates 0: expected at least one"),
        ({"limit": 0.0}, "--limit 0.0: expected a relative error above 0"),
        ({"first": -1}, "--first -1: expected a position"),
        ({"measure": -1}, "--measure -1: expected a number of turns >= 0"),
        ({"out": "no/plan.json"}, r"--out no/plan\.json: the folder no does not exist"),
        ({"out": "policy.json"}, "would replace a policy by a plan"),
        ({"lora_rank": 3}, r"LoRA rank: the plan has 0, this run has 3\. Give --lora-rank 0"),
    ],
)
def test_accept_checks_before_sampling(graded, no_work, changes, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("policy.json").write_text(hl.Policy({}).to_json())
    shape = graded.model.config
    facts = training_update(shape, AcceptOptions(**SIZES, plan="").training()).facts()
    gc = hl.Policy({})
    made = bare_plan([gc] * 2, [Entry(gc, 0, 0.0, 0, 0, 0.0)])
    dataclasses.replace(made, fingerprint={"blocks": "2", **made.fingerprint, **facts}).save(
        "p.json"
    )

    def loaded(config):
        lora = LoraConfig(rank=config.lora_rank) if config.lora_rank else None
        check_model(config, dataclasses.replace(shape, lora=lora))
        return no_work()

    monkeypatch.setattr(accept_command, "load_parts", loaded)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        run_accept(AcceptOptions(**{**SIZES, "plan": "p.json", **changes}))


def test_an_interrupted_calibration_says_how_to_go_on(graded, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("micro_loss", "microbatches"):
        monkeypatch.setattr(calibrate_command, name, lambda *args: ())

    def interrupted(*args, resume, **how):
        Path(resume).write_text(json.dumps({"identity": how["policies"][0].to_json()}))
        raise KeyboardInterrupt

    class Data:
        params = frozen = None

    monkeypatch.setattr(calibrate_command, "real_updates", lambda *args, **how: Data)
    monkeypatch.setattr(calibrate_command, "calibrate", interrupted)
    config = CalibrateConfig(
        **SIZES, microbatches=2, passes=20, policies=0, also=(UP,), out="c.json"
    )
    with pytest.raises(KeyboardInterrupt, match=r"kept in c\.partial\.json, and the same command"):
        run_calibrate(config, graded)


def test_settings_are_checked_before_sampling(tmp_path):
    with pytest.raises(ValueError, match=r"group must be >= 2"):
        run_calibrate(CalibrateConfig(group=1))
    with pytest.raises(ValueError, match=r"--plan none\.json: no such file"):
        check(TrainConfig(plan="none.json", run_dir=str(tmp_path)))


def test_measured_turns_start_from_the_weights_in_each_plans_stacks(graded, monkeypatch):
    config = AcceptOptions(**SIZES, plan="plan.json").training()
    update = training_update(graded.model.config, config)
    graphdef, state = init_state(graded.model, optax.identity(), jax.random.key(0))
    policies = (hl.parse_policy(UP), hl.Policy({}))
    batch = jax.tree.map(lambda s: jax.numpy.zeros(s.shape, s.dtype), update.arguments(policies)[1])
    data = Measured(graphdef, state.params, state.frozen, (batch,))
    monkeypatch.setattr(accept_command, "profile_plan", lambda *args, **how: (args, how))
    found: Any = accept_command.profiler(update, data, 3)({"a": policies})
    (fn, arguments, plans), how = found
    assert (fn, plans, how) == (update, {"a": policies}, {"repeats": 3})
    made = arguments(policies)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), made)
    assert shapes == update.arguments(policies)
    # One stack for each policy, of the model's own weights; a turn may consume them.
    jax.tree.map(lambda x: x.delete(), made[0])
    assert len(jax.tree.leaves(made[0].params)) > len(jax.tree.leaves(state.params))
    assert all(bool(jax.numpy.isfinite(x).all()) for x in jax.tree.leaves(state.params))
