"""Decoder shapes by family name and from a Hugging Face ``config.json``, without weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hilore_jax.models.config import DecoderConfig, RopeScaling

# name: vocab, d_model, d_ff, layers, heads, kv heads, head_dim, tied
_SMOLLM2 = {
    "smollm2-135m": (49152, 576, 1536, 30, 9, 3, 64, True),
    "smollm2-360m": (49152, 960, 2560, 32, 15, 5, 64, True),
    "smollm2-1.7b": (49152, 2048, 8192, 24, 32, 32, 64, True),
}
_QWEN25 = {
    "qwen2.5-0.5b": (151936, 896, 4864, 24, 14, 2, 64, True),
    "qwen2.5-1.5b": (151936, 1536, 8960, 28, 12, 2, 128, True),
    "qwen2.5-3b": (151936, 2048, 11008, 36, 16, 2, 128, True),
    "qwen2.5-7b": (152064, 3584, 18944, 28, 28, 4, 128, False),
    "qwen2.5-14b": (152064, 5120, 13824, 48, 40, 8, 128, False),
    "qwen2.5-32b": (152064, 5120, 27648, 64, 40, 8, 128, False),
}
_QWEN3 = {
    "qwen3-0.6b": (151936, 1024, 3072, 28, 16, 8, 128, True),
    "qwen3-1.7b": (151936, 2048, 6144, 28, 16, 8, 128, True),
    "qwen3-4b": (151936, 2560, 9728, 36, 32, 8, 128, True),
    "qwen3-8b": (151936, 4096, 12288, 36, 32, 8, 128, False),
    "qwen3-14b": (151936, 5120, 17408, 40, 40, 8, 128, False),
    "qwen3-32b": (151936, 5120, 25600, 64, 64, 8, 128, False),
}
_LLAMA3 = {
    "llama-3.2-1b": (128256, 2048, 8192, 16, 32, 8, 64, True),
    "llama-3.2-3b": (128256, 3072, 8192, 28, 24, 8, 128, True),
    "llama-3.1-8b": (128256, 4096, 14336, 32, 32, 8, 128, False),
}
FAMILIES: tuple[str, ...] = (*_SMOLLM2, *_QWEN25, *_QWEN3, *_LLAMA3)
"""Names that `family` knows."""

_ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_MODEL_TYPES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}


def family(name: str, **overrides: Any) -> DecoderConfig:
    """The shape of a published model, by name (the instruction-tuned release's settings).

    Args:
        name: one of `FAMILIES`.
        **overrides: fields of `DecoderConfig` to set otherwise, such as ``dtype``.

    Returns:
        The config; no weights are needed.

    Raises:
        ValueError: an unknown name; the message lists those known.

    Example:
        >>> config = family("qwen2.5-1.5b", dtype="bfloat16")
        >>> config.n_layers, config.qkv_bias, config.dtype
        (28, True, 'bfloat16')
    """
    if name in _SMOLLM2:
        theta = 130000.0 if name == "smollm2-1.7b" else 100000.0
        row, rest = _SMOLLM2[name], {"rope_theta": theta, "rms_eps": 1e-5, "max_seq": 8192}
    elif name in _QWEN25:
        row = _QWEN25[name]
        rest = {"rope_theta": 1e6, "rms_eps": 1e-6, "max_seq": 32768, "qkv_bias": True}
    elif name in _QWEN3:
        row = _QWEN3[name]
        rest = {"rope_theta": 1e6, "rms_eps": 1e-6, "max_seq": 40960, "qk_norm": True}
    elif name in _LLAMA3:
        scaling = RopeScaling(8.0 if name == "llama-3.1-8b" else 32.0, 1.0, 4.0, 8192)
        rest = {"rope_theta": 5e5, "rms_eps": 1e-5, "max_seq": 131072, "rope_scaling": scaling}
        row = _LLAMA3[name]
    else:
        raise ValueError(f"unknown model family {name!r}; known are {', '.join(FAMILIES)}")
    fields = "vocab_size d_model d_ff n_layers n_heads n_kv_heads head_dim tie_embeddings".split()
    return replace(DecoderConfig(**dict(zip(fields, row, strict=True)), **rest), **overrides)


def from_folder(folder: Path | str, **overrides: Any) -> DecoderConfig:
    """Reads the shape from a Hugging Face folder's ``config.json``.

    Args:
        folder: a folder with a ``config.json``.
        **overrides: fields of `DecoderConfig` to set otherwise.

    Returns:
        The config.

    Raises:
        FileNotFoundError: the folder has no ``config.json``.
        ValueError: an architecture or a setting that the decoder does not cover.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"no config.json in {folder}; a Hugging Face model folder holds config.json and "
            "model.safetensors"
        )
    return from_hf(json.loads(path.read_text()), source=str(path), **overrides)


def from_hf(hf: Mapping[str, Any], *, source: str = "config", **overrides: Any) -> DecoderConfig:
    """Translates a Hugging Face config dict.

    Args:
        hf: the contents of a ``config.json``.
        source: where it is from, for error messages.
        **overrides: fields of `DecoderConfig` to set otherwise.

    Returns:
        The config.

    Raises:
        ValueError: an architecture or a setting that the decoder does not cover.

    Example:
        >>> hf = to_hf(family("qwen3-0.6b"))
        >>> from_hf(hf) == family("qwen3-0.6b")
        True
    """
    architecture = (hf.get("architectures") or ["(none given)"])[0]
    if architecture not in _ARCHITECTURES:
        raise ValueError(
            f"{source}: unknown architecture {architecture}; supported are "
            f"{', '.join(_ARCHITECTURES)}"
        )
    _refuse_unsupported(hf, source)
    d_model, n_heads = (
        _required(hf, "hidden_size", source),
        _required(hf, "num_attention_heads", source),
    )
    theta, scaling = _rope(hf, source)
    # The defaults are those of the transformers config classes, for keys that files leave out.
    config = DecoderConfig(
        vocab_size=_required(hf, "vocab_size", source),
        d_model=d_model,
        d_ff=_required(hf, "intermediate_size", source),
        n_layers=_required(hf, "num_hidden_layers", source),
        n_heads=n_heads,
        n_kv_heads=hf.get("num_key_value_heads") or n_heads,
        head_dim=hf.get("head_dim") or (128 if "Qwen3" in architecture else d_model // n_heads),
        rope_theta=theta,
        rms_eps=hf.get("rms_norm_eps", 1e-6),
        qkv_bias=architecture == "Qwen2ForCausalLM",
        qk_norm=architecture == "Qwen3ForCausalLM",
        tie_embeddings=bool(hf.get("tie_word_embeddings", False)),
        max_seq=hf.get("max_position_embeddings", 8192),
        rope_scaling=scaling,
    )
    return replace(config, **overrides)


def _required(hf: Mapping[str, Any], key: str, source: str) -> int:
    if key not in hf:
        raise ValueError(f"{source}: the key {key!r} is missing; take the model's own config.json")
    return hf[key]


def _refuse_unsupported(hf: Mapping[str, Any], source: str) -> None:
    # Qwen configs name a window that is off; layers from max_window_layers on would use it.
    layers = hf.get("layer_types")
    full_layers = hf.get("max_window_layers", 28)
    windowed = hf.get("use_sliding_window") and hf.get("num_hidden_layers", 0) > full_layers
    if windowed if layers is None else set(layers) != {"full_attention"}:
        raise ValueError(
            f"{source}: sliding-window attention is in use (use_sliding_window, layer_types); "
            "the decoder attends to the whole sequence. Use a model without it."
        )
    for key in ("attention_bias", "mlp_bias"):
        if hf.get(key):
            raise ValueError(f"{source}: {key} is true; supported is false")
    if hf.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ValueError(f"{source}: hidden_act is {hf['hidden_act']!r}; supported is 'silu'")
    if hf.get("quantization_config"):
        raise ValueError(
            f"{source}: the checkpoint is quantized (quantization_config); use the float16, "
            "bfloat16 or float32 release, or a GGUF file"
        )


def _rope(hf: Mapping[str, Any], source: str) -> tuple[float, RopeScaling | None]:
    """Theta and scaling from either spelling: ``rope_parameters``, or the two apart."""
    rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    theta = float(rope.get("rope_theta", hf.get("rope_theta", 10000.0)))
    kind = rope.get("rope_type", rope.get("type", "default"))
    partial = rope.get("partial_rotary_factor", hf.get("partial_rotary_factor", 1.0))
    if kind not in ("default", "llama3") or partial != 1.0:
        raise ValueError(
            f"{source}: rope type is {kind!r} with partial_rotary_factor {partial}; supported are "
            "'default' and 'llama3' over the whole head"
        )
    if kind == "default":
        return theta, None
    keys = "factor low_freq_factor high_freq_factor original_max_position_embeddings".split()
    missing = [key for key in keys if key not in rope]
    if missing:
        raise ValueError(f"{source}: rope type 'llama3' lacks {', '.join(missing)}")
    factor, low, high, original = (rope[key] for key in keys)
    return theta, RopeScaling(float(factor), float(low), float(high), int(original))


def to_hf(config: DecoderConfig) -> dict[str, Any]:
    """The ``config.json`` that describes a decoder to other tools; the inverse of `from_hf`.

    Args:
        config: the shape; ``dtype`` and ``lora`` have no place in it.

    Returns:
        A dict that is plain JSON.

    Raises:
        ValueError: both ``qkv_bias`` and ``qk_norm`` are set, which no known architecture has.
    """
    if config.qkv_bias and config.qk_norm:
        raise ValueError("no Hugging Face architecture has both qkv_bias and qk_norm; set one")
    architecture = _ARCHITECTURES[1 if config.qkv_bias else 2 if config.qk_norm else 0]
    scaling = config.rope_scaling
    return {
        "architectures": [architecture],
        "model_type": _MODEL_TYPES[architecture],
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "intermediate_size": config.d_ff,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling
        and {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_seq,
        },
        "rms_norm_eps": config.rms_eps,
        "hidden_act": "silu",
        "tie_word_embeddings": config.tie_embeddings,
        "max_position_embeddings": config.max_seq,
        "torch_dtype": config.param_dtype,
        "attention_bias": False,
        "use_cache": True,
    }


def tensor_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of the model by its Hugging Face name, shapes ``[out, in]``.

    Args:
        config: the shape.

    Returns:
        name -> shape, in the order of a checkpoint.

    Example:
        >>> tensor_shapes(family("smollm2-135m"))["model.layers.0.mlp.up_proj.weight"]
        (1536, 576)
    """
    d, shapes = config.d_model, {}
    shapes["model.embed_tokens.weight"] = (config.vocab_size, d)
    for i in range(config.n_layers):
        layer = f"model.layers.{i}"
        shapes[f"{layer}.input_layernorm.weight"] = (d,)
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            d_in, d_out = config.linear_shape(name)
            shapes[f"{layer}.self_attn.{name}.weight"] = (d_out, d_in)
            if config.qkv_bias and name != "o_proj":
                shapes[f"{layer}.self_attn.{name}.bias"] = (d_out,)
        if config.qk_norm:
            shapes[f"{layer}.self_attn.q_norm.weight"] = (config.head_dim,)
            shapes[f"{layer}.self_attn.k_norm.weight"] = (config.head_dim,)
        shapes[f"{layer}.post_attention_layernorm.weight"] = (d,)
        for name in ("gate_proj", "up_proj", "down_proj"):
            shapes[f"{layer}.mlp.{name}.weight"] = config.linear_shape(name)[::-1]
    shapes["model.norm.weight"] = (d,)
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, d)
    return shapes
