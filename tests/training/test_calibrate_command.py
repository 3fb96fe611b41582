"""`hilore calibrate`, a calibrated plan, `hilore accept` and `train --plan`, on a tiny model."""

import dataclasses
import json
import math
import re
import types
from pathlib import Path
from typing import Any

import jax
import optax
import pytest
from flax import nnx

import hilore_jax as hl
from hilore_jax import cli
from hilore_jax.models.config import LoraConfig
from hilore_jax.models.shapes import to_hf
from hilore_jax.planning.device_memory import DevicePeak
from hilore_jax.planning.leave_names import BlockView
from hilore_jax.planning.memory import Memory
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
from hilore_jax.training.strategy import loaded_plans
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
    # Held out is what was not calibrated on.
    again = ["accept", str(where), "--group", "4", "--updates", "1", "--first", "0"]
    assert cli.main(again) == 2
    assert "calibrated on prompts 0 to 0 of the same stream (chain_sum, seed 0)" in (
        capsys.readouterr().err
    )

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
        ({"microbatches": 3}, "microbatches must be a multiple of 2, .* found 3"),
        ({"microbatches": 0}, "microbatches must be >= 1, found 0"),
        ({"passes": 3}, "passes=3: allow more passes"),
        ({"also": ("mlp_up=store",)}, "0 policies that compress"),
        ({"also": ("mlp_u=int8",)}, "mlp_u"),
        ({"also": ("none.json",)}, r"--also none\.json: no such file"),
        ({"policies": -1}, "policies must be >= 0, found -1"),
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
        ({"updates": 0}, "updates must be >= 1, found 0"),
        ({"limit": 0.0}, "limit must be finite and > 0, found 0.0"),
        ({"first": -1}, "first must be >= 0, found -1"),
        ({"measure": -1}, "measure must be >= 0, found -1"),
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


@pytest.fixture
def held_out(graded, monkeypatch):
    """Two updates of exposures that a test sets, and gradients of norm 1 without compiling any."""
    config = AcceptOptions(**SIZES, plan="").training()
    update = training_update(graded.model.config, config)
    batch = update.arguments((GC,) * 2)[1]
    batch = jax.tree.map(lambda s: jax.numpy.ones(s.shape, s.dtype), batch)
    seen: Any = types.SimpleNamespace(events=[], exposures=[0.4, 0.4], errors={}, peaks=None)
    seen.mixed, seen.uneven, seen.masks = 0.0, False, None

    def real(*args, **how):
        seen.events.append("sampled")
        numbered = [dataclasses.replace(batch, logp_old=i * batch.logp_old) for i in range(2)]
        if seen.masks is not None:  # of the microbatches
            mask = jax.numpy.broadcast_to(seen.masks, batch.completion_mask.shape)
            numbered = [dataclasses.replace(each, completion_mask=mask) for each in numbered]
        return Measured(nnx.graphdef(graded.model), None, None, tuple(numbered))

    def gradients(policies, batch):
        error = seen.errors.get(policies[0], 0.0)
        which = int(batch.logp_old[0, 0, 0])
        calm = seen.exposures[which] / (4 if seen.uneven else 1)
        return {"w": jax.numpy.array([1.0, error])}, [calm, seen.exposures[which]]

    def device_peak(update, policies):
        seen.events.append(policies)
        found = None if seen.peaks is None else seen.peaks[policies]
        if isinstance(found, Exception):
            raise found
        return found

    def compiled(update, target, policies):
        return Memory(10, 0, 0, 0, 0, 0)

    monkeypatch.setattr(accept_command, "real_updates", real)
    monkeypatch.setattr(accept_command, "update_gradients", lambda *args: gradients)

    def mixed(policies, batch):
        seen.events.append(policies)
        return {"w": jax.numpy.array([1.0, seen.mixed])}

    monkeypatch.setattr(accept_command, "mixed_gradients", lambda *args: mixed)
    monkeypatch.setattr(accept_command, "device_peak", device_peak)
    monkeypatch.setattr(accept_command, "compiled_update", compiled)
    slower = lambda policy: 9.0 - len(tuple(policy))  # noqa: E731  every name pays
    view = BlockView(lambda policy: Entry(policy, 0, slower(policy), 0, 0, 0.0), str)
    monkeypatch.setattr(accept_command, "block_view", lambda *args: view)
    seen.facts = {"jax": jax.__version__, "blocks": "2", **update.facts()}
    return seen


GC, INT8 = hl.Policy({}), hl.parse_policy(UP)


def made_for(facts, policy, exposure=1.0, peak=5):
    menu = Entry(GC, 0, 2.0, 1, 1, 0.0), Entry(INT8, 8, 1.0, 0, 0, 0.0)
    risks, memory = ((0.0, 0.001),) * 2, Memory(peak, 0, 0, 0, 0, 0)
    fields = {"fingerprint": facts, "block_risks": risks, "exposure": exposure}
    return bare_plan([policy] * 2, menu, budget=10, memory=memory, **fields)


def test_accept_takes_a_ladder_and_leaves_buckets_without_updates(
    graded, held_out, tmp_path, monkeypatch, capsys
):
    path = tmp_path / "ladder.json"
    made = [made_for(held_out.facts, INT8, e) for e in (1.0, 2.0, 4.0)]
    edges = (1.0, 2.0, 4.0, math.inf)
    hl.Ladder(edges, (*made, made_for(held_out.facts, GC)), share=0.5).save(path)
    taken = []
    monkeypatch.setattr(accept_command, "load_parts", lambda c: (taken.append(c), graded)[1])
    held_out.exposures, held_out.errors = [0.4, 1.5], {INT8: 0.5}
    command = ["accept", str(path), "--group", "4"]
    assert cli.main(command) == 1  # a plan was rejected
    assert taken[0].ladder == str(path) and taken[0].allow_rejected and not taken[0].plan
    assert (taken[0].micro_rows, taken[0].prompts) == (2, 1)  # from the ladder
    found = hl.Ladder.load(path)
    assert [plan.accepted for plan in found.plans] == [False, False, None, None]
    out = capsys.readouterr().out
    assert "bucket up to exposure 1: rejected: its mean gradient error of 0.5" in out
    assert "bucket up to exposure 4: not tried, none of the 2 updates has its exposure" in out
    held_out.errors = {INT8: 0.01}
    assert cli.main([*command, "--out", str(tmp_path / "new.json")]) == 0
    found = hl.Ladder.load(tmp_path / "new.json")
    assert [plan.accepted for plan in found.plans] == [True, True, None, None]
    # Calm microbatches have their own bucket's plan, and the whole is held to the limit.
    held_out.mixed, held_out.uneven = 0.5, True
    half = dataclasses.replace(made[1], policies=(INT8, GC))
    hl.Ladder(edges, (made[0], half, *found.plans[2:]), share=0.5).save(path)
    rejected = tmp_path / "mixed.json"
    assert cli.main([*command, "--out", str(rejected)]) == 1
    assert [plan.accepted for plan in hl.Ladder.load(rejected).plans] == [False, False, None, None]
    with pytest.raises(ValueError, match=r"was rejected: .*own bucket's plan.*--allow-rejected"):
        loaded_plans(TrainConfig(ladder=str(rejected)), graded.model.config)
    # Microbatches with half of the tokens: what was planned for.
    assert "bucket up to exposure 1: accepted: peak 10 of 10 bytes" in capsys.readouterr().out


def test_accept_measures_on_a_device_that_counts_and_before_anything_else(
    graded, held_out, tmp_path, capsys
):
    path = str(tmp_path / "plan.json")
    made_for(held_out.facts, INT8).save(path)
    options = AcceptOptions(**SIZES, plan=path)
    (made,) = run_accept(options, graded)
    assert made.accepted and held_out.events == [(INT8, INT8), "sampled"]
    said = capsys.readouterr()
    assert "only compiled peaks are compared" in said.err and "it counts no memory" in said.err
    assert "peak 10 of 10 bytes, compiled only" in said.out
    for nbytes, accepted in ((10, True), (11, False)):
        held_out.peaks, held_out.events = {(INT8, INT8): DevicePeak(nbytes, True)}, []
        (made,) = run_accept(options, graded)
        assert made.accepted is accepted and made.acceptance is not None
        assert (made.acceptance["peak"], made.acceptance["measured"]) == (10, nbytes)
        assert held_out.events == [(INT8, INT8), "sampled"]  # once, and first
        said = capsys.readouterr()
        assert "only compiled" not in said.err and f"{nbytes} measured" in said.out.replace(
            " bytes measured", " measured"
        )
    # A plan for another device: nothing here can be measured, or compiled again.
    other = dataclasses.replace(made_for(held_out.facts, INT8, peak=7), target="cuda:h200")
    other.save(path)
    held_out.events.clear()
    (made,) = run_accept(options, graded)
    assert made.acceptance is not None and made.acceptance["peak"] == 7
    assert held_out.events == ["sampled"]
    assert "only compiled peaks are compared" in (err := capsys.readouterr().err)
    assert "made for cuda:h200" in err


def test_a_ladders_plans_are_measured_from_the_least_peak_up(graded, held_out, tmp_path):
    path = str(tmp_path / "ladder.json")
    high, low = made_for(held_out.facts, INT8, 2.0, peak=9), made_for(held_out.facts, GC, peak=3)
    hl.Ladder((1.0, 2.0, math.inf), (high, low, low), share=0.5).save(path)
    held_out.peaks = {(INT8, INT8): DevicePeak(9, True), (GC, GC): DevicePeak(3, True)}
    run_accept(AcceptOptions(**SIZES, plan=path), graded)
    assert held_out.events == [(GC, GC), (INT8, INT8), "sampled"]


def test_a_ladders_microbatches_have_their_own_shares_of_tokens(graded, held_out, tmp_path, capsys):
    path = str(tmp_path / "ladder.json")
    made = [made_for(held_out.facts, INT8, e) for e in (1.0, 2.0)]
    hl.Ladder((1.0, 2.0, math.inf), (*made, made_for(held_out.facts, GC)), share=0.5).save(path)
    held_out.exposures = [0.9, 0.9]
    # One token of five in the first: at 0.9 it is as one of half of them at 1.42.
    held_out.masks = jax.numpy.array([[[True, False, False, False]], [[True] * 4]])
    run_accept(AcceptOptions(**SIZES, plan=path), graded)
    out = capsys.readouterr().out
    assert "bucket up to exposure 1: not tried" in out and "exposure 2: accepted" in out


def test_a_ladder_of_which_nothing_is_tried_is_not_accepted(graded, held_out, tmp_path, capsys):
    path = tmp_path / "ladder.json"
    low, exact = made_for(held_out.facts, INT8), made_for(held_out.facts, GC)
    hl.Ladder((1.0, math.inf), (low, exact), share=0.5).save(path)
    held_out.exposures = [3.0, 4.0]
    before = path.read_text()
    with pytest.raises(ValueError, match=r"nothing of the ladder was tried: none of the 2 updates"):
        run_accept(AcceptOptions(**SIZES, plan=str(path)), graded)
    assert "accepted" not in capsys.readouterr().out and path.read_text() == before
    hl.Ladder((math.inf,), (exact,), share=0.5).save(path)
    held_out.events.clear()
    with pytest.raises(ValueError, match="there is nothing to try"):
        run_accept(AcceptOptions(**SIZES, plan=str(path)), graded)
    assert held_out.events == []


def test_a_plan_without_room_on_the_device_is_rejected_and_the_next_one_tried(
    graded, held_out, tmp_path
):
    path = str(tmp_path / "ladder.json")
    high, low = made_for(held_out.facts, INT8, 2.0, peak=9), made_for(held_out.facts, GC, peak=3)
    hl.Ladder((1.0, 2.0, math.inf), (high, low, low), share=0.5).save(path)
    full = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 9 bytes more")
    held_out.peaks = {(INT8, INT8): full, (GC, GC): DevicePeak(3, True)}
    held_out.exposures = [0.5, 1.5]
    first, second, _ = run_accept(AcceptOptions(**SIZES, plan=path), graded)
    assert (first.accepted, second.accepted) == (False, True) and first.acceptance is not None
    assert first.acceptance["reason"] == "out of memory: RESOURCE_EXHAUSTED: 9 bytes more"
    assert held_out.events == [(GC, GC), (INT8, INT8), "sampled"]  # the error is kept too


def test_nothing_is_measured_on_one_device_for_a_plan_of_several(
    graded, held_out, tmp_path, capsys, monkeypatch
):
    path = str(tmp_path / "plan.json")
    made_for(held_out.facts, INT8).save(path)
    held_out.peaks = {(INT8, INT8): DevicePeak(9, True)}
    cpu = accept_command.parse_target("cpu")
    several = dataclasses.replace(cpu, count=8)
    monkeypatch.setattr(accept_command, "parse_target", lambda name: several)
    (made,) = run_accept(AcceptOptions(**SIZES, plan=path), graded)
    assert held_out.events == ["sampled"] and made.acceptance is not None
    assert made.acceptance["measured"] is None
    assert "only compiled peaks are compared" in capsys.readouterr().err


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
