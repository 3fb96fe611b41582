"""Hugging Face tensors to the decoder's stacked parameter tree, and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import accumulate
from typing import Any

import jax
import numpy as np
from flax import nnx

from hilore_jax.models.config import DecoderConfig
from hilore_jax.models.decoder import Decoder
from hilore_jax.models.shapes import tensor_shapes
from hilore_jax.models.tensors import LazyTensors

MODULES = {
    "attn_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    **{name: f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj")},
    **{name: f"self_attn.{name}" for name in ("q_norm", "k_norm")},
    **{name: f"mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")},
}
_LEAVES = {"kernel": "weight", "scale": "weight", "bias": "bias"}
_TOP = {
    ("embedding",): "model.embed_tokens.weight",
    ("norm", "scale"): "model.norm.weight",
    ("head",): "lm_head.weight",
}

TreePath = tuple[Any, ...]


def to_params(
    tensors: LazyTensors,
    config: DecoderConfig,
    *,
    segments: tuple[int, ...] | None = None,
) -> Decoder:
    """Makes a decoder of Hugging Face tensors, stacked into its segments.

    No random weights are made first, and one stacked leaf at a time is held twice.

    Args:
        tensors: Hugging Face names, ``[out, in]``; names and shapes already checked.
        config: the shape; arrays are rounded to its ``param_dtype``. Adapters are for
            `hilore_jax.models.add_lora`, on the result.
        segments: lengths of the per-policy stacks, sum ``n_layers``; one stack where None.

    Returns:
        The decoder; kernels ``[n, in, out]``.
    """
    config = replace(config, lora=None)
    model = nnx.eval_shape(lambda: Decoder(config, segments=segments, rngs=nnx.Rngs(0)))
    starts = [0, *accumulate(model.segment_lengths)]
    dtype = config.storage_dtype
    for key, variable in nnx.to_flat_state(nnx.state(model)):
        path: TreePath = tuple(key)
        if path in _TOP:
            array = tensors[_TOP[path]]
        else:
            array = np.empty(variable.get_value().shape, dtype)
            for row in range(len(array)):
                tensor = tensors[_hf_name(path, starts[path[1]] + row)]
                array[row] = tensor.T if path[-1] == "kernel" else tensor
        # Always a copy: an array that shares the mapped file's pages must never be donated.
        variable.set_value(jax.device_put(array.astype(dtype, copy=False), may_alias=False))
    return model


def from_params(model: Decoder) -> LazyTensors:
    """The inverse of `to_params`: Hugging Face tensors of a decoder, read one at a time.

    Args:
        model: without adapters, in any segments.

    Returns:
        Lazily read arrays ``[out, in]`` in the parameters' dtype.

    Raises:
        ValueError: the model has LoRA adapters.
    """
    lora = model.config.lora
    if lora is not None:
        raise ValueError(
            f"the model has LoRA adapters (rank {lora.rank} on {', '.join(lora.targets)}), which "
            "plain weights cannot hold; fold them in first with hilore_jax.models.merge_lora, or "
            "save_hf(..., merge_lora=True)"
        )
    flat = {path: variable[...] for path, variable in nnx.to_flat_state(nnx.state(model))}
    places = _places(flat, model.segment_lengths)

    def read(name: str) -> np.ndarray:
        path, row = places[name]
        array = np.asarray(flat[path] if row is None else flat[path][row])
        return array.T if path[-1] == "kernel" else array

    return LazyTensors(tensor_shapes(model.config), read, "the model")


def _hf_name(path: TreePath, layer: int) -> str:
    """The name of one layer's part of a stacked leaf ``segments.<i>.<module>.<leaf>``."""
    return f"model.layers.{layer}.{MODULES[path[2]]}.{_LEAVES[path[3]]}"


def _places(
    flat: Mapping[TreePath, jax.Array], lengths: tuple[int, ...]
) -> dict[str, tuple[TreePath, int | None]]:
    """Hugging Face name -> (leaf, row of its stack; None for a leaf that is no stack)."""
    starts = [0, *accumulate(lengths)]
    places: dict[str, tuple[TreePath, int | None]] = {}
    for path in flat:
        if path in _TOP:
            places[_TOP[path]] = (path, None)
        else:
            for row in range(lengths[path[1]]):
                places[_hf_name(path, starts[path[1]] + row)] = (path, row)
    return places
