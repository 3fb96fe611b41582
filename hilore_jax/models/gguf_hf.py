"""A GGUF file as the decoder's shape and as tensors under Hugging Face names."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from jaxtyping import Shaped

from hilore_jax.models.config import DecoderConfig, RopeScaling
from hilore_jax.models.gguf import GgufFile
from hilore_jax.models.rope import frequencies
from hilore_jax.models.tensors import LazyTensors

_ARCHITECTURES = ("llama", "qwen2", "qwen3")
# llama.cpp stores Llama 3's scaling as one divisor a frequency; Meta published these two settings.
_LLAMA3 = (RopeScaling(8.0, 1.0, 4.0, 8192), RopeScaling(32.0, 1.0, 4.0, 8192))

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def config_from_gguf(file: GgufFile) -> DecoderConfig:
    """Reads the shape from a GGUF file's keys.

    Args:
        file: from `hilore_jax.models.gguf.open_gguf`.

    Returns:
        The config, float32.

    Raises:
        ValueError: an architecture other than llama, qwen2 and qwen3, a key that is missing, or a
            RoPE or expert setting that the decoder does not cover.
    """
    if file.architecture not in _ARCHITECTURES:
        raise ValueError(
            f"{file.path}: unknown architecture {file.architecture}; supported are "
            f"{', '.join(_ARCHITECTURES)}"
        )
    if file.key("expert_count", 0):
        raise ValueError(f"{file.path}: a mixture of experts is not supported; use a dense model")
    kind = file.key("rope.scaling.type", "none")
    if kind != "none":
        raise ValueError(f"{file.path}: rope scaling {kind!r} is not supported; only Llama 3's is")
    d_model, n_heads = _key(file, "embedding_length"), _key(file, "attention.head_count")
    head_dim = file.key("attention.key_length", d_model // n_heads)
    rotated = file.key("rope.dimension_count", head_dim)
    if rotated != head_dim:
        raise ValueError(
            f"{file.path}: RoPE covers {rotated} of {head_dim} features of a head; supported is all"
        )
    if "token_embd.weight" not in file.tensors:
        raise ValueError(f"{file.path}: tensor token_embd.weight is missing; use a whole model")
    config = DecoderConfig(
        vocab_size=file.tensors["token_embd.weight"].shape[0],
        d_model=d_model,
        d_ff=_key(file, "feed_forward_length"),
        n_layers=_key(file, "block_count"),
        n_heads=n_heads,
        n_kv_heads=file.key("attention.head_count_kv", n_heads),
        head_dim=head_dim,
        rope_theta=float(file.key("rope.freq_base", 10000.0)),
        # float32 in the file; 7 digits give back the decimal that was written
        rms_eps=float(f"{_key(file, 'attention.layer_norm_rms_epsilon'):.7g}"),
        qkv_bias=file.architecture == "qwen2",
        qk_norm=file.architecture == "qwen3",
        tie_embeddings="output.weight" not in file.tensors,
        max_seq=_key(file, "context_length"),
    )
    return replace(config, rope_scaling=_rope_scaling(file, config))


def _key(file: GgufFile, name: str):
    value = file.key(name)
    if value is None or isinstance(value, list):
        raise ValueError(
            f"{file.path}: key {file.architecture}.{name} is {value}, expected one number"
        )
    return value


def _rope_scaling(file: GgufFile, config: DecoderConfig) -> RopeScaling | None:
    if "rope_freqs.weight" not in file.tensors:
        return None
    divisors = file.read("rope_freqs.weight").astype(np.float64)
    for scaling in _LLAMA3:
        scaled = replace(config, rope_scaling=scaling)
        expected = frequencies(config) / frequencies(scaled)
        if divisors.shape == expected.shape and np.allclose(divisors, expected, rtol=1e-4):
            return scaling
    raise ValueError(
        f"{file.path}: tensor rope_freqs.weight holds RoPE divisors {divisors.min():g} to "
        f"{divisors.max():g} that are none of Llama 3.1's (factor 8) and Llama 3.2's (factor 32). "
        "Load the model's Hugging Face folder instead."
    )


def unpermute(
    weight: Shaped[np.ndarray, "rows *columns"], n_heads: int
) -> Shaped[np.ndarray, "rows *columns"]:
    """Undoes llama.cpp's row order of q and k, so that rotate-half RoPE is right.

    llama.cpp interleaves the two halves of each head: row ``2 i + j`` of a head there is row
    ``j head_dim/2 + i`` here.

    Args:
        weight: ``[n_heads * head_dim, ...]``.
        n_heads: heads in the rows (key-value heads for k).

    Returns:
        An array of the same shape.

    Example:
        >>> import numpy as np
        >>> unpermute(np.arange(8), 2).tolist()
        [0, 2, 1, 3, 4, 6, 5, 7]
    """
    pairs = weight.reshape(n_heads, -1, 2, *weight.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def hf_name(name: str) -> str | None:
    """The Hugging Face name of a GGUF tensor; None for one that has none.

    Example:
        >>> hf_name("blk.3.attn_q.bias")
        'model.layers.3.self_attn.q_proj.bias'
    """
    if name in _TOP:
        return _TOP[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _LAYER:
        return f"model.layers.{parts[1]}.{_LAYER[parts[2]]}.{parts[3]}"
    return None


def hf_tensors(file: GgufFile) -> LazyTensors:
    """The file's tensors under Hugging Face names and in Hugging Face's row order.

    Args:
        file: from `open_gguf`.

    Returns:
        Lazily read arrays; ``rope_freqs.weight`` is left out (it is part of the config).
    """
    names = {hf_name(n) or n: n for n in file.tensors if n != "rope_freqs.weight"}
    n_heads = {"q_proj": file.key("attention.head_count")}
    n_heads["k_proj"] = file.key("attention.head_count_kv", n_heads["q_proj"])
    permuted = file.architecture == "llama"

    def read(name: str) -> np.ndarray:
        array = file.read(names[name])
        projection = name.split(".")[-2]
        return (
            unpermute(array, n_heads[projection]) if permuted and projection in n_heads else array
        )

    shapes = {name: file.tensors[key].shape for name, key in names.items()}
    return LazyTensors(shapes, read, str(file.path))
