"""Adapters as a PEFT folder, and the tokenizer's files beside exported weights."""

import json

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from hilore_jax.models import add_lora, export, merge_lora, tokenizer, weights
from hilore_jax.models.config import DecoderConfig, LoraConfig
from hilore_jax.models.params import from_params, to_params
from hilore_jax.models.shapes import tensor_shapes
from hilore_jax.models.tensors import LazyTensors

SHAPE = DecoderConfig(
    vocab_size=23, d_model=8, d_ff=12, n_layers=3, n_heads=4, n_kv_heads=2, head_dim=6, max_seq=32
)
TARGETS = ("q_proj", "down_proj")
TOKENS = np.array([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])


@pytest.fixture(scope="module")
def base():
    rng = np.random.default_rng(0)
    arrays = {k: rng.normal(size=s).astype(np.float32) for k, s in tensor_shapes(SHAPE).items()}
    return to_params(LazyTensors.from_arrays(arrays), SHAPE, segments=(1, 2))


@pytest.fixture(scope="module")
def model(base):
    made = add_lora(base, LoraConfig(rank=2, alpha=6.0, targets=TARGETS), rngs=nnx.Rngs(0))
    rng = np.random.default_rng(1)
    for stack in made.segments:
        for name in TARGETS:
            leaf = getattr(stack, name).lora_b
            leaf[...] = jnp.asarray(rng.normal(size=leaf.shape), jnp.float32)
    return made


def test_base_and_the_adapter_of_the_file_are_the_merged_weights(tmp_path, base, model):
    export.save_adapter(model, tmp_path / "a", base="the/base")
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    expected = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2, "lora_alpha": 6.0}
    expected |= {"target_modules": list(TARGETS), "base_model_name_or_path": "the/base"}
    assert expected.items() <= config.items()
    arrays = safetensors.numpy.load_file(tmp_path / "a" / "adapter_model.safetensors")
    assert len(arrays) == 2 * 3 * 2
    plain, merged = from_params(base), from_params(merge_lora(model))
    changed = 0
    for name in plain:
        prefix = "base_model.model." + name.removesuffix(".weight")
        weight = plain[name].astype(np.float64)
        if f"{prefix}.lora_A.weight" in arrays:
            a, b = (arrays.pop(f"{prefix}.lora_{x}.weight") for x in "AB")
            weight = weight + 6.0 / 2 * b.astype(np.float64) @ a
            changed += 1
        np.testing.assert_allclose(merged[name], weight, atol=1e-5, err_msg=name)
    assert changed == 6 and not arrays


def test_adapters_in_bfloat16(tmp_path, model):
    export.save_adapter(model, tmp_path, base="x", dtype="bfloat16")
    arrays = safetensors.numpy.load_file(tmp_path / "adapter_model.safetensors")
    assert {a.dtype for a in arrays.values()} == {np.dtype(ml_dtypes.bfloat16)}


def test_an_adapter_that_is_there_is_kept_and_one_that_is_not_is_refused(tmp_path, base, model):
    export.save_adapter(model, tmp_path, base="x")
    with pytest.raises(FileExistsError, match=r"holds adapter_config.json.* use a new folder"):
        export.save_adapter(model, tmp_path, base="x")
    with pytest.raises(ValueError, match="no adapters to save apart"):
        export.save_adapter(base, tmp_path / "b", base="x")
    assert not (tmp_path / "b").exists()


def test_weights_that_are_not_finite_are_named(base):
    export.check_finite(base)
    broken = weights.merge_lora_into(base)
    scale = broken.segments[1].mlp_norm.scale
    scale.set_value(scale.get_value().at[0, 1].set(jnp.nan))
    with pytest.raises(ValueError, match=r"segments.1.mlp_norm.scale is not finite"):
        export.check_finite(broken)


def test_files_of_a_folder_are_copied(tmp_path):
    (tmp_path / "from").mkdir()
    for name in ("tokenizer.json", "generation_config.json", "model.bin"):
        (tmp_path / "from" / name).write_text(name)
    written = export.save_tokenizer(tmp_path / "from", tmp_path / "to")
    assert written == ["tokenizer.json", "generation_config.json"]
    assert (tmp_path / "to" / "tokenizer.json").read_text() == "tokenizer.json"
    assert sorted(p.name for p in (tmp_path / "to").iterdir()) == sorted(written)
    with pytest.raises(FileExistsError, match=r"holds tokenizer.json"):
        export.save_tokenizer(tmp_path / "from", tmp_path / "to")


def test_a_tokenizer_of_a_gguf_file(tmp_path, monkeypatch):
    backend = tokenizer.tokenizers.Tokenizer(
        tokenizer.tokenizers.models.WordLevel({"<s>": 0, "</s>": 1, "a": 2}, unk_token="<s>")
    )
    made = tokenizer.Tokenizer(
        backend, 1, 1, 0, "{{ bos_token }}", {"bos_token": "<s>", "eos_token": "</s>"}
    )
    monkeypatch.setattr(tokenizer, "load", lambda _: made)
    export.save_tokenizer(tmp_path / "model.gguf", tmp_path / "to")
    monkeypatch.undo()
    again = tokenizer.load(tmp_path / "to")
    assert (again.eos_id, again.pad_id, again.bos_id) == (1, 1, 0)
    assert again.template == made.template and again.encode("a") == [2]
    settings = json.loads((tmp_path / "to" / "generation_config.json").read_text())
    assert settings == {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}


@pytest.mark.reference
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "changes",
    [{}, {"qkv_bias": True, "tie_embeddings": False}, {"qk_norm": True}],
    ids=["llama", "qwen2-untied", "qwen3"],
)
def test_transformers_reads_merged_weights_with_the_same_logits(tmp_path, changes, dtype):
    torch, transformers = map(pytest.importorskip, ("torch", "transformers"))
    torch.set_num_threads(1)
    config = DecoderConfig(**{**vars(SHAPE), **changes})
    rng = np.random.default_rng(0)
    arrays = {
        k: (rng.normal(size=s) * (0.3 if len(s) > 1 else 1)).astype(np.float32)
        for k, s in tensor_shapes(config).items()
    }
    base = to_params(LazyTensors.from_arrays(arrays), config)
    made = add_lora(base, LoraConfig(rank=2, targets=TARGETS), rngs=nnx.Rngs(0))
    leaf = made.segments[0].q_proj.lora_b
    leaf[...] = jnp.asarray(rng.normal(size=leaf.shape) * 0.1, jnp.float32)
    weights.save_hf(made, tmp_path / "m", merge_lora=True, dtype=dtype)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype="float32")
    with torch.no_grad():
        logits = theirs.eval()(torch.tensor(TOKENS)).logits.numpy()
    ours = weights.load(tmp_path / "m")  # of the same file, rounded alike
    np.testing.assert_allclose(np.asarray(ours.logits(jnp.asarray(TOKENS))), logits, atol=2e-5)
    bound = 2e-5 if dtype == "float32" else 0.2
    assert np.abs(np.asarray(made.logits(jnp.asarray(TOKENS))) - logits).max() <= bound
    plain = np.asarray(base.logits(jnp.asarray(TOKENS)))
    assert np.abs(plain - logits).max() > 2 * bound or dtype != "float32"
