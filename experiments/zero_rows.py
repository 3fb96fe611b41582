"""What leaving out rows of zero advantage saves: half of the groups tied, beta 0.

    python experiments/zero_rows.py                 # SmolLM2's widths, 4 blocks, random weights
    python experiments/zero_rows.py --quick

Three programs take turns on the same batch: the whole update in one program, the same by
microbatches, and that without the rows that cannot matter. Times are medians of the turns' ratios.
"""

import argparse
import dataclasses
import json
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import hilore_jax as hl
from hilore_jax.models.config import DecoderConfig, LoraConfig
from hilore_jax.models.decoder import Decoder
from hilore_jax.models.shapes import family
from hilore_jax.planning.realized import relative_error
from hilore_jax.training.batch import Batch
from hilore_jax.training.laddered import LadderedUpdate, one_bucket
from hilore_jax.training.step import init_state
from hilore_jax.training.strategy import StaticUpdate

GROUP, MICRO_ROWS = 4, 4


def shape(quick: bool) -> DecoderConfig:
    """SmolLM2's widths with fewer blocks and words, LoRA adapters trained."""
    base = family("smollm2-135m", lora=LoraConfig(rank=16))
    small = {"n_layers": 4, "vocab_size": 4096, "dtype": "float32", "param_dtype": "float32"}
    if quick:
        small |= {"n_layers": 2, "vocab_size": 64, "d_model": 32, "d_ff": 48, "head_dim": 8}
        small |= {"n_heads": 4, "n_kv_heads": 2}
    return dataclasses.replace(base, **small)


def tied_batch(config: DecoderConfig, groups: int, seq: int) -> Batch:
    """Every second group's rewards are all equal, so that its advantages are zero."""
    rng = np.random.default_rng(0)
    rows, completion = groups * GROUP, seq // 2
    rewards = rng.integers(0, 2, (groups, GROUP)).astype(np.float32)
    rewards[:, 0] = 1 - rewards[:, 1]
    rewards[::2] = 1.0
    advantages = np.asarray(hl.grpo.group_advantages(rewards)).reshape(-1)

    def cut(array: np.ndarray) -> jax.Array:
        return jnp.asarray(array.reshape(-1, MICRO_ROWS, *array.shape[1:]))

    lengths = rng.integers(completion // 2, completion + 1, (rows, 1))
    mask = np.arange(completion) < lengths
    near = -np.log(config.vocab_size) + 0.1 * rng.normal(size=(rows, completion))
    return Batch(
        tokens=cut(rng.integers(0, config.vocab_size, (rows, seq)).astype(np.int32)),
        attention_mask=cut(np.concatenate([np.ones((rows, seq - completion), bool), mask], 1)),
        completion_mask=cut(mask),
        logp_old=cut(near.astype(np.float32)),
        logp_ref=None,
        advantages=cut(advantages),
    )


def measure(quick: bool, turns: int) -> dict[str, Any]:
    """Seconds of each program and how far the moves of the parameters differ."""
    config = shape(quick)
    groups, seq = (4, 16) if quick else (8, 64)
    optimizer = optax.sgd(1.0)  # moves are the gradients
    policies = (hl.Policy({}),) * config.n_layers
    model = Decoder(config, rngs=nnx.Rngs(0))
    for variable in jax.tree.leaves(
        nnx.state(model, nnx.LoRAParam), is_leaf=lambda x: isinstance(x, nnx.Variable)
    ):  # lora_b starts at zero, where half of the gradient vanishes
        noise = jax.random.normal(jax.random.key(1), variable.get_value().shape)
        variable.set_value(variable.get_value() + 0.02 * noise)
    graphdef, state = init_state(model, optimizer, jax.random.key(0))
    batch = tied_batch(config, groups, seq)
    options: dict[str, Any] = {"beta": 0.0, "max_grad_norm": None}
    buckets, rungs = one_bucket(policies)
    updates = {
        "one program": StaticUpdate(graphdef, optimizer, policies, **options),
        "by microbatches": LadderedUpdate(graphdef, optimizer, buckets, rungs, **options),
        "without dead rows": LadderedUpdate(
            graphdef, optimizer, buckets, rungs, skip_rows=True, **options
        ),
    }
    moves, metrics = {}, {}
    seconds: dict[str, list[float]] = {name: [] for name in updates}
    for turn in range(turns + 1):  # the first one compiles
        for name, update in updates.items():
            given = jax.tree.map(jnp.copy, state)
            run = update.compile(given, batch)
            jax.block_until_ready(given)
            began = time.perf_counter()
            new, found = jax.block_until_ready(run(given, batch))
            if turn:
                seconds[name].append(time.perf_counter() - began)
            moves[name] = jax.tree.map(jnp.subtract, new.params, state.params)
            metrics[name] = {k: np.asarray(v).tolist() for k, v in found.items()}
    whole = seconds["one program"]
    rows = [
        {
            "update": name,
            "seconds": statistics.median(taken),
            "time_ratio": statistics.median(a / b for a, b in zip(taken, whole, strict=True)),
            "gradient_difference": relative_error(moves[name], moves["one program"]),
            "rows_skipped": metrics[name].get("rows_skipped", 0),
            "microbatches": len(metrics[name].get("micro_exposure", batch.tokens)),
            "grad_norm": metrics[name]["grad_norm"],
            "n_tokens": metrics[name]["n_tokens"],
        }
        for name, taken in seconds.items()
    ]
    return {"blocks": config.n_layers, "batch": list(batch.tokens.shape), "rows": rows}


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints a table and writes the JSON file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tiny model, for tests")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--out", default=str(Path(__file__).parent / "results" / "zero_rows.json"))
    arguments = parser.parse_args(argv)
    found = measure(arguments.quick, arguments.turns)
    result = {
        "command": " ".join(["python experiments/zero_rows.py", *(["--quick"] * arguments.quick)]),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
        "measured": "wall time, median of the turns' ratios, in one process, taking turns",
        "turns": arguments.turns,
        **found,
    }
    Path(arguments.out).write_text(json.dumps(result, indent=1) + "\n")
    print(f"{'update':<20}{'time':>8}{'gradient':>12}{'rows left out':>15}")
    for row in found["rows"]:
        print(
            f"{row['update']:<20}{row['time_ratio']:>7.2f}x{row['gradient_difference']:>12.1e}"
            f"{row['rows_skipped']:>15}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
