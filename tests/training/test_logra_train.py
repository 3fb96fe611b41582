"""Whole LoGRA runs of a tiny model: one trace, resume, packets, plans, bad settings."""

import dataclasses
import json
import zlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hilore_jax as hl
from hilore_jax import cli
from hilore_jax.logra import FileTransport, Follower, FullSync, Packet, Sketches
from hilore_jax.models.sketched import sketched_stacks, stacked
from hilore_jax.planning.fingerprint import fingerprint
from hilore_jax.planning.menu import Entry
from hilore_jax.training import checkpoint
from hilore_jax.training import config as config_module
from hilore_jax.training.abstract import check_plan, training_update
from hilore_jax.training.accept_command import AcceptOptions, run_accept
from hilore_jax.training.config import TrainConfig, faults
from hilore_jax.training.learner import Learner
from hilore_jax.training.logra_config import run_shape, settings_of, sketches_of
from hilore_jax.training.logra_state import LograSettings
from hilore_jax.training.metrics import read_metrics
from hilore_jax.training.parts import check_model
from hilore_jax.training.plan_command import PlanConfig, abstract_update, run_plan
from hilore_jax.training.publish import Publisher, by_layer
from hilore_jax.training.trainer import train
from plans import bare_plan

SETTINGS = TrainConfig(
    prompts=2,
    group=4,
    micro_rows=4,
    prompt_length=6,
    completion_length=3,
    task="count",
    updates=3,
    optimizer="logra",
    rank=3,
    targets="q_proj,down_proj",
    update_ratio=1e-2,
    kl_budget="1e-3:1e-4",
    realized_kl_every=2,
    save_every=0,
    quiet=True,
)
GC = hl.Policy({})


@pytest.fixture(scope="module")
def shared(parts, tmp_path_factory):
    """(learner, parts, first state): the update is compiled once for all tests.

    Rewards are a hash of the text, so that every update has an advantage.
    """
    built = parts()
    score = lambda text, item: zlib.crc32(text.encode()) % 7 / 7  # noqa: E731
    built = dataclasses.replace(built, task=dataclasses.replace(built.task, score=score))
    folder = str(tmp_path_factory.mktemp("sync"))
    learner = Learner(dataclasses.replace(SETTINGS, sync=folder), built.model)
    return learner, built, jax.tree.map(jnp.copy, learner.state)


@pytest.fixture
def config(tmp_path):
    return dataclasses.replace(SETTINGS, run_dir=str(tmp_path / "run"))


@pytest.fixture
def run(shared):
    """`train` as a new process would: the learner starts from the first state again.

    Packets go to `config.sync`, or to a folder beside the run's.
    """
    learner, built, start = shared

    def begin(config, built=built, **options):
        learner.state = jax.tree.map(jnp.copy, start)
        shape = run_shape(SETTINGS, built.model.config)
        folder = config.sync or sync_of(config)
        learner.publisher = Publisher(folder, shape, (2,), config.sync_full_every)
        return train(config, built, learner=learner, **options)

    return begin


def sync_of(config):
    return f"{config.run_dir}-sync"


def lines(config):
    found = read_metrics(Path(config.run_dir) / "metrics.jsonl")
    return [{k: v for k, v in m.items() if not k.startswith("seconds/")} for m in found]


def weights(state):
    return [np.asarray(x) for x in jax.tree.leaves((state.params, state.opt_state, state.step))]


def test_a_run_is_one_trace_and_followers_have_its_weights(run, shared, config):
    done = run(config)
    metrics = lines(config)
    assert [m["n_traces"] for m in metrics] == [1, 1, 1]
    assert [m["step"] for m in metrics if "realized_kl" in m] == [1, 3]
    for line in metrics:
        assert line["predicted_kl"] <= line["kl_budget"] * 1.001 and line["nonfinite"] == 0
        assert 0 < line["update_ratio"] <= 3.01e-2 and line["grad_norm"] > 0
        # bfloat16 factors of rank 3 for out 16 and 16, against float32 16 x 16 and 24 x 16.
        assert line["sync/packet_bytes"] == 2 * 2 * 3 * (16 + 16)
        assert line["sync/full_bytes"] == 2 * 4 * 16 * (16 + 24)
    stacks = sketched_stacks(run_shape(config, shared[1].model.config), (2,))
    transport = FileTransport(sync_of(config))
    follower = Follower.start(transport.full_sync(0, timeout=0.0))
    for packet in transport.packets():
        follower = follower.apply(packet)
    assert follower.update == 3
    trained = by_layer(stacks, stacked(done.state.params, "kernel"))
    for layer, kernel in trained.items():
        np.testing.assert_array_equal(follower.kernels[layer], kernel)
    first = by_layer(stacks, stacked(shared[2].params, "kernel"))
    assert not any(np.array_equal(first[layer], trained[layer]) for layer in trained)


def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(run, config, tmp_path):
    whole = run(config)
    parted = dataclasses.replace(config, run_dir=str(tmp_path / "parted"))
    half = run(dataclasses.replace(parted, updates=2))
    resumed = run(dataclasses.replace(parted, resume=True))
    sync, other = FileTransport(sync_of(parted)), FileTransport(sync_of(config))
    names = [Packet.from_bytes(packet).run for packet in sync.packets()]
    assert names == [sync.owner()] * 3 and sync.owner() != other.owner()
    found = FullSync.from_bytes(sync.full_sync(2, timeout=0.0))  # the resumed run's start
    assert (found.update, found.run) == (2, sync.owner())
    again = [Packet.from_bytes(packet).factors for packet in other.packets()]
    for one, packet in zip(again, sync.packets(), strict=True):
        assert all(np.array_equal(one[k], f) for k, f in Packet.from_bytes(packet).factors.items())
    assert [m["step"] for m in resumed.metrics] == [3]
    ends = [weights(one.state) for one in (whole, half, resumed)]
    for want, found in zip(ends[0], ends[2], strict=True):
        np.testing.assert_array_equal(found, want)
    assert any(np.any(a != b) for a, b in zip(ends[0], ends[1], strict=True))  # the witness
    assert lines(parted) == lines(config)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": 4}, "rank: checkpoint 3, this run 4"),
        ({"seed": 5}, "seed: checkpoint 0, this run 5"),
        ({"targets": "q_proj"}, "targets: checkpoint 'q_proj,down_proj', this run 'q_proj'"),
        ({"projection": "gaussian"}, "projection: checkpoint 'rademacher', this run 'gaussian'"),
        ({"optimizer": "adamw"}, "optimizer: checkpoint 'logra', this run None"),
    ],
)
def test_a_checkpoint_of_other_sketches_is_refused_by_name(run, config, change, message):
    run(dataclasses.replace(config, updates=1))
    settings: dict[str, Any] = {"resume": True, **change}
    if "optimizer" in change:
        defaults = {f.name: f.default for f in dataclasses.fields(TrainConfig)}
        own = ("rank", "targets", "update_ratio", "kl_budget", "realized_kl_every")
        settings |= {name: defaults[name] for name in own}
    with pytest.raises(ValueError, match=message):
        run(dataclasses.replace(config, **settings))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": 0}, "rank must be >= 1, found 0"),
        ({"lora_rank": 8}, "optimizer logra and lora_rank 8: .* leave --lora out"),
        ({"kl_budget": "2e-4:0"}, "kl_budget '2e-4:0': expected the first and the last"),
        ({"kl_budget": "2e-4"}, "kl_budget '2e-4': expected"),
        ({"update_ratio": 0.0}, "update_ratio must be finite and > 0"),
        ({"kl_updates": 0}, "kl_updates must be >= 1"),
        ({"sync": "packets", "sync_full_every": -1}, "sync_full_every must be >= 0"),
        ({"sync_full_every": 2}, "sync_full_every without sync: name a folder"),
        ({"targets": "qkv"}, "targets qkv: expected all, or some of q_proj"),
        ({"skip_rows": True}, "optimizer logra with skip_rows"),
        ({"pack_by_exposure": True}, "optimizer logra with pack_by_exposure"),
        (
            {"step_control": False, "kl_budget": TrainConfig.kl_budget},
            "realized_kl_every needs step control",
        ),
        (
            {"step_control": False, "realized_kl_every": 0},
            "kl_budget 1e-3:1e-4 would do nothing .*: without step control there is no budget",
        ),
        ({"learning_rate": 1e-3}, "learning_rate 0.001 would do nothing .* add --dense adamw"),
        ({"weight_decay": 0.1}, "weight_decay 0.1 would do nothing .* no weight decays"),
        ({"lora_alpha": 16.0}, "lora_alpha 16.0 would do nothing .* there are no adapters"),
        ({"dense": "adamw", "sync": "packets"}, "packets carry the factors of sketched weights"),
        ({"dense": "adamw", "weights": "bfloat16"}, "would be lost in bfloat16"),
        ({"optimizer": "adamw"}, "rank, targets, .*: of LoGRA alone, add --optimizer logra"),
    ],
)
def test_bad_settings_are_named_before_anything_is_loaded(config, change, message):
    found = faults(dataclasses.replace(config, **change))
    assert len(found) == 1
    with pytest.raises(ValueError, match=message):
        raise ValueError(found[0])


@pytest.mark.parametrize(
    "name", ["packet-000000.safetensors", "full-000007.safetensors", "trainer-run"]
)
def test_a_folder_with_the_messages_of_another_run_is_refused(config, tmp_path, name):
    (tmp_path / name).touch()
    again = dataclasses.replace(config, sync=str(tmp_path))
    assert faults(again) == [
        f"sync '{tmp_path}' holds the messages of another run; name a new folder"
    ]
    (tmp_path / name).unlink()
    (tmp_path / "full-sync-wanted").touch()  # by a follower that was there first
    assert faults(again) == []


def test_settings_that_dense_parameters_read_are_taken(config):
    dense = dataclasses.replace(config, dense="adamw", learning_rate=1e-3, weight_decay=0.1)
    assert faults(dense) == []
    fixed = {"step_control": False, "realized_kl_every": 0, "kl_budget": TrainConfig.kl_budget}
    assert "kl_updates 9 would" in faults(dataclasses.replace(config, **fixed, kl_updates=9))[0]


@pytest.mark.parametrize(("dense", "fate"), [("frozen", "frozen"), ("adamw", "trained by AdamW")])
def test_targets_too_narrow_for_the_rank_are_said_once(config, tiny, caplog, dense, fate):
    # Of the tiny model, k_proj and v_proj are 16 x 8.
    settings = dataclasses.replace(config, rank=8, targets="all", dense=dense)
    check_model(settings, tiny().config)
    (said,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert said == (
        "targets k_proj (16, 8), v_proj (16, 8) have a side of no more than rank 8 and get no "
        f"sketch: they are {fate}. Give a lower --rank to have them sketched"
    )
    caplog.clear()
    check_model(config, tiny().config)
    plain = dataclasses.replace(config, optimizer="adamw", rank=256, targets="all")
    check_model(plain, tiny().config)
    assert not caplog.records


def test_a_plan_of_sketches_is_not_for_acceptance(tmp_path):
    facts = {"LoGRA rank": "3", "LoRA rank": "0"}
    menu = [Entry(GC, 0, 0.0, 0, 0, 0.0)]
    bare_plan((GC, GC), menu, fingerprint=facts).save(tmp_path / "plan.json")
    with pytest.raises(ValueError, match=r"plan\.json is for updates of LoGRA, .* whole gradients"):
        run_accept(AcceptOptions(plan=str(tmp_path / "plan.json")))


def test_a_folder_that_cannot_be_made_is_refused(config, tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("file", "file/sync", "link", "link/sync"):
        (found,) = faults(dataclasses.replace(config, sync=str(tmp_path / name)))
        assert "is a file, expected a folder" in found


def test_a_refused_packet_keeps_its_update_and_the_run_goes_on_elsewhere(run, shared, config):
    whole = run(dataclasses.replace(config, run_dir=config.run_dir + "-whole"))
    publisher_of, sent = Publisher.update, []

    def refuses(self, update, factors, params):
        sent.append(update)
        if update == 1:
            raise ValueError("the folder does not take it")
        return publisher_of(self, update, factors, params)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Publisher, "update", refuses)
        with pytest.raises(ValueError, match="does not take it"):
            run(config)
    assert sent == [0, 1] and [line["step"] for line in lines(config)] == [1, 2]
    assert checkpoint.steps(Path(config.run_dir) / "checkpoints") == [2]
    # Another run's folder is refused before anything is loaded, one of its own is taken.
    again = dataclasses.replace(config, resume=True, sync=sync_of(config) + "2")
    resumed = run(again)
    assert [m["step"] for m in resumed.metrics] == [3]
    for want, found in zip(weights(whole.state), weights(resumed.state), strict=True):
        np.testing.assert_array_equal(found, want)
    assert FileTransport(again.sync).owner() == FileTransport(sync_of(config)).owner()
    foreign = config.run_dir + "-whole-sync"
    (fault,) = faults(dataclasses.replace(again, sync=foreign))
    assert f"sync '{foreign}' is of the run" in fault and fault.endswith("name a new folder")
    assert faults(again) == []


def test_a_checkpoint_whose_state_is_of_another_update_is_refused(run, config):
    run(dataclasses.replace(config, updates=2))
    folder = Path(config.run_dir) / "checkpoints"
    (folder / "00000002").rename(folder / "00000001")
    meta = json.loads((folder / "00000001" / "meta.json").read_text())
    (folder / "00000001" / "meta.json").write_text(json.dumps(meta | {"step": 1}))
    with pytest.raises(ValueError, match=r"00000001 holds the state after update 2, .*says 1.*Rem"):
        run(dataclasses.replace(config, resume=True))


VALUES = {
    "rank": 4,
    "seed": 1,
    "projection": "gaussian",
    "dtype": "bfloat16",
    "targets": "q_proj",
    "update_ratio": 2e-2,
    "step_control": False,
    "kl_budget": "2e-3:1e-4",
    "kl_updates": 7,
    "dense": "adamw",
    "weights": "bfloat16",
}


@pytest.mark.parametrize(("name", "value"), VALUES.items())
def test_every_setting_is_part_of_the_run(name, value):
    other = dataclasses.replace(SETTINGS, **{name: value})
    changed = {k for k, v in other.fingerprint().items() if v != SETTINGS.fingerprint().get(k)}
    assert changed == {name}


def test_settings_and_sketches_are_those_of_the_command_line():
    config = dataclasses.replace(SETTINGS, **VALUES, realized_kl_every=5)
    assert sketches_of(config) == Sketches(rank=4, seed=1, kind="gaussian", dtype="bfloat16")
    assert settings_of(config) == LograSettings(
        update_ratio=2e-2,
        step_control=False,
        kl_budget=(2e-3, 1e-4),
        kl_updates=7,
        realized_kl_every=5,
    )


def test_a_checkpoint_of_another_generator_is_refused(run, config, monkeypatch):
    run(dataclasses.replace(config, updates=1))
    monkeypatch.setattr(config_module, "GENERATOR", "philox")
    with pytest.raises(ValueError, match=r"generator: checkpoint 'threefry2x32-20', .* 'philox'"):
        run(dataclasses.replace(config, resume=True))
    assert "projections' generator" not in TrainConfig().fingerprint()


def test_a_ladder_and_a_gate_are_refused(config):
    found = "\n".join(faults(dataclasses.replace(config, ladder="no.json", gate=True)))
    assert "optimizer logra with ladder and gate: its updates are one program" in found


def test_a_rank_that_no_map_exceeds_is_refused_with_the_shapes(config, parts):
    with pytest.raises(ValueError, match=r"rank 16 is no smaller .*q_proj.*choose a rank below 16"):
        train(dataclasses.replace(config, rank=16), parts())


def test_other_runs_have_the_settings_and_fingerprints_of_before():
    plain = TrainConfig()
    assert plain.adapter_rank == 16 and TrainConfig(optimizer="logra").adapter_rank == 0
    saved = plain.fingerprint()
    assert saved["lora_rank"] == 16 and not {"optimizer", "rank", "targets"} & saved.keys()
    assert TrainConfig(optimizer="logra").fingerprint()["rank"] == 256


def test_the_command_line_spells_them():
    line = "--optimizer logra --rank 8 --update-ratio 1e-4 --kl-budget 1e-3:1e-4 --no-step-control"
    config = cli._parse(TrainConfig, "train", [*line.split(), "--dense", "adamw"])
    assert (config.optimizer, config.rank, config.lora_rank) == ("logra", 8, None)
    assert (config.update_ratio, config.kl_budget) == (1e-4, "1e-3:1e-4")
    assert (config.step_control, config.dense) == (False, "adamw")


def test_a_plan_is_of_its_sketches(tiny):
    def update(**changes):
        config = dataclasses.replace(SETTINGS, **changes)
        return training_update(run_shape(config, tiny().config), config)

    own = update()
    blocks, args = own.blocks(), own.arguments((GC, GC))
    facts = {"blocks": blocks.count, "argnums": blocks.argnums}
    facts = fingerprint(blocks.fn, blocks.args, args, **facts) | own.facts()
    plan = bare_plan((GC, GC), [], fingerprint=facts)
    check_plan(plan, own)
    for changes, message in (
        ({"rank": 4}, r"LoGRA rank: the plan has 3, this run has 4\. Give .*--rank 3"),
        ({"optimizer": "adamw"}, r"LoGRA rank: the plan has 3, this run has 0.*--optimizer logra"),
        ({"targets": "q_proj"}, r"LoGRA targets: .*--targets q_proj,down_proj"),
        ({"projection": "gaussian"}, r"LoGRA projection: .*has gaussian\. Give --projection rad"),
        ({"dense": "adamw"}, r"without sketches: .*has frozen, .*adamw\. Give --dense frozen"),
    ):
        with pytest.raises(ValueError, match=message):
            check_plan(plan, update(**changes))
        with pytest.raises(ValueError, match=message):  # for a device that is not here
            check_plan(dataclasses.replace(plan, target="cuda:h100"), update(**changes))
    halves = dataclasses.replace(own.config, param_dtype="bfloat16")
    with pytest.raises(ValueError, match=r"LoGRA weights: .* Give --weights float32"):
        check_plan(plan, dataclasses.replace(own, config=halves))


def test_the_planners_update_keeps_rows_and_no_moments_of_entries(tmp_path):
    shape = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama",
        "vocab_size": 64, "hidden_size": 16, "intermediate_size": 24,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(shape))
    settings = PlanConfig(
        model=str(tmp_path), batch="2x8", target="cpu", optimizer="logra", rank=3, targets="up_proj"
    )
    state, _ = abstract_update(settings).arguments((GC, GC))
    assert [(x.shape, str(x.dtype)) for x in jax.tree.leaves(state.params)] == [
        ((2, 16, 24), "float32")
    ]
    shapes = [x.shape for x in jax.tree.leaves(state.opt_state)]
    assert sorted(shapes) == [(), (), (2, 24)]
    trained = abstract_update(settings).blocks().args[0]
    assert [x.shape for x in jax.tree.leaves(trained)] == [(24, 3)]
    # As it is asked for: Gaussian projections, and AdamW's two moments of all that has no sketch.
    other = abstract_update(dataclasses.replace(settings, projection="gaussian", dense="adamw"))
    assert other.facts()["LoGRA projection"] == "gaussian" and other.dense
    moments = jax.tree.leaves(other.arguments((GC, GC))[0].opt_state.dense)
    assert sum(x.shape == (64, 16) for x in moments) == 2  # of the embedding
    for changes, message in (
        ({"lora_rank": 2}, "give one or the other"),
        ({"dense": "adamw", "weights": "bfloat16"}, "would be lost in bfloat16"),
        ({"optimizer": "adamw"}, "--rank 3 --targets 'up_proj': of LoGRA alone, add --optimizer"),
    ):
        with pytest.raises(ValueError, match=message):
            run_plan(dataclasses.replace(settings, **changes))
