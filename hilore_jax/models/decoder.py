"""The decoder: embedding, stacked blocks in the segments of a plan, final norm, head.

Parameter tree (`nnx.to_pure_dict(nnx.split(decoder)[1])`), kernels stored `[in, out]`, `n` blocks
in segment `i`, every leaf of a segment with the leading axis `n`:

    embedding                                    [vocab, d_model]          nnx.Param
    norm.scale                                   [d_model]
    head                                         [vocab, d_model]          absent (None) when tied
    segments.<i>.attn_norm.scale                 [n, d_model]
    segments.<i>.q_proj.kernel                   [n, d_model, n_heads * head_dim]
    segments.<i>.{k,v}_proj.kernel               [n, d_model, n_kv_heads * head_dim]
    segments.<i>.{q,k,v}_proj.bias               [n, out]                  only with qkv_bias
    segments.<i>.{q,k}_norm.scale                [n, head_dim]             only with qk_norm
    segments.<i>.o_proj.kernel                   [n, n_heads * head_dim, d_model]
    segments.<i>.mlp_norm.scale                  [n, d_model]
    segments.<i>.{gate,up}_proj.kernel           [n, d_model, d_ff]
    segments.<i>.down_proj.kernel                [n, d_ff, d_model]
    segments.<i>.<linear>.lora_a                 [n, in, rank]             nnx.LoRAParam, float32
    segments.<i>.<linear>.lora_b                 [n, rank, out]            nnx.LoRAParam, float32
    segments.<i>.<linear>.slot                   [n, out, rank]            SketchSlot, float32 zeros
    segments.<i>.<linear>.key                    [n, 2]                    SketchKey, uint32

`nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))` gives that tree without allocating it;
a loader fills it with `nnx.update(decoder, state)` or `variable.set_value(array)`.
"""

import functools
from collections.abc import Sized
from itertools import groupby

import jax
import jax.numpy as jnp
from flax import nnx
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int, PyTree

from hilore_jax.actions import Policy, Store
from hilore_jax.intervene import Interventions
from hilore_jax.models.block import Block, BlockFn, RMSNorm
from hilore_jax.models.cache import Cache, decode_blocks, prefill_blocks
from hilore_jax.models.config import DecoderConfig
from hilore_jax.models.linear import LinearFactory
from hilore_jax.models.restack import restack, spans
from hilore_jax.models.rope import cos_sin, positions
from hilore_jax.models.sketched_dense import choose_linear
from hilore_jax.segments import scan_blocks


class Decoder(nnx.Module):
    """Decoder-only transformer of the Llama, Qwen2 and Qwen3 families.

    The initial weights depend on `rngs` alone, not on the segments.

    Args:
        config: shapes and switches.
        segments: blocks in each stack, summing to `config.n_layers`; None: one stack.
        linear: makes each linear map of a block; dense, LoRA or sketched by default.
        rngs: source of the initial weights.

    Raises:
        ValueError: the segments do not sum to the number of layers.

    Example:
        >>> config = DecoderConfig(
        ...     vocab_size=8, d_model=4, d_ff=6, n_layers=3, n_heads=1, n_kv_heads=1, head_dim=4
        ... )
        >>> decoder = Decoder(config, segments=(2, 1), rngs=nnx.Rngs(0))
        >>> decoder.logits(jnp.zeros((1, 5), jnp.int32)).shape
        (1, 5, 8)
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        segments: tuple[int, ...] | None = None,
        linear: LinearFactory = choose_linear,
        rngs: nnx.Rngs,
    ):
        lengths = (config.n_layers,) if segments is None else tuple(segments)
        if sum(lengths) != config.n_layers or min(lengths) < 1:
            raise ValueError(
                f"segments {lengths} hold {sum(lengths)} blocks, but the config has "
                f"{config.n_layers} layers; give positive lengths that sum to n_layers"
            )
        self.config = config
        storage = config.storage_dtype
        shape = (config.vocab_size, config.d_model)
        table = functools.partial(jax.random.normal, shape=shape)
        self.embedding = nnx.Param((0.02 * table(rngs.params())).astype(storage))
        self.norm = RMSNorm(config.d_model, config.rms_eps, storage)
        tied = config.tie_embeddings
        self.head = None if tied else nnx.Param((0.02 * table(rngs.params())).astype(storage))
        keys = jax.random.split(rngs.params(), config.n_layers)
        block = nnx.eval_shape(lambda: Block(config, linear=linear, rngs=nnx.Rngs(0)))
        graphdef, _ = nnx.split(block)
        stacks = (_stack(config, linear, keys[a:b]) for a, b in spans(lengths))
        self.segments = nnx.List([nnx.merge(graphdef, state) for state in stacks])

    @property
    def segment_lengths(self) -> tuple[int, ...]:
        """Blocks in each stack."""
        return tuple(stack.attn_norm.scale.get_value().shape[0] for stack in self.segments)

    def blocks(self) -> tuple[BlockFn, tuple[PyTree, ...]]:
        """The block as a pure function, and the stacked params of each segment."""
        graphdefs, params = zip(*(nnx.split(stack) for stack in self.segments), strict=True)
        return BlockFn(graphdefs[0]), params

    def hidden(
        self,
        tokens: Int[Array, "batch seq"],
        mask: Bool[Array, "batch seq"] | None = None,
        *,
        policies: tuple[Policy, ...] | Interventions | None = None,
    ) -> Float[Array, "batch seq d_model"]:
        """Hidden states after the final norm, in the compute dtype.

        Args:
            tokens: token ids.
            mask: True at real tokens, padding on either side; None: all are real.
            policies: what backward reads, one policy a block; None: no rematerialization.

        Returns:
            `[batch, seq, d_model]`; finite but meaningless where the mask is False.

        Raises:
            ValueError: shapes differ, the sequence is too long, or the policies do not count
                one for each block.
        """
        if policies is None:
            policies = (Policy(default=Store()),) * self.config.n_layers
        _check_count(policies, self.config.n_layers)
        x, shared = self.embed(tokens, mask)
        return self.norm(scan_blocks(*self.blocks(), x, policies, *shared))

    def embed(
        self, tokens: Int[Array, "batch seq"], mask: Bool[Array, "batch seq"] | None = None
    ) -> tuple[Float[Array, "batch seq d_model"], tuple[Array, Array, Array | None]]:
        """What `hidden` scans `blocks()` over: the first block's input, and what all share."""
        self._check(tokens, mask)
        position = jnp.arange(tokens.shape[1])[None] if mask is None else positions(mask)
        x, cos, sin = self._embed(tokens, position)
        return x, (cos, sin, mask)

    def unembedding(self) -> Float[Array, "vocab d_model"]:
        """The head's weight, storage dtype: the embedding where they are tied."""
        return (self.embedding if self.head is None else self.head)[...]

    def logits(
        self,
        tokens: Int[Array, "batch seq"],
        mask: Bool[Array, "batch seq"] | None = None,
        *,
        policies: tuple[Policy, ...] | None = None,
    ) -> Float[Array, "batch seq vocab"]:
        """Whole logits in float32, `hidden W^T`; for training see `grpo.token_logprobs`.

        Args:
            tokens: token ids.
            mask: True at real tokens; None: all are real.
            policies: as in `hidden`.

        Returns:
            `[batch, seq, vocab]` float32.
        """
        h = self.hidden(tokens, mask, policies=policies)
        weight = self.unembedding().astype(h.dtype)
        return jnp.einsum("bsd,vd->bsv", h, weight, preferred_element_type=jnp.float32)

    def prefill(
        self, tokens: Int[Array, "batch seq"], mask: Bool[Array, "batch seq"], cache_len: int
    ) -> tuple[Float[Array, "batch d_model"], Cache]:
        """Reads left-padded prompts and starts a cache.

        Args:
            tokens: prompts, padded on the left.
            mask: True at real tokens.
            cache_len: slots of the cache: prompt tokens and tokens to decode.

        Returns:
            The hidden state at the last position, after the final norm, and the cache.

        Raises:
            ValueError: shapes differ, or the prompt or the cache is too long or too short.
        """
        self._check(tokens, mask)
        x, cos, sin = self._embed(tokens, positions(mask))
        block_fn, params = self.blocks()
        x, cache = prefill_blocks(block_fn.graphdef, params, x, cos, sin, mask, cache_len)
        return self.norm(x[:, -1]), cache

    def decode(
        self, token: Int[Array, "batch"], cache: Cache
    ) -> tuple[Float[Array, "batch d_model"], Cache]:
        """Reads one more token of each row.

        Args:
            token: ids of the tokens that follow what the cache holds.
            cache: from `prefill` or `decode`, with a free slot (not checked under `jit`, where
                a full cache would overwrite its last slot).

        Returns:
            The hidden state of that token, after the final norm, and the cache.

        Raises:
            ValueError: the cache is full.
        """
        slots = cache.valid.shape[1]
        if not isinstance(cache.index, Tracer) and int(cache.index) >= slots:
            raise ValueError(f"the cache is full: all {slots} slots are written; raise cache_len")
        x, cos, sin = self._embed(token[:, None], cache.position[:, None])
        block_fn, params = self.blocks()
        x, cache = decode_blocks(block_fn.graphdef, params, x, cos, sin, cache)
        return self.norm(x[:, 0]), cache

    def _embed(self, tokens: Array, position: Array) -> tuple[Array, Array, Array]:
        x = self.embedding[...][tokens].astype(self.config.compute_dtype)
        return x, *cos_sin(position, self.config)

    def _check(self, tokens: Array, mask: Array | None) -> None:
        if mask is not None and mask.shape != tokens.shape:
            raise ValueError(f"mask has shape {mask.shape}, expected the tokens' {tokens.shape}")
        if tokens.shape[1] > self.config.max_seq:
            raise ValueError(
                f"the sequence has {tokens.shape[1]} tokens, but the model reads at most "
                f"{self.config.max_seq} (max_seq)"
            )


def segment(decoder: Decoder, policies: tuple[Policy, ...]) -> Decoder:
    """Re-stacks the blocks into the runs of equal consecutive policies.

    A plan scans each run over its own stack, because two scans over slices of one stack copy the
    weights. Stacks that already fit are shared with `decoder`; the others are copied once, where
    they are (numpy arrays on the host, jax arrays on their device).

    Args:
        decoder: any segmentation.
        policies: one a block.

    Returns:
        A decoder with one segment a run.

    Raises:
        ValueError: the policies do not count one for each block.

    Example:
        >>> config = DecoderConfig(
        ...     vocab_size=8, d_model=4, d_ff=6, n_layers=3, n_heads=1, n_kv_heads=1, head_dim=4
        ... )
        >>> decoder = Decoder(config, rngs=nnx.Rngs(0))
        >>> segment(decoder, (Policy({}), Policy({}), Policy(default=Store()))).segment_lengths
        (2, 1)
    """
    _check_count(policies, decoder.config.n_layers)
    return restack(decoder, tuple(len(list(run)) for _, run in groupby(policies)))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _stack(config: DecoderConfig, linear: LinearFactory, keys: Array) -> PyTree:
    """Initial params of one block a key; a loop, as vmapped draws take XLA seconds to compile."""

    def params(key):
        return nnx.split(Block(config, linear=linear, rngs=nnx.Rngs(params=key)))[1]

    return jax.lax.map(params, keys)


def _check_count(policies: Sized, n_layers: int) -> None:
    if len(policies) != n_layers:
        raise ValueError(
            f"found {len(policies)} policies for {n_layers} blocks, expected one policy a block"
        )
