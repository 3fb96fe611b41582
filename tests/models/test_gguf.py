"""GGUF files against the gguf package, hand-decoded blocks and hand-made damage."""

import struct
from dataclasses import replace

import numpy as np
import pytest

from hilore_jax.models import gguf, weights
from hilore_jax.models.config import DecoderConfig, RopeScaling
from hilore_jax.models.gguf_hf import config_from_gguf, hf_tensors, unpermute
from hilore_jax.models.shapes import tensor_shapes

package = pytest.importorskip("gguf")

CONFIG = DecoderConfig(
    vocab_size=40, d_model=32, d_ff=64, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8,
    rope_theta=1e4, max_seq=64,
)  # fmt: skip
RNG = np.random.default_rng(7)
GGUF_NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip


def hf_arrays(config: DecoderConfig) -> dict[str, np.ndarray]:
    return {k: RNG.normal(size=s).astype(np.float32) for k, s in tensor_shapes(config).items()}


def permute(w: np.ndarray, n_heads: int) -> np.ndarray:
    """llama.cpp's conversion: halves of a head interleaved."""
    return w.reshape(n_heads, 2, -1, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


def gguf_arrays(arrays, config: DecoderConfig, *, permuted: bool) -> dict[str, np.ndarray]:
    top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    result = {}
    for name, array in arrays.items():
        module, leaf = name.rsplit(".", 1)
        if module in top:
            result[f"{top[module]}.{leaf}"] = array
            continue
        _, _, layer, module = module.split(".", 3)
        if permuted and module.endswith(("q_proj", "k_proj")):
            array = permute(array, config.n_heads if "q_proj" in module else config.n_kv_heads)
        result[f"blk.{layer}.{GGUF_NAMES[module]}.{leaf}"] = array
    return result


@pytest.mark.parametrize(
    ("architecture", "change"),
    [
        ("llama", {}),
        ("llama", {"tie_embeddings": False}),
        ("qwen2", {"qkv_bias": True}),
        ("qwen3", {"qk_norm": True, "tie_embeddings": False}),
    ],
)
def test_config_and_tensors_of_each_architecture(write_gguf, architecture, change):
    config = replace(CONFIG, **change)
    arrays = hf_arrays(config)
    stored = gguf_arrays(arrays, config, permuted=architecture == "llama")
    file = gguf.open_gguf(write_gguf(config, stored, architecture=architecture))
    assert config_from_gguf(file) == config
    tensors = hf_tensors(file)
    assert set(tensors) == set(arrays)
    for name, array in arrays.items():
        assert tensors.shapes[name] == array.shape
        np.testing.assert_array_equal(tensors[name], array, err_msg=name)
    # Witness: the file's q rows are in another order exactly where llama.cpp reorders them.
    same = np.array_equal(
        file.read("blk.0.attn_q.weight"), arrays["model.layers.0.self_attn.q_proj.weight"]
    )
    assert same == (architecture != "llama")


def test_unpermute_by_hand():
    # one head of 6 rows: halves (0 1 2) and (3 4 5) are stored as 0 3 1 4 2 5
    stored = np.array([[0], [3], [1], [4], [2], [5]])
    assert unpermute(stored, 1).ravel().tolist() == [0, 1, 2, 3, 4, 5]
    rows = np.arange(48).reshape(24, 2)
    np.testing.assert_array_equal(unpermute(permute(rows, 3), 3), rows)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
def test_each_kind_equals_the_package(write_gguf, kind):
    # 3 rows x 96: odd counts of rows and blocks; a row of zeros, one of large values
    array = RNG.normal(size=(3, 96)).astype(np.float32)
    array[1] = 0
    array[2] *= 1e4
    path = write_gguf(CONFIG, {"blk.0.ffn_up.weight": array}, kinds={"blk.0.ffn_up.weight": kind})
    file = gguf.open_gguf(path)
    (reference,) = package.GGUFReader(path).tensors
    read = np.asarray(file.read("blk.0.ffn_up.weight"), np.float32)
    expected = package.dequantize(reference.data, reference.tensor_type)
    assert file.tensors["blk.0.ffn_up.weight"].type_name == kind
    np.testing.assert_array_equal(read, expected.reshape(3, 96))
    assert (np.array_equal(read, array)) == (kind == "F32")
    error = np.abs(read - array).max(-1) / np.maximum(np.abs(array).max(-1), 1e-9)
    assert error.max() < {"F32": 1e-9, "F16": 1e-3, "BF16": 4e-3, "Q8_0": 4e-3}.get(kind, 0.13)


def random_k_blocks(kind: str, count: int) -> np.ndarray:
    """Random bytes of Q4_K or Q6_K blocks, with finite float16 scales in their places."""
    nbytes = {"Q4_K": 144, "Q6_K": 210}[kind]
    blocks = RNG.integers(0, 256, (count, nbytes), dtype=np.uint8)
    scales = RNG.normal(size=(count, 2)).astype(np.float16)
    where = slice(0, 4) if kind == "Q4_K" else slice(208, 210)
    blocks[:, where] = scales.view(np.uint8).reshape(count, 4)[:, : where.stop - where.start]
    return blocks


def q4_k_by_hand(block: bytes) -> list[float]:
    """ggml's dequantize_row_q4_K, one element at a time."""
    d, minimum = struct.unpack("<ee", block[:4])
    packed, qs = block[4:16], block[16:]
    out = []
    for j in range(8):
        if j < 4:
            scale, low = packed[j] & 63, packed[j + 4] & 63
        else:
            scale = (packed[j + 4] & 15) | (packed[j - 4] >> 6) << 4
            low = (packed[j + 4] >> 4) | (packed[j] >> 6) << 4
        for byte in qs[32 * (j // 2) : 32 * (j // 2) + 32]:
            q = byte >> 4 if j % 2 else byte & 15
            out.append(d * scale * q - minimum * low)
    return out


def q6_k_by_hand(block: bytes) -> list[float]:
    """ggml's dequantize_row_q6_K, one element at a time."""
    low, high = block[:128], block[128:192]
    scales, (d,) = struct.unpack("<16b", block[192:208]), struct.unpack("<e", block[208:])
    out = []
    for i in range(256):
        half, part, column = i // 128, (i % 128) // 32, i % 32
        nibbles = low[64 * half + 32 * (part % 2) + column]
        bits = high[32 * half + column] >> 2 * part & 3
        q = ((nibbles >> 4 if part >= 2 else nibbles & 15) | bits << 4) - 32
        out.append(d * scales[i // 16] * q)
    return out


@pytest.mark.parametrize(("kind", "by_hand"), [("Q4_K", q4_k_by_hand), ("Q6_K", q6_k_by_hand)])
def test_k_quants_equal_the_package_and_a_block_by_hand(write_gguf, kind, by_hand):
    blocks = random_k_blocks(kind, 6)
    raw = blocks.reshape(3, -1)  # 3 rows of 512 elements
    name = "blk.0.ffn_down.weight"
    file = gguf.open_gguf(write_gguf(CONFIG, {name: raw}, kinds={name: kind}))
    read = file.read(name)
    assert read.shape == file.tensors[name].shape == (3, 512)
    np.testing.assert_array_equal(read, package.dequantize(raw, package.GGMLQuantizationType[kind]))
    for i in range(6):
        expected = by_hand(blocks[i].tobytes())
        np.testing.assert_allclose(read.reshape(6, 256)[i], expected, rtol=1e-6, atol=1e-5)


def test_other_kinds_are_refused_by_name(write_gguf):
    array = RNG.normal(size=(2, 32)).astype(np.float32)
    path = write_gguf(CONFIG, {"blk.0.ffn_up.weight": array}, kinds={"blk.0.ffn_up.weight": "Q5_0"})
    with pytest.raises(ValueError, match=r"blk.0.ffn_up.weight is of quantization type Q5_0; supp"):
        gguf.open_gguf(path)


def test_a_file_cut_short_names_the_tensor(write_gguf):
    arrays = gguf_arrays(hf_arrays(CONFIG), CONFIG, permuted=True)
    path = write_gguf(CONFIG, arrays)
    whole = path.read_bytes()
    file = gguf.open_gguf(path)
    for name in ("blk.0.attn_k.weight", "output_norm.weight"):
        tensor = file.tensors[name]
        path.write_bytes(whole[: tensor.offset + tensor.nbytes - 1])
        with pytest.raises(ValueError, match=f"cut short: tensor {name}"):
            gguf.open_gguf(path)
    for size in (0, 10, 24, 100, 300, 700):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match="cut short"):
            gguf.open_gguf(path)


def test_not_a_gguf_file(tmp_path):
    with pytest.raises(FileNotFoundError, match="no GGUF file at"):
        gguf.open_gguf(tmp_path / "none.gguf")
    (tmp_path / "x.gguf").write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(ValueError, match="found magic b'PK"):
        gguf.open_gguf(tmp_path / "x.gguf")


def test_tensors_that_do_not_fit_the_config(write_gguf):
    arrays = gguf_arrays(hf_arrays(CONFIG), CONFIG, permuted=True)
    arrays["blk.1.ffn_up.weight"] = arrays["blk.1.ffn_up.weight"][:-1]
    arrays["blk.0.attn_rot_embd"] = np.ones(4, np.float32)
    with pytest.raises(
        ValueError,
        match=r"(?s)mlp.up_proj.weight: found shape \(63, 32\), expected "
        r"\(64, 32\).*unexpected 1 tensor\(s\): blk.0.attn_rot_embd",
    ):
        weights.load(write_gguf(CONFIG, arrays))


@pytest.mark.parametrize(
    ("architecture", "keys", "message"),
    [
        ("gemma", {}, "unknown architecture gemma; supported are llama, qwen2, qwen3"),
        ("llama", {"llama.expert_count": 8}, "mixture of experts"),
        ("llama", {"llama.rope.scaling.type": "yarn"}, "rope scaling 'yarn'"),
    ],
)
def test_settings_the_decoder_does_not_cover(write_gguf, architecture, keys, message):
    arrays = {"token_embd.weight": np.zeros((40, 32), np.float32)}
    file = gguf.open_gguf(write_gguf(CONFIG, arrays, architecture=architecture, keys=keys))
    with pytest.raises(ValueError, match=message):
        config_from_gguf(file)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama_3_scaling_from_its_divisors(write_gguf, factor):
    """llama.cpp's formula for rope_freqs, transcribed."""
    config = replace(CONFIG, head_dim=64, rope_theta=5e5)
    divisors = []
    for freq in 5e5 ** (-np.arange(0, 64, 2) / 64):
        wavelength = 2 * np.pi / freq
        if wavelength < 8192 / 4:
            divisors.append(1.0)
        elif wavelength > 8192 / 1:
            divisors.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    arrays = {
        "token_embd.weight": np.zeros((40, 32), np.float32),
        "rope_freqs.weight": np.array(divisors, np.float32),
    }
    read = config_from_gguf(gguf.open_gguf(write_gguf(config, arrays)))
    assert read.rope_scaling == RopeScaling(factor, 1.0, 4.0, 8192)
    arrays["rope_freqs.weight"] = arrays["rope_freqs.weight"] * 1.5
    file = gguf.open_gguf(write_gguf(config, arrays, name="other.gguf"))
    with pytest.raises(ValueError, match=r"rope_freqs.weight holds RoPE divisors 1.5 to"):
        config_from_gguf(file)
