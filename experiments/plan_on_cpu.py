"""A plan measured: complete updates of SmolLM2 on the CPU, under GC and under plans, in turns.

SmolLM2-135M's weights, blocks scanned, float32, with LoRA adapters and with all parameters
trained. Plans have 1.10 times the compiled peak of gradient checkpointing (GC); the time of an
update is measured against GC's, in one process, plans in turns.

    python experiments/plan_on_cpu.py             # a quarter of an hour on two cores
    python experiments/plan_on_cpu.py --quick     # a small random model, to see that it works
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import tyro
from flax import nnx

import hilore_jax as hl
from hilore_jax.models import weights
from hilore_jax.models.config import DecoderConfig, LoraConfig
from hilore_jax.models.decoder import Decoder, segment
from hilore_jax.planning.memory_cache import write_whole
from hilore_jax.planning.plan import runs
from hilore_jax.planning.profile import profile_plan
from hilore_jax.training.abstract import AbstractUpdate
from hilore_jax.training.batch import Batch
from hilore_jax.training.step import TrainState, init_state
from hilore_jax.training.trainer import versions

MODEL = "smollm2-135m-instruct"
OUT = Path(__file__).parent / "results" / "plan_on_cpu.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Measured time of updates under plans to that under gradient checkpointing."""

    rows: int = 8
    """Sequences of a microbatch; an update has one microbatch."""
    seq: int = 128
    """Tokens a sequence."""
    memory: str = "1.10x gc"
    """Memory budget of the plans."""
    risk: float = 0.015
    """Risk budget of the plans."""
    repeats: int = 9
    """Timed turns."""
    quick: bool = False
    """A random model of four blocks, three turns."""
    out: str = ""
    """JSON file; when empty, `results/plan_on_cpu.json` beside this script."""


def decoder(config: Config, lora: LoraConfig | None) -> Decoder:
    """SmolLM2, or a small random model."""
    if not config.quick:
        return weights.load(MODEL, dtype="float32", lora=lora)
    shape = DecoderConfig(
        vocab_size=64,
        d_model=64,
        d_ff=192,
        n_layers=4,
        n_heads=2,
        n_kv_heads=1,
        head_dim=32,
        lora=lora,
    )
    return Decoder(shape, rngs=nnx.Rngs(0))


def random_batch(config: Config, vocabulary: int) -> Batch:
    """Random tokens, the second half of each row scored: times do not depend on what they say."""
    tokens = jax.random.randint(jax.random.key(1), (1, config.rows, config.seq), 3, vocabulary)
    scored = jnp.zeros((1, config.rows, config.seq // 2))
    return Batch(
        tokens=tokens,
        attention_mask=jnp.ones(tokens.shape, bool),
        completion_mask=jnp.ones(scored.shape, bool),
        logp_old=scored - 5.0,
        logp_ref=scored - 5.0,
        advantages=jnp.where(jnp.arange(config.rows) % 2 == 0, 1.0, -1.0)[None],
    )


def compare(config: Config, lora: LoraConfig | None) -> list[dict[str, Any]]:
    """The rows of one way of training: GC, plans with and without compression, and no remat."""
    model, optimizer = decoder(config, lora), optax.adamw(1e-6)
    update = AbstractUpdate(
        model.config,
        micro=1,
        rows=config.rows,
        seq=config.seq,
        completion=config.seq // 2,
        optimizer=optimizer,
    )
    blocks = update.blocks()
    batch = random_batch(config, model.config.vocab_size)

    def arguments(policies: Sequence[hl.Policy]) -> tuple[TrainState, Batch]:
        _, state = init_state(segment(model, tuple(policies)), optimizer, jax.random.key(0))
        return jax.tree.map(jnp.copy, (state, batch))  # the update donates its state

    def planned(risk: float) -> hl.Plan:
        budget = hl.Budget(config.memory, risk)
        return hl.plan(update, update.arguments, blocks=blocks, budget=budget, target="cpu")

    gc = (hl.Policy({}),) * blocks.count
    store = (hl.Policy(default=hl.Store()),) * blocks.count
    plans = {"plan": planned(config.risk), "plan, no compression": planned(0.0)}
    found = profile_plan(
        update,
        arguments,
        {"gc": gc, **plans, "no rematerialization": store},
        repeats=3 if config.quick else config.repeats,
    )
    rows = []
    for name, profile in found.items():
        row = {
            "trained": "all parameters" if lora is None else f"LoRA {lora.rank}",
            "planner": name,
            "time_to_gc": profile.to_first._asdict(),
            "seconds_median": statistics.median(profile.seconds),
            "temporaries": profile.temporaries,
            "matmuls": profile.matmuls,
        }
        if isinstance(made := plans.get(name), hl.Plan):
            row |= {
                "peak": made.memory.peak,
                "predicted_peak": made.predicted,
                "budget": made.budget,
                "gc_peak": made.gc.peak,
                "risk": made.risk,
                "removed_flops": made.removed_flops,
                "policies": [[n, str(policy)] for policy, n in runs(made.policies)],
            }
        rows.append(row)
        print(f"{row['trained']}, {name}: {profile.to_first} of GC's time", file=sys.stderr)
    return rows


def main(config: Config) -> None:
    """Measures both ways of training and writes the JSON."""
    found = [row for lora in (LoraConfig(rank=16), None) for row in compare(config, lora)]
    about = {
        "command": "python experiments/plan_on_cpu.py" + (" --quick" if config.quick else ""),
        "versions": versions(),
        "config": {k: v for k, v in dataclasses.asdict(config).items() if k != "out"},
        "peak": "compiled",
        "time": "measured, complete updates in turns",
        "rows": found,
    }
    out = Path(config.out) if config.out else OUT
    out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(out, json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Config))
