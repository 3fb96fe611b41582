"""Decoders of the Llama, Qwen2 and Qwen3 families in Flax NNX, with named activations."""

from hilore_jax.models.adapters import add_lora as add_lora
from hilore_jax.models.adapters import merge_lora as merge_lora
from hilore_jax.models.attention import attention as attention
from hilore_jax.models.block import Block as Block
from hilore_jax.models.block import BlockFn as BlockFn
from hilore_jax.models.cache import Cache as Cache
from hilore_jax.models.config import DecoderConfig as DecoderConfig
from hilore_jax.models.config import LoraConfig as LoraConfig
from hilore_jax.models.config import RopeScaling as RopeScaling
from hilore_jax.models.config import SketchConfig as SketchConfig
from hilore_jax.models.decoder import Decoder as Decoder
from hilore_jax.models.decoder import segment as segment
from hilore_jax.models.names import NAMES as NAMES
from hilore_jax.models.sketched import add_sketches as add_sketches
