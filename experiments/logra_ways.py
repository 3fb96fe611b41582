"""What `logra_learning.py` compares: ways to train, tasks, models and where they start."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from hilore_jax.models.adapters import add_lora
from hilore_jax.models.config import DecoderConfig, LoraConfig
from hilore_jax.models.decoder import Decoder
from hilore_jax.training.config import TrainConfig
from hilore_jax.training.parts import Parts
from hilore_jax.training.tasks import Item, Task
from hilore_jax.training.toy import CharTokenizer
from hilore_jax.training.trainer import train

OUT = Path(__file__).parent / "results" / "logra_learning.json"
LETTERS, LENGTH, ROWS = "abcdefgh", 3, 128
TOKENIZER = CharTokenizer(f"\x00\x01\n{LETTERS}")
SMALL = DecoderConfig(
    vocab_size=TOKENIZER.vocab_size,
    d_model=64,
    d_ff=192,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    head_dim=16,
    max_seq=16,
)
CONSTANT = "LoGRA, no step control"
WAYS = ("dense AdamW", "LoRA", "LoGRA", CONSTANT)
# LoGRA and LoRA leave the embedding, which is the head too, and the norms as they are.
UNFROZEN = "LoGRA, the rest by AdamW"
SMALL_WAYS = (*WAYS, UNFROZEN)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Learning curves of four ways to train."""

    updates: int = 400
    """Of the small model, after its start."""
    start: int = 60
    """Dense updates before the ways part."""
    seeds: int = 3
    small_rank: int = 24
    small_ratio: float = 1e-2
    """LoGRA's update ratio for the small model."""
    small_budget: str = "3e-2:1e-2"
    minutes: float = 7.0
    """For each way on SmolLM2; 0 leaves it out."""
    rank: int = 64
    """Of LoRA and of the sketches on SmolLM2, whose smallest side is 192."""
    ratio: float = 6e-5
    """LoGRA's update ratio on SmolLM2."""
    budget: str = "2e-3:1e-3"
    """About the KL that updates of the two rates below cause, so that the ways move alike."""
    learning_rate: float = 1e-5
    """Dense AdamW's on SmolLM2."""
    lora_rate: float = 1.5e-4
    quick: bool = False
    """Three updates of the small model, one seed."""
    out: str = str(OUT)
    """JSON file; the picture goes beside it."""


def reverse_task(seed: int) -> Task:
    """Reverse some letters; the reward is the share of places with the right letter."""

    def draw(index: int) -> Item:
        drawn = np.random.default_rng((seed, index)).choice(list(LETTERS), LENGTH)
        return Item(index, "".join(drawn), "".join(drawn[::-1]))

    def score(answer: str, item: Item) -> float:
        right = sum(a == b for a, b in zip(answer, item.answer, strict=False))
        return right / max(len(answer), len(item.answer))

    return Task("reverse", draw, score, instruction="")


def steps(way: str, budget: str, **more: Any) -> dict[str, Any]:
    """How LoGRA's steps are sized."""
    if way == CONSTANT:
        return {"step_control": False}
    return {"kl_budget": budget, **more}


def small_config(settings: Settings, way: str, seed: int, folder: str) -> TrainConfig:
    """The settings of a run of the small model."""
    ours: dict[str, Any] = {"lora_rank": settings.small_rank if way == "LoRA" else 0}
    if way.startswith("LoGRA"):
        ours = {
            "optimizer": "logra",
            "rank": settings.small_rank,
            "update_ratio": settings.small_ratio,
            "dense": "adamw" if way == UNFROZEN else "frozen",
            **steps(way, settings.small_budget, kl_updates=settings.updates),
        }
    if way in (*WAYS[:2], UNFROZEN):  # what LoGRA trains has no learning rate
        ours["learning_rate"] = 1e-3
    return TrainConfig(
        model="random",
        task="reverse",
        prompts=2 * ROWS // 8,
        group=8,
        prompt_length=LENGTH + 1,
        completion_length=LENGTH,
        micro_rows=ROWS,
        updates=settings.updates,
        old_logps="rollout",
        seed=seed,
        save_every=0,
        log_exposure_every=0,
        run_dir=f"{folder}/run",
        quiet=True,
        **ours,
    )


def smollm2_config(settings: Settings, way: str, folder: str) -> TrainConfig:
    """The settings of a run of SmolLM2."""
    rate = settings.lora_rate if way == "LoRA" else settings.learning_rate
    ours: dict[str, Any] = {
        "lora_rank": settings.rank if way == "LoRA" else 0,
        "learning_rate": rate,
    }
    if way.startswith("LoGRA"):
        ours = {
            "optimizer": "logra",
            "rank": settings.rank,
            "update_ratio": settings.ratio,
            **steps(way, settings.budget),
        }
    return TrainConfig(
        prompts=4,
        group=8,
        prompt_length=96,
        completion_length=32,
        updates=10_000,
        save_every=0,
        log_exposure_every=0,
        run_dir=f"{folder}/run",
        quiet=True,
        **ours,
    )


def small_start(settings: Settings, seed: int) -> Decoder:
    """The small model after some dense updates."""
    decoder = Decoder(SMALL, rngs=nnx.Rngs(seed))
    if settings.start == 0:
        return decoder
    with tempfile.TemporaryDirectory() as folder:
        config = small_config(settings, "dense AdamW", seed + 1000, folder)
        config = dataclasses.replace(config, updates=settings.start)
        done = train(config, Parts(decoder, TOKENIZER, reverse_task(seed + 1000)))
    return done.model()


def with_adapters(model: Decoder, way: str, rank: int) -> Decoder:
    """The model as a way trains it; arrays of its own, since updates donate them."""
    graphdef, state = nnx.split(model)
    own = nnx.merge(graphdef, jax.tree.map(jnp.copy, state))
    return add_lora(own, LoraConfig(rank=rank), rngs=nnx.Rngs(0)) if way == "LoRA" else own
