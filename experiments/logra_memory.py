"""Memory of a complete actor update: dense AdamW, LoRA, LoGRA, and LoGRA under a HiLoRe plan.

Each update is compiled for GPUs that need not be here, and the compiler's own account of its
buffers is read: weights, gradients or sketches, optimizer state, activations, projections and the
KL probe, all that one device holds while it updates. Several devices share parameters, moments and
rows (FSDP). The rollout engine that may live beside it is arithmetic, and is marked as such.

    python experiments/logra_memory.py                      # 15 minutes on two cores
    python experiments/logra_memory.py --models qwen2.5-7b --devices 8
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")

import jax
import optax
import tyro
from flax import nnx
from jax.sharding import AbstractMesh, AxisType

import hilore_jax as hl
from hilore_jax.logra.sketches import Sketches
from hilore_jax.models.config import LINEARS, DecoderConfig, LoraConfig
from hilore_jax.models.decoder import Decoder
from hilore_jax.models.shapes import family
from hilore_jax.models.sharding import batch_sharding, parameter_sharding
from hilore_jax.models.sketched import sketched_config
from hilore_jax.planning.memory import compiled_memory
from hilore_jax.planning.memory_cache import write_whole
from hilore_jax.planning.target import parse_target
from hilore_jax.training.abstract import AbstractUpdate
from hilore_jax.training.logra_state import LograSettings, init_logra_state
from hilore_jax.training.logra_update import make_logra_update
from hilore_jax.training.report import block_and_arguments
from hilore_jax.training.step import init_state, make_actor_update
from hilore_jax.training.trainer import versions

OUT = Path(__file__).parent / "results" / "logra_memory.json"
# Gemma 3 27B's sizes, in the decoder of this library (SwiGLU, one norm before each half).
GEMMA_27B = DecoderConfig(
    vocab_size=262144,
    d_model=5376,
    d_ff=21504,
    n_layers=62,
    n_heads=32,
    n_kv_heads=16,
    head_dim=128,
    tie_embeddings=True,
    max_seq=32768,
    dtype="bfloat16",
)
# No matmul of a block is recomputed in backward; the norms, RoPE and silu are.
PLAN = (
    "mlp_gate=int8:tile=32,mlp_up=int8:tile=32,attn_out=store,attn_lse=store,q=store,k=store,"
    "v=store,attn_residual=store,sketch_hidden=store"
)
SEQ, COMPLETION = 2304, 2048


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Compiled memory of complete updates, a device."""

    models: tuple[str, ...] = ("qwen2.5-1.5b", "qwen2.5-7b", "gemma-27b")
    """Shapes by name; gemma-27b only on several devices."""
    devices: tuple[int, ...] = (1, 8)
    """H100s of 80 GB."""
    rank: int = 256
    """Of the sketches, and of LoRA."""
    out: str = str(OUT)
    """JSON file."""


@dataclasses.dataclass(frozen=True)
class Way:
    """One way of training: a function of shapes, and what it holds, in words."""

    name: str
    holds: str
    state: Callable[[DecoderConfig], Any]
    update: Callable[[DecoderConfig], Any]
    policy: hl.Policy
    shape: Callable[[DecoderConfig], DecoderConfig] = lambda shape: shape


def ways(rank: int) -> tuple[Way, ...]:
    """All that are compared; every update has one sequence a device and bfloat16 compute."""
    adamw, gc = optax.adamw(1e-6), hl.Policy({})
    settings = LograSettings()

    def model(shape: DecoderConfig) -> Decoder:
        return Decoder(shape, rngs=nnx.Rngs(0))

    def split(shape: DecoderConfig, trained: Any) -> tuple[nnx.GraphDef, Any]:
        return init_state(model(shape), adamw, jax.random.key(0), trained=trained)

    def dense(name: str, holds: str, trained: Any, **other: Any) -> Way:
        def update(shape: DecoderConfig) -> Any:
            found: list[Any] = []
            jax.eval_shape(lambda: found.append(split(shape, trained)[0]))
            return make_actor_update(found[0], adamw, beta=0.0)

        return Way(name, holds, lambda s: split(s, trained)[1], update, gc, **other)

    def logra(name: str, holds: str, policy: hl.Policy, **other: Any) -> Way:
        def config(shape: DecoderConfig) -> DecoderConfig:
            return sketched_config(shape, Sketches(rank=rank, dtype=shape.dtype))

        def update(shape: DecoderConfig) -> Any:
            return make_logra_update(config(shape), (shape.n_layers,), settings, beta=0.0)

        def state(shape: DecoderConfig) -> Any:
            return init_logra_state(model(shape), config(shape), jax.random.key(0))[1]

        return Way(name, holds, state, update, policy, **other)

    def lora(shape: DecoderConfig) -> DecoderConfig:
        return dataclasses.replace(shape, lora=LoraConfig(rank=rank), param_dtype="bfloat16")

    def half(shape: DecoderConfig) -> DecoderConfig:
        return dataclasses.replace(shape, param_dtype="bfloat16")

    sketches = "float32 weights, float32 sketches, a second moment a row, the KL probe"
    return (
        dense("dense AdamW", "float32 weights, gradients and two moments, of all", nnx.Param),
        dense(
            "dense AdamW, linears of blocks",
            "float32 weights; gradients and two moments of what LoGRA trains",
            _is_target,
        ),
        dense("LoRA", "bfloat16 weights; float32 adapters with AdamW", nnx.LoRAParam, shape=lora),
        logra("LoGRA", sketches, gc),
        logra("LoGRA, HiLoRe plan", f"{sketches}; no matmul is recomputed", hl.parse_policy(PLAN)),
        logra(
            "LoGRA, bfloat16 weights",
            sketches.replace("float32 weights", "bfloat16 weights, merged by random rounding"),
            gc,
            shape=half,
        ),
    )


def _is_target(path: tuple[Any, ...], value: Any) -> bool:
    del value
    return path[0] == "segments" and path[2] in LINEARS and path[-1] == "kernel"


def shape_of(name: str) -> DecoderConfig:
    """A decoder's shape by name, computed in bfloat16."""
    return GEMMA_27B if name == "gemma-27b" else family(name, dtype="bfloat16")


def measure(name: str, devices: int, way: Way, rank: int) -> dict[str, Any]:
    """The row of one update."""
    shape = way.shape(shape_of(name))
    target = parse_target(f"cuda:h100-80x{devices}" if devices > 1 else "cuda:h100-80")
    policies = (way.policy,) * shape.n_layers
    state = jax.eval_shape(lambda: way.state(shape))
    sizes: dict[str, Any] = {"seq": SEQ, "completion": COMPLETION, "rows": devices, "micro": 1}
    batch = AbstractUpdate(shape, **sizes, optimizer=optax.identity(), beta=0.0).arguments(
        policies
    )[1]
    if devices > 1:
        mesh = AbstractMesh((1, devices), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)
        put = lambda leaf, where: leaf.update(sharding=where)  # noqa: E731
        state = jax.tree.map(put, state, parameter_sharding(state, mesh))
        batch = jax.tree.map(lambda leaf: put(leaf, batch_sharding(mesh)), batch)
    update = functools.partial(way.update(shape), policies)
    block, arguments = block_and_arguments(
        sketched_config(shape, Sketches(rank=rank, dtype=shape.dtype))
        if "LoGRA" in way.name
        else shape,
        1,
        SEQ,
    )
    recomputed = hl.explain(way.policy, block, *arguments, argnums=(0, 1)).recomputed.matmuls
    memory = compiled_memory(update, state, batch, target=target, donate=(0,))
    return {
        "model": name,
        "devices": devices,
        "way": way.name,
        "holds": way.holds,
        "policy": str(way.policy) or "gradient checkpointing",
        "recomputed_matmuls_a_block": recomputed,
        "state_bytes": memory.arguments,
        "temporary_bytes": memory.temporaries,
        "peak_bytes": memory.peak,
    }


def rollout_share(shape: DecoderConfig, devices: int, sequences: int = 64) -> dict[str, Any]:
    """Bytes a device of a rollout engine beside the update: arithmetic, not compiled."""
    d, kv = shape.d_model, shape.n_kv_heads * shape.head_dim
    block = d * (2 * shape.q_width + 2 * kv) + 3 * d * shape.d_ff
    tables = shape.vocab_size * d * (1 if shape.tie_embeddings else 2)
    weights = 2 * (shape.n_layers * block + tables) // devices
    cache = 2 * 2 * shape.n_layers * kv * SEQ * sequences // devices
    return {"weight_bytes": weights, "cache_bytes": cache, "sequences": sequences}


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown: GiB a device, and against dense AdamW of the same model."""
    lines = [
        "| model, GPUs | way | state | temporaries | peak, GiB | to dense | to its linears |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        same = [r for r in rows if (r["model"], r["devices"]) == (row["model"], row["devices"])]
        peaks = {r["way"]: r["peak_bytes"] for r in same}
        against = [
            f"{row['peak_bytes'] / peaks[base] - 1:+.1%}" if base in peaks else ""
            for base in ("dense AdamW", "dense AdamW, linears of blocks")
        ]
        sizes = [row[n] / 2**30 for n in ("state_bytes", "temporary_bytes", "peak_bytes")]
        cells = [f"{row['model']}, {row['devices']}", row["way"], *(f"{x:.2f}" for x in sizes)]
        lines.append("| " + " | ".join([*cells, *against]) + " |")
    return "\n".join(lines)


def main(config: Config) -> None:
    """Compiles, prints and writes."""
    rows, engines = [], {}
    for name in config.models:
        for devices in config.devices:
            if name == "gemma-27b" and devices == 1:
                continue  # its weights alone are 101 GiB
            engines[f"{name}, {devices}"] = rollout_share(shape_of(name), devices)
            for way in ways(config.rank):
                rows.append(measure(name, devices, way, config.rank))
                peak = rows[-1]["peak_bytes"] / 2**30
                print(
                    f"{name} x {devices}, {way.name}: {peak:.2f} GiB", file=sys.stderr, flush=True
                )
    result = {
        "command": "python experiments/logra_memory.py",
        "rank": config.rank,
        "tokens": {"sequence": SEQ, "response": COMPLETION, "sequences a device": 1},
        "rows": rows,
        "rollout engine beside it, arithmetic": engines,
        "versions": versions(),
    }
    write_whole(Path(config.out), json.dumps(result, indent=1) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
