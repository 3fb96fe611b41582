"""A run's checkpoint becomes a folder that gives the trained model's logits."""

import dataclasses
import json
import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from hilore_jax import cli
from hilore_jax.models import add_lora, weights
from hilore_jax.models.config import LoraConfig
from hilore_jax.models.restack import restack
from hilore_jax.training import trainer
from hilore_jax.training.config import TrainConfig
from hilore_jax.training.export_command import ExportConfig, run_export
from hilore_jax.training.logra_config import run_shape
from hilore_jax.training.logra_state import init_logra_state
from hilore_jax.training.saver import Saver
from hilore_jax.training.step import init_state

TOKENS = jnp.array([[3, 1, 4, 1, 5]])
KEY = jax.random.key(0)


@pytest.fixture(scope="module")
def base(tiny, tmp_path_factory):
    """The base model's folder."""
    folder = tmp_path_factory.mktemp("base") / "m"
    weights.save_hf(tiny(), folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture
def run(base, tmp_path):
    """run(**settings) -> the run's folder and the model that each of its checkpoints holds."""

    def make(lengths=(2,), **settings):
        config = TrainConfig(model=str(base), run_dir=str(tmp_path / "run"), **settings)
        model = restack(weights.load(base), lengths)
        if config.adapter_rank:
            lora = LoraConfig(rank=config.adapter_rank, alpha=config.lora_alpha)
            model = add_lora(model, lora, rngs=nnx.Rngs(5))
        if config.optimizer == "logra":
            graphdef, state = init_logra_state(model, run_shape(config, model.config), KEY)
        else:
            graphdef, state = init_state(model, optax.adamw(1e-3), KEY)
        models = {}
        with Saver(tmp_path / "run" / "checkpoints", keep_latest=3) as saver:
            for step, score in ((1, 0.2), (2, 0.9), (3, 0.5)):
                move = lambda x: x + 0.05 * jnp.cos(jnp.arange(x.size)).reshape(x.shape)  # noqa: E731
                state = dataclasses.replace(
                    state, params=jax.tree.map(move, state.params), step=jnp.int32(step)
                )
                meta = {"fingerprint": config.fingerprint()}
                saver.save(step, trainer._checkpointed(state), meta, score=score)
                models[step] = nnx.merge(graphdef, state.params, state.frozen)
        return tmp_path / "run", models

    return make


def assert_same(folder, model):
    found = np.asarray(weights.load(folder).logits(TOKENS))
    np.testing.assert_allclose(found, np.asarray(model.logits(TOKENS)), atol=2e-5)


SETTINGS = {
    "lora": {"lora_rank": 2, "lengths": (1, 1)},
    "full": {"lora_rank": 0},
    "logra": {"optimizer": "logra", "rank": 3, "targets": "q_proj,down_proj"},
}


@pytest.mark.parametrize("kind", SETTINGS)
def test_every_kind_of_run(run, tmp_path, kind, capsys):
    folder, models = run(**SETTINGS[kind])
    assert cli.main(["export", str(folder), "--out", str(tmp_path / "out")]) == 0
    assert "weights after update 3; tokenizer.json" in capsys.readouterr().out
    assert_same(tmp_path / "out", models[3])
    difference = np.asarray(models[3].logits(TOKENS)) - np.asarray(models[2].logits(TOKENS))
    assert np.abs(difference).max() > 1e-3  # another checkpoint would be noticed


def test_the_checkpoint_asked_for(run, tmp_path, caplog):
    folder, models = run(lora_rank=0)
    at = lambda step: ExportConfig(run_dir=str(folder), out=str(tmp_path / step), step=step)  # noqa: E731
    assert_same(run_export(at("best")), models[2])
    assert_same(run_export(at("1")), models[1])
    with pytest.raises(ValueError, match=r"--step 7; those there are of updates \[1, 2, 3\]"):
        run_export(at("7"))
    with pytest.raises(ValueError, match="expected newest, best, or an update"):
        run_export(at("last"))
    (folder / "checkpoints" / "00000003" / "meta.json").write_text("{")
    with caplog.at_level(logging.WARNING, "hilore_jax"):
        assert_same(run_export(at("newest")), models[2])
    assert "skipped the damaged checkpoint" in caplog.text
    with pytest.raises(ValueError, match="is not empty; name a new folder"):
        run_export(at("newest"))


def test_adapters_alone(run, tmp_path, base):
    folder, models = run(lora_rank=2, lengths=(1, 1))
    out = run_export(ExportConfig(run_dir=str(folder), out=str(tmp_path / "a"), adapter=True))
    config = json.loads((out / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(base) and config["r"] == 2
    arrays = weights.hf.safetensors.read_header(out / "adapter_model.safetensors")
    found = arrays["base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"].read()
    np.testing.assert_array_equal(found, np.asarray(models[3].segments[1].q_proj.lora_b[...][0]).T)


def test_what_cannot_be_exported_says_why(run, tmp_path, tiny):
    folder, _ = run(lora_rank=0)
    config = ExportConfig(run_dir=str(folder), out=str(tmp_path / "a"))
    with pytest.raises(ValueError, match="of a run without adapters; leave --adapter out"):
        run_export(dataclasses.replace(config, adapter=True))
    with pytest.raises(ValueError, match="it holds none"):
        run_export(dataclasses.replace(config, run_dir=str(tmp_path / "none")))
    with pytest.raises(FileNotFoundError, match="no model 'gone'"):
        run_export(dataclasses.replace(config, model="gone"))
    weights.save_hf(tiny(d_ff=20), tmp_path / "other")
    with pytest.raises(ValueError, match=r"does not fit the model .*(gate|up|down)_proj"):
        run_export(dataclasses.replace(config, model=str(tmp_path / "other")))
    assert not (tmp_path / "a").exists()
