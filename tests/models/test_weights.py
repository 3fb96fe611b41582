"""Hugging Face folders: round trips, layouts by hand, damage told before data is read."""

import json
from dataclasses import replace

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from hilore_jax.models import bundled, hf, params, weights
from hilore_jax.models import safetensors as st
from hilore_jax.models.config import DecoderConfig, LoraConfig, RopeScaling
from hilore_jax.models.decoder import Decoder
from hilore_jax.models.shapes import tensor_shapes, to_hf
from hilore_jax.models.tensors import LazyTensors

LLAMA = DecoderConfig(
    vocab_size=23, d_model=8, d_ff=12, n_layers=3, n_heads=4, n_kv_heads=2, head_dim=6, max_seq=32
)
FAMILIES = {
    "llama": LLAMA,
    "llama3": replace(LLAMA, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 8), tie_embeddings=False),
    "qwen2": replace(LLAMA, qkv_bias=True, tie_embeddings=False),
    "qwen3": replace(LLAMA, qk_norm=True),
}
TOKENS = jnp.array([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])


def arrays_of(config: DecoderConfig, seed: int = 0, dtype=np.float32) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {k: rng.normal(size=s).astype(dtype) for k, s in tensor_shapes(config).items()}


def decoder(config: DecoderConfig, segments=None) -> Decoder:
    """A decoder of random tensors; cheaper than its own initialization, which compiles."""
    return params.to_params(LazyTensors.from_arrays(arrays_of(config)), config, segments=segments)


def write(folder, config: DecoderConfig, arrays: dict[str, np.ndarray]):
    """A folder as other tools write it, through the reference implementation of the format."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(to_hf(config)))
    safetensors.numpy.save_file(arrays, folder / "model.safetensors")
    return folder


def state_of(model: Decoder) -> dict:
    return {path: np.asarray(v[...]) for path, v in nnx.to_flat_state(nnx.state(model))}


def assert_same_state(a: Decoder, b: Decoder) -> None:
    left, right = state_of(a), state_of(b)
    assert left.keys() == right.keys()
    for path in left:
        assert left[path].dtype == right[path].dtype
        np.testing.assert_array_equal(left[path], right[path], err_msg=str(path))


@pytest.mark.parametrize("family", FAMILIES)
def test_load_then_save_gives_the_same_tensors(tmp_path, family):
    config = FAMILIES[family]
    arrays = arrays_of(config)
    model = weights.load(write(tmp_path / "a", config, arrays))
    assert model.config == config
    weights.save_hf(model, tmp_path / "b")
    saved = safetensors.numpy.load_file(tmp_path / "b" / "model.safetensors")
    assert saved.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(saved[name], array, err_msg=name)
    again = weights.load(tmp_path / "b")
    assert_same_state(again, model)
    assert again.config == config


def test_places_in_the_tree_by_hand(tmp_path):
    config = FAMILIES["qwen2"]
    arrays = arrays_of(config)
    model = weights.load(write(tmp_path / "m", config, arrays), segments=(2, 1))
    assert model.segment_lengths == (2, 1)
    first, last = model.segments
    layer = "model.layers.{}.{}"
    same = np.testing.assert_array_equal
    same(model.embedding[...], arrays["model.embed_tokens.weight"])
    assert model.head is not None
    same(model.head[...], arrays["lm_head.weight"])
    same(model.norm.scale[...], arrays["model.norm.weight"])
    same(first.q_proj.kernel[...][1], arrays[layer.format(1, "self_attn.q_proj.weight")].T)
    same(last.down_proj.kernel[...][0], arrays[layer.format(2, "mlp.down_proj.weight")].T)
    same(last.v_proj.bias[...][0], arrays[layer.format(2, "self_attn.v_proj.bias")])
    same(first.attn_norm.scale[...][0], arrays[layer.format(0, "input_layernorm.weight")])
    same(last.mlp_norm.scale[...][0], arrays[layer.format(2, "post_attention_layernorm.weight")])


@pytest.mark.parametrize("segments", [(3,), (1, 2), (1, 1, 1)])
def test_segments_hold_the_same_tensors(segments):
    model = decoder(LLAMA, segments)
    assert model.segment_lengths == segments
    back = params.from_params(model)
    for name, array in arrays_of(LLAMA).items():
        np.testing.assert_array_equal(back[name], array)


def test_segments_that_do_not_sum_to_the_layers(tmp_path):
    folder = write(tmp_path / "m", LLAMA, arrays_of(LLAMA))
    with pytest.raises(ValueError, match="segments"):
        weights.load(folder, segments=(2, 2))


@pytest.mark.parametrize("source", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_sources_of_each_dtype_round_once(tmp_path, source):
    arrays = arrays_of(LLAMA, dtype=source)
    folder = write(tmp_path / "m", LLAMA, arrays)
    name = "model.layers.0.mlp.up_proj.weight"
    exact = weights.load(folder)
    np.testing.assert_array_equal(
        exact.segments[0].up_proj.kernel[...][0], arrays[name].T.astype(np.float32)
    )
    half = weights.load(folder, dtype="bfloat16")
    kernel = half.segments[0].up_proj.kernel[...]
    assert kernel.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(kernel[0], arrays[name].T.astype(ml_dtypes.bfloat16))
    mixed = weights.load(folder, dtype="bfloat16", param_dtype="float32")
    assert mixed.config.dtype == "bfloat16"
    assert mixed.embedding[...].dtype == np.float32
    assert mixed.segments[0].up_proj.kernel[...].dtype == np.float32


def test_saving_in_another_dtype(tmp_path):
    model = decoder(LLAMA)
    weights.save_hf(model, tmp_path / "m", dtype="bfloat16")
    entries = st.read_header(tmp_path / "m" / "model.safetensors")
    assert {entry.dtype for entry in entries.values()} == {"BF16"}
    assert json.loads((tmp_path / "m" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    again = weights.load(tmp_path / "m", dtype="bfloat16")
    rounded = np.asarray(model.embedding[...]).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(again.embedding[...], rounded)


def test_a_sharded_folder(tmp_path):
    model = decoder(LLAMA)
    weights.save_hf(model, tmp_path / "m", max_shard_bytes=1500)
    index = json.loads((tmp_path / "m" / "model.safetensors.index.json").read_text())
    files = sorted(p.name for p in (tmp_path / "m").glob("*.safetensors"))
    count = len(files)
    assert count > 2
    assert files == [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    held = {f: safetensors.numpy.load_file(tmp_path / "m" / f) for f in files}
    assert all(sum(a.nbytes for a in t.values()) <= 1500 for t in held.values())
    assert index["weight_map"] == {name: f for f, t in held.items() for name in t}
    assert index["metadata"]["total_size"] == sum(
        a.nbytes for t in held.values() for a in t.values()
    )
    assert_same_state(weights.load(tmp_path / "m"), model)

    (tmp_path / "m" / files[1]).unlink()
    with pytest.raises(FileNotFoundError, match=rf"1 of {count} shards .* missing: {files[1]}"):
        weights.load(tmp_path / "m")


def test_a_tensor_larger_than_a_shard_stands_alone(tmp_path):
    weights.save_hf(decoder(LLAMA), tmp_path / "m", max_shard_bytes=1)
    count = len(tensor_shapes(LLAMA))
    assert len(list((tmp_path / "m").glob("*.safetensors"))) == count


def test_an_index_of_another_download(tmp_path):
    weights.save_hf(decoder(LLAMA), tmp_path / "m", max_shard_bytes=1500)
    path = tmp_path / "m" / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    moved, there = "model.norm.weight", index["weight_map"]["model.embed_tokens.weight"]
    index["weight_map"][moved] = there
    path.write_text(json.dumps(index))
    with pytest.raises(ValueError, match=rf"{there} lacks tensor {moved}"):
        weights.load(tmp_path / "m")


def test_wrong_missing_and_unexpected_tensors_are_all_named(tmp_path):
    arrays = arrays_of(LLAMA)
    arrays["model.layers.1.mlp.up_proj.weight"] = np.zeros((12, 9), np.float32)
    del arrays["model.layers.0.self_attn.k_proj.weight"]
    arrays["model.layers.0.self_attn.k_proj.bias"] = np.zeros(12, np.float32)
    folder = write(tmp_path / "m", LLAMA, arrays)
    with pytest.raises(ValueError, match="does not hold") as error:
        weights.load(folder)
    text = str(error.value)
    assert "model.layers.1.mlp.up_proj.weight: found shape (12, 9), expected (12, 8)" in text
    assert "missing 1 tensor(s): model.layers.0.self_attn.k_proj.weight" in text
    assert "unexpected 1 tensor(s): model.layers.0.self_attn.k_proj.bias" in text
    assert str(folder) in text


def test_names_are_checked_before_any_data_is_read(tmp_path, monkeypatch):
    arrays = arrays_of(LLAMA)
    del arrays["model.norm.weight"]
    folder = write(tmp_path / "m", LLAMA, arrays)
    monkeypatch.setattr(st.Entry, "read", lambda self: pytest.fail("read data"))
    with pytest.raises(ValueError, match=r"missing 1 tensor\(s\): model.norm.weight"):
        weights.load(folder)


def test_copies_that_old_checkpoints_hold_are_passed_over(tmp_path):
    arrays = arrays_of(LLAMA)
    arrays["lm_head.weight"] = arrays["model.embed_tokens.weight"]
    arrays["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(3, np.float32)
    assert weights.load(write(tmp_path / "m", LLAMA, arrays)).head is None
    untied = replace(LLAMA, tie_embeddings=False)
    del arrays["lm_head.weight"]
    with pytest.raises(ValueError, match=r"missing 1 tensor\(s\): lm_head.weight"):
        weights.load(write(tmp_path / "m", untied, arrays))


def test_a_file_cut_short(tmp_path):
    folder = write(tmp_path / "m", LLAMA, arrays_of(LLAMA))
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    last = max(st.read_header(path).items(), key=lambda item: item[1].end)[0]
    path.write_bytes(whole[:-1])
    with pytest.raises(
        ValueError, match=rf"{path} is cut short: tensor {last} .*Download it again"
    ):
        weights.load(folder)
    for size in (0, 5, 8, 200):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match="cut short or is no safetensors"):
            weights.load(folder)


def test_weights_in_another_format(tmp_path):
    folder = write(tmp_path / "m", LLAMA, arrays_of(LLAMA))
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match=r"no model.safetensors .* save_pretrained"):
        weights.load(folder)


def test_an_unknown_name_lists_those_known():
    with pytest.raises(FileNotFoundError, match=r"'smollm9'.*smollm2-135m-instruct"):
        weights.load("smollm9")
    assert list(bundled.BUNDLED) == ["smollm2-135m-instruct"]


def test_a_folder_that_holds_a_model_is_kept(tmp_path):
    folder = write(tmp_path / "m", LLAMA, arrays_of(LLAMA))
    before = (folder / "model.safetensors").read_bytes()
    with pytest.raises(FileExistsError, match=r"config.json, model.safetensors"):
        weights.save_hf(decoder(LLAMA), folder)
    assert (folder / "model.safetensors").read_bytes() == before


def test_adapters_are_added_refused_and_folded_in(tmp_path):
    folder = write(tmp_path / "m", LLAMA, arrays_of(LLAMA))
    lora = LoraConfig(rank=2, alpha=6.0, targets=("q_proj", "down_proj"))
    model = weights.load(folder, lora=lora, segments=(1, 2), seed=5)
    assert model.config.lora == lora
    with pytest.raises(ValueError, match=r"LoRA adapters \(rank 2 on q_proj, down_proj\)"):
        weights.save_hf(model, tmp_path / "b")
    assert not (tmp_path / "b").exists()

    rng = np.random.default_rng(1)
    for stack in model.segments:
        for linear in (stack.q_proj, stack.down_proj):
            linear.lora_b[...] = rng.normal(size=linear.lora_b.shape).astype(np.float32) * 0.1
    weights.save_hf(model, tmp_path / "b", merge_lora=True)
    saved = safetensors.numpy.load_file(tmp_path / "b" / "model.safetensors")
    name, base = "model.layers.2.mlp.down_proj.weight", arrays_of(LLAMA)
    adapter = model.segments[1].down_proj
    a, b = (np.asarray(f[...][1], np.float64) for f in (adapter.lora_a, adapter.lora_b))
    np.testing.assert_allclose(saved[name], base[name] + 3.0 * (a @ b).T, atol=1e-5)
    untouched = "model.layers.2.mlp.up_proj.weight"
    np.testing.assert_array_equal(saved[untouched], base[untouched])
    merged = weights.load(tmp_path / "b").logits(TOKENS)
    np.testing.assert_allclose(merged, model.logits(TOKENS), atol=1e-4, rtol=1e-4)


def test_seed_of_the_adapters(tmp_path):
    folder = write(tmp_path / "m", LLAMA, arrays_of(LLAMA))

    def a(seed):
        model = weights.load(folder, lora=LoraConfig(rank=2, targets=("q_proj",)), seed=seed)
        return np.asarray(model.segments[0].q_proj.lora_a[...])

    np.testing.assert_array_equal(a(0), a(0))
    assert not np.array_equal(a(0), a(1))


def test_lazy_tensors():
    tensors = LazyTensors.from_arrays({"a": np.ones((2, 3))})
    assert (len(tensors), list(tensors), tensors.shapes) == (1, ["a"], {"a": (2, 3)})
    with pytest.raises(KeyError):
        tensors["b"]
    with pytest.raises(ValueError, match="missing 29 tensor"):
        hf.check(LazyTensors.from_arrays({}), LLAMA)
