"""Files that several tests of this folder read."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from hilore_jax.models.config import DecoderConfig

WriteGguf = Callable[..., Path]


@pytest.fixture
def write_gguf(tmp_path: Path) -> WriteGguf:
    """write_gguf(config, tensors, ...) -> path of a GGUF file written by the gguf package."""
    gguf = pytest.importorskip("gguf")

    def write(
        config: DecoderConfig,
        tensors: dict[str, np.ndarray],
        *,
        architecture: str = "llama",
        kinds: dict[str, str] | None = None,
        keys: dict[str, object] | None = None,
        name: str = "model.gguf",
    ) -> Path:
        """Tensors by GGUF name; `kinds` quantizes some; raw bytes (uint8) are taken as they are."""
        kinds = kinds or {}
        writer = gguf.GGUFWriter(tmp_path / name, architecture)
        numbers = {
            "block_count": config.n_layers,
            "context_length": config.max_seq,
            "embedding_length": config.d_model,
            "feed_forward_length": config.d_ff,
            "attention.head_count": config.n_heads,
            "attention.head_count_kv": config.n_kv_heads,
            "attention.key_length": config.head_dim,
            "rope.dimension_count": config.head_dim,
        }
        for key, value in numbers.items():
            writer.add_uint32(f"{architecture}.{key}", value)
        writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", config.rms_eps)
        writer.add_float32(f"{architecture}.rope.freq_base", config.rope_theta)
        for key, value in (keys or {}).items():
            add = {str: writer.add_string, int: writer.add_uint32, list: writer.add_array}
            add[type(value)](key, value)
        for tensor, array in tensors.items():
            kind = gguf.GGMLQuantizationType[kinds.get(tensor, "F32")]
            data = array if array.dtype == np.uint8 else gguf.quantize(array, kind)
            writer.add_tensor(tensor, data, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return tmp_path / name

    return write
