"""Shapes and switches of a decoder, frozen and hashable, checked when they are made."""

from dataclasses import dataclass

import jax.numpy as jnp

from hilore_jax.logra.sketches import Sketches

LINEARS: tuple[str, ...] = (
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
)
"""The linear maps of a block, by the names that Hugging Face checkpoints give them."""

_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters `y = x W + (alpha / rank) x A B` (Hu et al. 2021, arXiv 2106.09685).

    Attributes:
        rank: columns of A and rows of B.
        alpha: numerator of the scale.
        targets: linear maps that get an adapter, names from `LINEARS`.

    Raises:
        ValueError: the rank is not positive, or a target is not a linear map of a block.

    Example:
        >>> LoraConfig(rank=8, alpha=16.0).scale
        2.0
    """

    rank: int = 16
    alpha: float = 32.0
    targets: tuple[str, ...] = LINEARS

    def __post_init__(self):
        if self.rank < 1:
            raise ValueError(f"LoRA rank is {self.rank}, expected at least 1")
        _check_targets("LoRA", self.targets)

    @property
    def scale(self) -> float:
        """The factor `alpha / rank` on `x A B`."""
        return self.alpha / self.rank


@dataclass(frozen=True)
class SketchConfig:
    """Linear maps whose weight gradients exist as sketches alone (LoGRA, arXiv 2610.06647).

    Attributes:
        sketches: rank, seed, kind and dtype of the projections.
        targets: linear maps that are sketched, names from `LINEARS`.

    Raises:
        ValueError: a target is not a linear map of a block.

    Example:
        >>> SketchConfig(Sketches(rank=4)).sketches.rank
        4
    """

    sketches: Sketches
    targets: tuple[str, ...] = LINEARS

    def __post_init__(self):
        _check_targets("LoGRA", self.targets)


def _check_targets(method: str, targets: tuple[str, ...]) -> None:
    if isinstance(targets, str):
        raise ValueError(
            f"{method} targets is the string {targets!r}, expected a tuple of names, "
            f"such as ({targets!r},)"
        )
    unknown = [name for name in targets if name not in LINEARS]
    if unknown or not targets:
        raise ValueError(
            f"{method} targets {unknown or 'are empty'}, expected some of {', '.join(LINEARS)}"
        )


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's frequency scaling of RoPE: long wavelengths are stretched by `factor`.

    Attributes:
        factor: by how much wavelengths beyond the low-frequency limit are stretched.
        low_freq_factor: `original_max_seq / low_freq_factor` tokens is that limit.
        high_freq_factor: wavelengths under `original_max_seq / high_freq_factor` are kept.
        original_max_seq: context length of pretraining, tokens.

    Raises:
        ValueError: the two limits are not in order.

    Example:
        >>> RopeScaling(8.0, 1.0, 4.0, 8192).factor
        8.0
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_seq: int

    def __post_init__(self):
        if not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                f"RoPE scaling has low_freq_factor {self.low_freq_factor} and high_freq_factor "
                f"{self.high_freq_factor}, expected 0 < low < high"
            )


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """One decoder for Llama/SmolLM2, Qwen2/2.5 (`qkv_bias`) and Qwen3 (`qk_norm`).

    Attributes:
        vocab_size: rows of the embedding.
        d_model: width of the residual stream.
        d_ff: width of the MLP.
        n_layers: number of blocks.
        n_heads: query heads.
        n_kv_heads: key and value heads; divides `n_heads`.
        head_dim: width of one head; even.
        rope_theta: base of the rotary frequencies.
        rms_eps: added to the mean square inside RMSNorm.
        qkv_bias: q, k and v projections have a bias (Qwen2).
        qk_norm: RMSNorm over each query and key head before RoPE (Qwen3).
        tie_embeddings: the head is the embedding.
        max_seq: longest sequence, tokens.
        dtype: compute dtype, "float32", "bfloat16" or "float16".
        param_dtype: storage dtype of the base weights.
        lora: adapters, or None.
        sketches: linear maps whose gradients are sketched, or None; not beside adapters.
        rope_scaling: Llama 3 frequency scaling, or None.
        attention: "auto", "xla" or "cudnn"; "auto" is cuDNN where the default device can run it.

    Raises:
        ValueError: a size is not positive, heads do not divide, a dtype is unknown, every
            sketched map has a side of no more than the sketches' rank, or their dtype is wider
            than the compute dtype.

    Example:
        >>> config = DecoderConfig(
        ...     vocab_size=64, d_model=16, d_ff=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=4
        ... )
        >>> config.kv_width
        8
    """

    vocab_size: int
    d_model: int
    d_ff: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    rope_theta: float = 10000.0
    rms_eps: float = 1e-5
    qkv_bias: bool = False
    qk_norm: bool = False
    tie_embeddings: bool = True
    max_seq: int = 8192
    dtype: str = "float32"
    param_dtype: str = "float32"
    lora: LoraConfig | None = None
    sketches: SketchConfig | None = None
    rope_scaling: RopeScaling | None = None
    attention: str = "auto"

    def __post_init__(self):
        sizes = "vocab_size d_model d_ff n_layers n_heads n_kv_heads head_dim max_seq".split()
        for name in sizes:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, expected at least 1")
        if self.n_heads % self.n_kv_heads:
            raise ValueError(
                f"n_heads {self.n_heads} is not a multiple of n_kv_heads {self.n_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd; RoPE rotates pairs of features")
        if self.attention not in ("auto", "xla", "cudnn"):
            raise ValueError(f"attention is {self.attention!r}, expected 'auto', 'xla' or 'cudnn'")
        for name in ("dtype", "param_dtype"):
            if getattr(self, name) not in _DTYPES:
                raise ValueError(
                    f"{name} is {getattr(self, name)!r}, expected one of {', '.join(_DTYPES)}"
                )

        if self.sketches is not None:
            self._check_sketches(self.sketches)

    def _check_sketches(self, found: SketchConfig) -> None:
        if self.lora is not None:
            raise ValueError(
                f"{found.sketches} beside LoRA adapters of rank {self.lora.rank}: the base weights "
                "of adapters are frozen; leave one of the two out"
            )
        found.sketches.check_compute(self.dtype)
        if not self.sketched_linears:
            shapes = {name: self.linear_shape(name) for name in found.targets}
            raise ValueError(
                f"a sketch of rank {found.sketches.rank} is no smaller than the gradient of any of "
                f"{shapes} (in, out): choose a rank below "
                f"{max(min(shape) for shape in shapes.values())}"
            )

    @property
    def sketched_linears(self) -> tuple[str, ...]:
        """Linear maps whose gradients are sketched: targets with both sides above the rank."""
        if self.sketches is None:
            return ()
        rank = self.sketches.sketches.rank
        return tuple(n for n in self.sketches.targets if min(self.linear_shape(n)) > rank)

    @property
    def q_width(self) -> int:
        """Width of the flat queries, `n_heads * head_dim`."""
        return self.n_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Width of the flat keys and of the flat values, `n_kv_heads * head_dim`."""
        return self.n_kv_heads * self.head_dim

    @property
    def compute_dtype(self) -> jnp.dtype:
        """`dtype` as a numpy dtype."""
        return jnp.dtype(self.dtype)

    @property
    def storage_dtype(self) -> jnp.dtype:
        """`param_dtype` as a numpy dtype."""
        return jnp.dtype(self.param_dtype)

    def linear_shape(self, name: str) -> tuple[int, int]:
        """`(in, out)` of a linear map of the block, by its name in `LINEARS`."""
        return {
            "q_proj": (self.d_model, self.q_width),
            "k_proj": (self.d_model, self.kv_width),
            "v_proj": (self.d_model, self.kv_width),
            "o_proj": (self.q_width, self.d_model),
            "gate_proj": (self.d_model, self.d_ff),
            "up_proj": (self.d_model, self.d_ff),
            "down_proj": (self.d_ff, self.d_model),
        }[name]
