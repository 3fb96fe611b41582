"""Batched sampling with a key-value cache: prompts in, completions and their log-probs out."""

from __future__ import annotations

import dataclasses
import functools
import typing

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from hilore_jax.compiler import compiler_options
from hilore_jax.models.decoder import Decoder
from hilore_jax.training.sampling import check_sampling, sample, token_logp


@typing.no_type_check  # jax puts placeholders in the fields
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rollout:
    """Completions, right-padded."""

    tokens: Int[Array, "batch new"]  # int32; padded after the end of sequence
    mask: Bool[Array, "batch new"]  # index <= first end of sequence
    logps: Float[Array, "batch new"]  # float32, at the temperature, untruncated; 0 off the mask
    finished: Bool[Array, " batch"]  # whether the row ended itself
    steps: Int[Array, ""]  # int32, tokens drawn a row: up to where the last row ended


def check_prompts(mask: Bool[np.ndarray, "batch seq"]) -> None:
    """Raises unless every prompt is non-empty and padded on the left only.

    Raises:
        ValueError: names the first row at fault.
    """
    mask = np.asarray(mask, bool)
    if mask.ndim != 2 or mask.shape[1] == 0:
        raise ValueError(f"prompt mask must be [batch, seq] with seq >= 1, found {mask.shape}")
    for row, values in enumerate(mask):
        if not values.any():
            raise ValueError(f"prompt row {row} is empty: every prompt needs at least one token")
        if not values[-1]:
            raise ValueError(
                f"prompt row {row} is padded on the right (its mask ends in 0); pad prompts on "
                "the left, so that the completion follows the prompt directly"
            )
        if np.any(np.diff(values.astype(np.int8)) < 0):
            raise ValueError(
                f"prompt row {row} has a gap: its mask must be zeros, then ones, found "
                f"{values.astype(int).tolist()}"
            )


def row_keys(key: Key[Array, ""], rows: int) -> Key[Array, " rows"]:
    """One key a row, which depends on the row's index alone and not on how many rows there are."""
    return jax.vmap(lambda row: jax.random.fold_in(key, row))(jnp.arange(rows))


def generate(
    model: Decoder,
    tokens: Int[Array | np.ndarray, "batch seq"],
    mask: Bool[Array | np.ndarray, "batch seq"],
    key: Key[Array, "..."],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    eos_id: int,
    pad_id: int = 0,
) -> Rollout:
    """Samples completions of left-padded prompts; stops when every row has ended.

    Compiled once per shape and setting. A row's completion depends on its own prompt and key only.

    Args:
        model: the decoder; its parameters are arguments of the compiled function.
        tokens: prompts, padded on the left.
        mask: True on the prompts' tokens.
        key: one key, from which each row's key is folded by its index, or one key a row.
        max_new_tokens: completion length, in tokens.
        temperature: sampling temperature; 0 is greedy.
        top_p: nucleus mass, 1 keeps all.
        top_k: tokens to keep, 0 keeps all.
        eos_id: the token that ends a completion.
        pad_id: what is written after it.

    Returns:
        The completions.

    Raises:
        ValueError: a prompt that is empty or not left-padded, or settings out of range.
    """
    faults = check_sampling(temperature, top_k, top_p)
    if max_new_tokens < 1:
        faults.append(f"max_new_tokens must be >= 1, found {max_new_tokens}")
    if tokens.shape != mask.shape:
        faults.append(f"prompt tokens {tokens.shape} and mask {mask.shape} differ in shape")
    if faults:
        raise ValueError("; ".join(faults))
    check_prompts(np.asarray(mask))
    keys = row_keys(key, tokens.shape[0]) if key.ndim == 0 else key
    if keys.shape != (tokens.shape[0],):
        raise ValueError(f"key must be one key or {tokens.shape[0]}, found shape {keys.shape}")
    graphdef, state = nnx.split(model)
    return _sampler()(
        graphdef,
        state,
        jnp.asarray(tokens, jnp.int32),
        jnp.asarray(mask, bool),
        keys,
        jnp.int32(eos_id),
        jnp.int32(pad_id),
        max_new_tokens=max_new_tokens,
        settings=(float(temperature), int(top_k), float(top_p)),
    )


@functools.cache
def _sampler():
    # Built at the first call: the compiler options depend on the backend.
    return jax.jit(
        _generate,
        static_argnums=0,
        static_argnames=("max_new_tokens", "settings"),
        compiler_options=compiler_options(),
    )


def _generate(
    graphdef, state, tokens, mask, keys, eos_id, pad_id, *, max_new_tokens, settings
) -> Rollout:
    model = nnx.merge(graphdef, state)
    temperature, top_k, top_p = settings
    rows, length = tokens.shape
    unembedding = model.unembedding()

    def draw(hidden, index):
        head = unembedding.astype(hidden.dtype)
        logits = jnp.einsum("bd,vd->bv", hidden, head, preferred_element_type=jnp.float32)
        step_keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, index)
        token = sample(step_keys, logits, temperature=temperature, top_k=top_k, top_p=top_p)
        return token, token_logp(logits, token, temperature)

    def write(out, hidden):
        token, logp = draw(hidden, out.steps)
        return token, Rollout(
            tokens=out.tokens.at[:, out.steps].set(jnp.where(out.finished, pad_id, token)),
            mask=out.mask.at[:, out.steps].set(~out.finished),
            logps=out.logps.at[:, out.steps].set(jnp.where(out.finished, 0.0, logp)),
            finished=out.finished | (token == eos_id),
            steps=out.steps + 1,
        )

    def body(carry):
        token, cache, out = carry
        hidden, cache = model.decode(token, cache)
        token, out = write(out, hidden)
        return token, cache, out

    def unfinished(carry):
        out = carry[2]
        return (out.steps < max_new_tokens) & ~jnp.all(out.finished)

    empty = Rollout(
        tokens=jnp.full((rows, max_new_tokens), pad_id, jnp.int32),
        mask=jnp.zeros((rows, max_new_tokens), bool),
        logps=jnp.zeros((rows, max_new_tokens), jnp.float32),
        finished=jnp.zeros((rows,), bool),
        steps=jnp.int32(0),
    )
    hidden, cache = model.prefill(tokens, mask, length + max_new_tokens)
    token, out = write(empty, hidden)
    return jax.lax.while_loop(unfinished, body, (token, cache, out))[2]
