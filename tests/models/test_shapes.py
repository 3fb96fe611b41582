"""Shapes by family name and from config.json."""

import json
import math
from dataclasses import replace

import pytest

from hilore_jax.models import shapes
from hilore_jax.models.config import DecoderConfig, LoraConfig, RopeScaling

# Parameters of each release, as its safetensors metadata counts them (tied heads once).
PARAMETERS = {
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.1-8b": 8_030_261_248,
}
# Llama-3.2-1B-Instruct's config.json, the keys that matter.
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "vocab_size": 128256,
}
QWEN = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 21,
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def test_every_family_has_its_published_parameter_count():
    assert set(shapes.FAMILIES) == set(PARAMETERS)
    for name, count in PARAMETERS.items():
        assert sum(map(math.prod, shapes.tensor_shapes(shapes.family(name)).values())) == count


@pytest.mark.parametrize("name", shapes.FAMILIES)
def test_config_json_and_back(name):
    config = shapes.family(name)
    assert shapes.from_hf(json.loads(json.dumps(shapes.to_hf(config)))) == config


def test_published_config_files():
    assert shapes.from_hf(LLAMA) == shapes.family("llama-3.2-1b")
    assert shapes.from_hf(QWEN) == shapes.family("qwen2.5-0.5b")


def test_newer_spelling_of_rope():
    rope = {"rope_theta": 500000.0, **LLAMA["rope_scaling"]}
    newer = {k: v for k, v in LLAMA.items() if k not in ("rope_theta", "rope_scaling")}
    assert shapes.from_hf(newer | {"rope_parameters": rope}) == shapes.family("llama-3.2-1b")
    plain = newer | {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}
    config = shapes.from_hf(plain)
    assert (config.rope_theta, config.rope_scaling) == (7.0, None)


def test_defaults_of_keys_left_out():
    keys = ("num_key_value_heads", "head_dim", "rope_theta", "rope_scaling", "tie_word_embeddings")
    config = shapes.from_hf({k: v for k, v in LLAMA.items() if k not in keys})
    assert (config.n_kv_heads, config.head_dim, config.rope_theta) == (32, 64, 10000.0)
    assert not config.tie_embeddings
    qwen3 = {k: v for k, v in QWEN.items() if k != "head_dim"} | {
        "architectures": ["Qwen3ForCausalLM"]
    }
    assert shapes.from_hf(qwen3).head_dim == 128


def test_overrides():
    lora = LoraConfig(rank=4)
    config = shapes.family("qwen3-0.6b", dtype="bfloat16", lora=lora)
    assert (config.dtype, config.lora) == ("bfloat16", lora)
    assert shapes.from_hf(QWEN, max_seq=128).max_seq == 128


def test_unknown_family_lists_those_known():
    with pytest.raises(ValueError, match=r"gpt5.*smollm2-135m.*llama-3.1-8b"):
        shapes.family("gpt5")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["MistralForCausalLM"]}, "MistralForCausalLM; supported are Llama"),
        ({"architectures": None}, "unknown architecture"),
        ({"use_sliding_window": True}, "sliding-window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window"),
        ({"attention_bias": True}, "attention_bias is true"),
        ({"mlp_bias": True}, "mlp_bias is true"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"quantization_config": {"bits": 4}}, "quantized"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope type is 'yarn'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "lacks low_freq_factor, high"),
    ],
)
def test_settings_the_decoder_does_not_cover(change, message):
    with pytest.raises(ValueError, match=message):
        shapes.from_hf(QWEN | change)


def test_a_window_that_no_layer_uses_is_no_window():
    shapes.from_hf(QWEN | {"use_sliding_window": True, "max_window_layers": 24})
    shapes.from_hf(QWEN | {"layer_types": ["full_attention"] * 24})


def test_missing_key_is_named():
    with pytest.raises(ValueError, match=r"some/config.json: the key 'hidden_size' is missing"):
        shapes.from_hf(
            {k: v for k, v in QWEN.items() if k != "hidden_size"}, source="some/config.json"
        )


def test_folder(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no config.json in"):
        shapes.from_folder(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    assert shapes.from_folder(tmp_path, dtype="bfloat16").dtype == "bfloat16"


def test_no_architecture_has_bias_and_norm():
    config = replace(shapes.family("qwen3-0.6b"), qkv_bias=True)
    with pytest.raises(ValueError, match="qkv_bias and qk_norm"):
        shapes.to_hf(config)


def test_tensor_shapes_by_hand():
    config = DecoderConfig(
        vocab_size=11, d_model=6, d_ff=10, n_layers=1, n_heads=4, n_kv_heads=2, head_dim=2,
        qkv_bias=True, tie_embeddings=False, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 8192),
    )  # fmt: skip
    layer = "model.layers.0."
    assert shapes.tensor_shapes(config) == {
        "model.embed_tokens.weight": (11, 6),
        layer + "input_layernorm.weight": (6,),
        layer + "self_attn.q_proj.weight": (8, 6),
        layer + "self_attn.q_proj.bias": (8,),
        layer + "self_attn.k_proj.weight": (4, 6),
        layer + "self_attn.k_proj.bias": (4,),
        layer + "self_attn.v_proj.weight": (4, 6),
        layer + "self_attn.v_proj.bias": (4,),
        layer + "self_attn.o_proj.weight": (6, 8),
        layer + "post_attention_layernorm.weight": (6,),
        layer + "mlp.gate_proj.weight": (10, 6),
        layer + "mlp.up_proj.weight": (10, 6),
        layer + "mlp.down_proj.weight": (6, 10),
        "model.norm.weight": (6,),
        "lm_head.weight": (11, 6),
    }
