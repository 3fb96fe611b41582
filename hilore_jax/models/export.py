"""Beside exported weights: adapters alone as a PEFT folder, and the tokenizer's files."""

from __future__ import annotations

import json
import math
import shutil
from itertools import accumulate
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from hilore_jax.models import safetensors, tokenizer
from hilore_jax.models.bundled import BUNDLED
from hilore_jax.models.decoder import Decoder
from hilore_jax.models.lora import LoraDense
from hilore_jax.models.params import MODULES

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
# Of a Hugging Face folder, what is neither shape nor weights.
_BESIDE = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja"),
    "generation_config.json",
)
_IDS = {"bos_token": "bos_token_id", "eos_token": "eos_token_id", "pad_token": "pad_token_id"}


def save_adapter(model: Decoder, folder: str | Path, *, base: str, dtype: str = "float32") -> None:
    """Writes the adapters alone, as the `peft` library reads them.

    Its map is `W + (lora_alpha / r) B' A'` on `[out, in]`: `A' = A^T`, `B' = B^T`.

    Args:
        model: with adapters, in any segments.
        folder: made if need be; must not hold an adapter yet.
        base: name or folder of the base model, for `base_model_name_or_path`.
        dtype: of the file, "float32", "bfloat16" or "float16".

    Raises:
        ValueError: the model has no adapters, or one is not finite.
        FileExistsError: the folder holds an adapter already.
    """
    lora = model.config.lora
    if lora is None:
        raise ValueError(
            "the model has no adapters to save apart; save its weights, "
            "hilore_jax.models.weights.save_hf"
        )
    folder = Path(folder)
    _refuse_used(folder, ADAPTER_FILES)
    arrays = {}
    starts = accumulate(model.segment_lengths, initial=0)
    for start, stack in zip(starts, model.segments, strict=False):
        for name in lora.targets:
            linear = getattr(stack, name)
            assert isinstance(linear, LoraDense)
            for leaf, kind in ((linear.lora_a, "lora_A"), (linear.lora_b, "lora_B")):
                for row, array in enumerate(np.asarray(leaf[...])):
                    module = f"model.layers.{start + row}.{MODULES[name]}"
                    key = f"base_model.model.{module}.{kind}.weight"
                    if not np.isfinite(array).all():
                        raise ValueError(f"{key} is not finite; save an earlier checkpoint")
                    arrays[key] = array.T.astype(jnp.dtype(dtype))
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": list(lora.targets),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    folder.mkdir(parents=True, exist_ok=True)
    safetensors.write(folder / ADAPTER_FILES[1], arrays.items())
    _write(folder / ADAPTER_FILES[0], config)


def save_tokenizer(source: str | Path, folder: str | Path) -> list[str]:
    """Puts a model's tokenizer and generation settings into an exported folder.

    Args:
        source: as for `hilore_jax.models.weights.load`. Of a Hugging Face folder the files are
            copied; of a GGUF file (a bundled model too) they are made of its metadata.
        folder: of the export; must hold none of these files yet.

    Returns:
        Names of the files written; of a folder that has none, empty.

    Raises:
        FileNotFoundError, ImportError, ValueError: as for `hilore_jax.models.tokenizer.load`.
        FileExistsError: the folder holds one of the files already.
    """
    folder = Path(folder)
    if source not in BUNDLED and Path(source).is_dir():
        found = [name for name in _BESIDE if (Path(source) / name).is_file()]
        _refuse_used(folder, found)
        folder.mkdir(parents=True, exist_ok=True)
        for name in found:
            shutil.copyfile(Path(source) / name, folder / name)
        return found
    loaded = tokenizer.load(source)
    tokens = dict(loaded.template_tokens)
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **tokens}
    settings |= {"clean_up_tokenization_spaces": False, "model_max_length": 10**30}
    if loaded.template is not None:
        settings["chat_template"] = loaded.template
    ids = {_IDS[n]: loaded.backend.token_to_id(t) for n, t in tokens.items() if n in _IDS}
    written = ["tokenizer.json", "tokenizer_config.json", "generation_config.json"]
    _refuse_used(folder, written)
    folder.mkdir(parents=True, exist_ok=True)
    loaded.backend.save(str(folder / written[0]))
    _write(folder / written[1], settings)
    _write(folder / written[2], {"pad_token_id": loaded.pad_id} | ids)
    return written


def check_finite(model: Decoder) -> None:
    """Refuses weights that no other tool should be given.

    Raises:
        ValueError: a parameter that is not finite, by name.
    """
    from flax import nnx

    for path, variable in nnx.to_flat_state(nnx.state(model)):
        value = variable.get_value()
        if not math.isfinite(float(jnp.sum(jnp.abs(value.astype(jnp.float32)) * 0))):
            raise ValueError(f"{'.'.join(map(str, path))} is not finite; export another checkpoint")


def _refuse_used(folder: Path, names: Any) -> None:
    old = [name for name in names if (folder / name).exists()]
    if old:
        raise FileExistsError(f"{folder} holds {', '.join(old)} already; use a new folder")


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
