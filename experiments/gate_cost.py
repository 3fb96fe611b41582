"""What the gate costs: updates whose blocks all decode, or all recompute, against static plans.

    python experiments/gate_cost.py                 # SmolLM2's shape, random weights; 10 minutes
    python experiments/gate_cost.py --quick         # a tiny model, to see that it works

The gated update is one executable. On a calm batch every block decodes, on one with advantages a
thousand times as large every block recomputes; beside it run the static plan that decodes and
gradient checkpointing. The programs take turns; times are medians of the turns' ratios. Also what
choosing a ladder's bucket takes on the host.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import statistics
import sys
import timeit
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from flax import nnx

import hilore_jax as hl
from hilore_jax.models.config import DecoderConfig, LoraConfig
from hilore_jax.models.decoder import Decoder, segment
from hilore_jax.models.shapes import family
from hilore_jax.planning.buckets import Buckets
from hilore_jax.planning.memory_cache import write_whole
from hilore_jax.planning.timing import interleaved, quartiles, ratio
from hilore_jax.training.batch import Batch
from hilore_jax.training.step import TrainState, init_state
from hilore_jax.training.strategy import StaticUpdate
from hilore_jax.training.trainer import versions

OUT = Path(__file__).parent / "results" / "gate_cost.json"
# Backward recomputes no matmul where it may decode these.
POLICY = (
    "mlp_gate=int8:tile=32,mlp_up=int8:tile=32,attn_out=store,attn_lse=store,q=store,k=store,"
    "v=store,attn_residual=store"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Measured time and compiled temporaries of gated updates to static ones."""

    rows: int = 4
    """Sequences of a microbatch; an update has one."""
    seq: int = 128
    """Tokens a sequence, half of them scored."""
    repeats: int = 9
    """Timed turns."""
    quick: bool = False
    """A random model of two small blocks, one turn."""
    out: str = str(OUT)
    """JSON file."""


def shape(config: Config, lora: LoraConfig | None) -> DecoderConfig:
    """SmolLM2's, or a tiny one."""
    small: dict[str, Any] = {"dtype": "float32", "param_dtype": "float32"}
    if config.quick:
        small |= {"n_layers": 2, "vocab_size": 64, "d_model": 32, "d_ff": 48, "head_dim": 8}
        small |= {"n_heads": 4, "n_kv_heads": 2}
    return dataclasses.replace(family("smollm2-135m", lora=lora), **small)


def random_batch(config: Config, vocabulary: int) -> Batch:
    """Random tokens of which the second half is scored, log-probs near those of random weights."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, vocabulary, (1, config.rows, config.seq)).astype(np.int32)
    scored = np.zeros((1, config.rows, config.seq // 2), np.float32)
    return Batch(
        tokens=jnp.asarray(tokens),
        attention_mask=jnp.ones(tokens.shape, bool),
        completion_mask=jnp.ones(scored.shape, bool),
        logp_old=jnp.asarray(scored - np.log(vocabulary).astype(np.float32)),
        logp_ref=None,
        advantages=jnp.where(jnp.arange(config.rows) % 2 == 0, 1.0, -1.0)[None],
    )


def compare(config: Config, lora: LoraConfig | None) -> list[dict[str, Any]]:
    """The rows of one way of training."""
    model_shape, optimizer = shape(config, lora), optax.sgd(1e-6)
    blocks = model_shape.n_layers
    plan = (hl.parse_policy(POLICY),) * blocks
    recompute = (hl.Policy({}),) * blocks
    model = Decoder(model_shape, rngs=nnx.Rngs(0))
    graphdef, state = init_state(segment(model, plan), optimizer, jax.random.key(0))
    calm = random_batch(config, model_shape.vocab_size)
    wild = dataclasses.replace(calm, advantages=1e3 * calm.advantages)
    # The exposure of the calm batch is at most about 1, of the wild one a thousand times that.
    gate = {
        "coefficients": np.full(blocks, 1e-3 / blocks**0.5),
        "seconds": np.ones(blocks),
        "risk": 0.015,
    }
    static = functools.partial(StaticUpdate, graphdef, optimizer, beta=0.0, clip=1e9)
    gated = static(plan, gate)
    updates = {
        "plan": (static(plan), calm),
        "gate, all decode": (gated, calm),
        "gradient checkpointing": (static(recompute), calm),
        "gate, all recompute": (gated, wild),
    }

    def arguments(batch: Batch) -> tuple[TrainState, Batch]:
        return jax.tree.map(jnp.copy, (state, batch))  # the update donates its state

    programs = {name: update.compile(state, batch) for name, (update, batch) in updates.items()}
    decoded = {
        name: float(program(*arguments(batch))[1].get("gate/decoded", np.nan))
        for (name, program), (_, batch) in zip(programs.items(), updates.values(), strict=True)
    }
    seconds = interleaved(
        {name: lambda given, run=run: run(*given) for name, run in programs.items()},
        1 if config.quick else config.repeats,
        prepare={name: functools.partial(arguments, batch) for name, (_, batch) in updates.items()},
    )
    rows = []
    for name, (update, _) in updates.items():
        against = "gradient checkpointing" if "recompute" in name else "plan"
        rows.append(
            {
                "trained": "all parameters" if lora is None else f"LoRA {lora.rank}",
                "update": name,
                "blocks_decoded": None if np.isnan(decoded[name]) else decoded[name],
                "against": against,
                "time_ratio": ratio(seconds[name], seconds[against])._asdict(),
                "time_ratio_quartiles": quartiles(
                    [a / b for a, b in zip(seconds[name], seconds[against], strict=True)]
                ),
                "seconds_median": statistics.median(seconds[name]),
                "temporaries": update.about["update_temp_bytes"],
                "temporaries_to_plan": (update.about["update_temp_bytes"] or 0)
                / (updates["plan"][0].about["update_temp_bytes"] or 1),
            }
        )
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return rows


def selection_seconds() -> float:
    """Median seconds of choosing one of nine buckets on the host."""
    edges = (*(2.0**i for i in range(8)), float("inf"))
    buckets = Buckets(edges, (0.01,) * 8 + (0.0,), budget=0.015)
    choose = functools.partial(buckets.select, 37.5, 96, 768)
    return statistics.median(timeit.repeat(choose, number=1000, repeat=9)) / 1000


def main(config: Config) -> None:
    """Measures both ways of training and writes the JSON."""
    found = [row for lora in (None, LoraConfig(rank=16)) for row in compare(config, lora)]
    about = {
        "command": "python experiments/gate_cost.py" + (" --quick" if config.quick else ""),
        "versions": versions(),
        "config": {k: v for k, v in dataclasses.asdict(config).items() if k != "out"},
        "policy": POLICY,
        "time": "measured, complete updates in turns",
        "temporaries": "compiled, bytes",
        "ladder_selection_seconds": selection_seconds(),
        "rows": found,
    }
    write_whole(Path(config.out), json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Config))
