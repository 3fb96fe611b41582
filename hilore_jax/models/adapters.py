"""LoRA adapters put on a decoder, and folded back into its base weights."""

import dataclasses

import jax.numpy as jnp
from flax import nnx

from hilore_jax.models.config import LINEARS, DecoderConfig, LoraConfig
from hilore_jax.models.decoder import Decoder
from hilore_jax.models.lora import LoraDense


def add_lora(decoder: Decoder, lora: LoraConfig, *, rngs: nnx.Rngs) -> Decoder:
    """The same decoder with fresh adapters; its function is unchanged until B is trained.

    Args:
        decoder: a decoder without adapters; its base arrays are shared, not copied.
        lora: rank, alpha, targets.
        rngs: source of the initial A.

    Returns:
        A decoder whose `nnx.LoRAParam` leaves are the adapters.

    Raises:
        ValueError: the decoder already has adapters.

    Example:
        >>> config = DecoderConfig(
        ...     vocab_size=8, d_model=4, d_ff=6, n_layers=1, n_heads=1, n_kv_heads=1, head_dim=4
        ... )
        >>> decoder = add_lora(
        ...     Decoder(config, rngs=nnx.Rngs(0)), LoraConfig(rank=2), rngs=nnx.Rngs(1)
        ... )
        >>> decoder.segments[0].up_proj.lora_a.shape
        (1, 4, 2)
    """
    if decoder.config.lora is not None:
        raise ValueError(
            f"the decoder already has adapters, {decoder.config.lora}; fold them with merge_lora"
        )
    result = abstract_decoder(
        dataclasses.replace(decoder.config, lora=lora), decoder.segment_lengths
    )
    share_arrays(decoder, result)
    for path, variable in nnx.iter_graph(result):
        if isinstance(variable, nnx.LoRAParam):
            shape, dtype = variable.get_value().shape, variable.get_value().dtype
            zero = path[-1] == "lora_b"
            draw = jnp.zeros(shape, dtype) if zero else rngs.params.normal(shape, dtype)
            variable.set_value(draw if zero else draw * shape[-2] ** -0.5)
    return result


def merge_lora(decoder: Decoder) -> Decoder:
    """Folds the adapters into the base weights, `W + (alpha / rank) A B`.

    Args:
        decoder: a decoder, with or without adapters.

    Returns:
        A decoder without adapters, base weights in their storage dtype; arrays that no adapter
        touches are shared.

    Example:
        >>> config = DecoderConfig(
        ...     vocab_size=8,
        ...     d_model=4,
        ...     d_ff=6,
        ...     n_layers=1,
        ...     n_heads=1,
        ...     n_kv_heads=1,
        ...     head_dim=4,
        ...     lora=LoraConfig(rank=2),
        ... )
        >>> merge_lora(Decoder(config, rngs=nnx.Rngs(0))).config.lora is None
        True
    """
    result = abstract_decoder(
        dataclasses.replace(decoder.config, lora=None), decoder.segment_lengths
    )
    share_arrays(decoder, result)
    for source, target in zip(decoder.segments, result.segments, strict=True):
        for name in LINEARS:
            linear = getattr(source, name)
            if isinstance(linear, LoraDense):
                kernel = linear.kernel.get_value()
                merged = (kernel.astype(jnp.float32) + linear.delta()).astype(kernel.dtype)
                getattr(target, name).kernel.set_value(merged)
    return result


def abstract_decoder(config: DecoderConfig, segments: tuple[int, ...]) -> Decoder:
    """A decoder of shapes alone, for arrays of another to be put in."""
    return nnx.eval_shape(lambda: Decoder(config, segments=segments, rngs=nnx.Rngs(0)))


def share_arrays(source: Decoder, target: Decoder) -> None:
    """Points target's variables at source's arrays, by path, where both have the path."""
    arrays = dict(nnx.to_flat_state(nnx.state(source)))
    for path, variable in nnx.to_flat_state(nnx.state(target)):
        if path in arrays:
            variable.set_value(arrays[path].get_value())
