"""What LoGRA's update and its packets cost in time: against dense AdamW, on SmolLM2's shape.

    python experiments/logra_time.py                # random weights; 20 minutes on two cores
    python experiments/logra_time.py --quick        # a tiny model, to see that it works

Complete updates take turns in one process: dense AdamW, LoGRA, LoGRA without step control (its
difference is the KL probe). All recompute every block in backward. Then a packet is applied, and
packets of larger models are counted from their shapes.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from flax import nnx

import hilore_jax as hl
from hilore_jax.logra.follower import Follower
from hilore_jax.logra.packet import Packet
from hilore_jax.logra.sketches import Sketches
from hilore_jax.logra.sync import full_sync_bytes, packet_bytes
from hilore_jax.models.config import DecoderConfig
from hilore_jax.models.decoder import Decoder
from hilore_jax.models.shapes import family
from hilore_jax.models.sketched import sketched_config, sketched_stacks
from hilore_jax.planning.memory_cache import write_whole
from hilore_jax.planning.timing import interleaved, quartiles, ratio
from hilore_jax.training.batch import Batch
from hilore_jax.training.logra_state import LograSettings, init_logra_state
from hilore_jax.training.logra_strategy import SketchedUpdate
from hilore_jax.training.publish import full_sync
from hilore_jax.training.step import init_state
from hilore_jax.training.strategy import StaticUpdate
from hilore_jax.training.trainer import versions

OUT = Path(__file__).parent / "results" / "logra_time.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Times of complete updates, in turns, and of applying a packet."""

    micro: int = 4
    """Microbatches of an update."""
    rows: int = 8
    """Sequences of a microbatch."""
    seq: int = 128
    """Tokens a sequence, half of them scored."""
    rank: int = 64
    repeats: int = 9
    """Timed turns."""
    quick: bool = False
    """A random model of two small blocks, one turn."""
    out: str = str(OUT)
    """JSON file."""


def shape_of(config: Config) -> DecoderConfig:
    """SmolLM2's, or a tiny one."""
    small: dict[str, Any] = {"dtype": "float32", "param_dtype": "float32"}
    if config.quick:
        small |= {"n_layers": 2, "vocab_size": 64, "d_model": 160, "d_ff": 192, "head_dim": 40}
        small |= {"n_heads": 4, "n_kv_heads": 2}
    return dataclasses.replace(family("smollm2-135m"), **small)


def random_batch(config: Config, vocabulary: int) -> Batch:
    """Random tokens of which the second half is scored, log-probs near those of random weights."""
    rng = np.random.default_rng(0)
    shape = (config.micro, config.rows, config.seq)
    tokens = rng.integers(0, vocabulary, shape).astype(np.int32)
    scored = np.zeros((*shape[:2], config.seq // 2), np.float32)
    signs = jnp.where(jnp.arange(config.rows) % 2 == 0, 1.0, -1.0)
    return Batch(
        tokens=jnp.asarray(tokens),
        attention_mask=jnp.ones(tokens.shape, bool),
        completion_mask=jnp.ones(scored.shape, bool),
        logp_old=jnp.asarray(scored - np.log(vocabulary).astype(np.float32)),
        logp_ref=None,
        advantages=jnp.broadcast_to(signs, shape[:2]),
    )


def times(config: Config) -> tuple[list[dict[str, Any]], Any]:
    """The updates' rows, and what LoGRA's factors and state were."""
    plain = shape_of(config)
    shape = sketched_config(plain, Sketches(rank=config.rank, dtype=plain.dtype))
    segments, gc = (plain.n_layers,), (hl.Policy({}),) * plain.n_layers
    adamw, key = optax.adamw(1e-6), jax.random.key(0)
    model = Decoder(plain, rngs=nnx.Rngs(0))
    graphdef, dense = init_state(model, adamw, key)
    _, held = init_logra_state(model, shape, key)
    batch = random_batch(config, plain.vocab_size)

    def logra(policies: tuple[hl.Policy, ...], **settings: Any) -> SketchedUpdate:
        made = LograSettings(**settings)
        return SketchedUpdate(shape, segments, policies, made, factors=True, beta=0.0)

    kept = (hl.parse_policy("sketch_hidden=store"),) * plain.n_layers
    updates: dict[str, tuple[Any, Any]] = {
        "dense AdamW": (StaticUpdate(graphdef, adamw, gc, beta=0.0), dense),
        "LoGRA": (logra(gc), held),
        "LoGRA, no KL probe": (logra(gc, step_control=False), held),
        "LoGRA, sketch_hidden kept": (logra(kept), held),
    }
    programs = {name: up.compile(state, batch) for name, (up, state) in updates.items()}
    factors = programs["LoGRA"](*jax.tree.map(jnp.copy, (held, batch)))[1]["factors"]
    seconds = interleaved(
        {name: lambda given, run=run: run(*given) for name, run in programs.items()},
        1 if config.quick else config.repeats,
        prepare={
            name: functools.partial(jax.tree.map, jnp.copy, (state, batch))
            for name, (_, state) in updates.items()
        },
    )
    rows = []
    for name, (update, _) in updates.items():
        base = seconds["dense AdamW"]
        rows.append(
            {
                "update": name,
                "seconds_median": statistics.median(seconds[name]),
                "to_dense_adamw": ratio(seconds[name], base)._asdict(),
                "to_dense_adamw_quartiles": quartiles(
                    [a / b for a, b in zip(seconds[name], base, strict=True)]
                ),
                "temporaries": update.about["update_temp_bytes"],
            }
        )
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    pairs = zip(seconds["LoGRA"], seconds["LoGRA, no KL probe"], strict=True)
    probe = statistics.median(1 - without / whole for whole, without in pairs)
    return [*rows, {"kl_probe_share_of_update": probe}], (shape, factors, held)


def packet(config: Config, shape: DecoderConfig, factors: Any, held: Any) -> dict[str, Any]:
    """Seconds to read a packet's bytes and apply it, and sizes."""
    assert shape.sketches is not None
    sketches, stacks = shape.sketches.sketches, sketched_stacks(shape, (shape.n_layers,))
    by_layer = {
        layer: np.asarray(rows[i])
        for stack in stacks
        for rows in (np.asarray(factors[stack.name]),)
        for i, layer in enumerate(stack.layers)
    }
    data = Packet(update=0, sketches=sketches, factors=by_layer).to_bytes()
    start = Follower.start(full_sync(0, sketches, stacks, held.params), donate=False)

    def apply() -> Any:
        return start.apply(data).kernels

    found = interleaved({"apply": apply}, 1 if config.quick else config.repeats)["apply"]
    return {
        "apply_seconds_median": statistics.median(found),
        "apply_seconds": [min(found), max(found)],
        "packet_bytes": len(data),
        "full_sync_bytes_float32": full_sync_bytes(start.kernels),
    }


def sizes(name: str, rank: int) -> dict[str, Any]:
    """A packet's bytes against the bfloat16 weights that it moves, from shapes alone."""
    config = sketched_config(family(name), Sketches(rank=rank, dtype=family(name).dtype))
    kernels = {
        layer: jax.ShapeDtypeStruct(stack.shape, jnp.bfloat16)
        for stack in sketched_stacks(config, (config.n_layers,))
        for layer in stack.layers
    }
    moved, sent = full_sync_bytes(kernels), packet_bytes(kernels, rank)
    return {
        "model": name,
        "rank": rank,
        "packet_bytes": sent,
        "weights_bytes": moved,
        "part": sent / moved,
    }


def main(config: Config) -> None:
    """Measures and writes the JSON."""
    rows, made = times(config)
    result = {
        "command": "python experiments/logra_time.py" + (" --quick" if config.quick else ""),
        "versions": versions(),
        "config": {k: v for k, v in dataclasses.asdict(config).items() if k != "out"},
        "time": "measured, complete updates in turns",
        "rows": rows,
        "packet": packet(config, *made),
        "packets of larger models, from shapes": [
            sizes(name, 256) for name in ("qwen2.5-1.5b", "qwen2.5-7b", "qwen3-32b")
        ],
    }
    write_whole(Path(config.out), json.dumps(result, indent=1) + "\n")
    print(json.dumps({k: result[k] for k in list(result)[-3:]}, indent=1))


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
