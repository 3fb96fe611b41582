"""The demonstration: a real model's GRPO updates under GC, then under a compressed policy."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from hilore_jax.actions import Policy
from hilore_jax.compiler import compiler_options
from hilore_jax.planning.bounds import Whole, number_faults, refuse_faults
from hilore_jax.planning.realized import relative_error
from hilore_jax.planning.timing import interleaved, ratio
from hilore_jax.training.batch import Batch
from hilore_jax.training.config import TrainConfig, faults
from hilore_jax.training.gradients import make_gradients
from hilore_jax.training.learner import Learner
from hilore_jax.training.loss_config import loss_options
from hilore_jax.training.step import TrainState
from hilore_jax.training.trainer import Parts, load_parts, train, versions

# What keeps the gradient's error under 0.015 on this model: int8 with the scales that suit each
# name, and the attention's output exact.
COMPRESSED = "mlp_gate=int8:axis=1:tile=32,mlp_up=int8:axis=1:tile=32,attn_out=store,attn_lse=store"


@dataclasses.dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """GRPO updates of a real model under GC and, same seeds, under a compressed policy."""

    model: str = "smollm2-135m-instruct"
    policy: str = COMPRESSED
    """The policy to compare with GC."""
    updates: int = 3
    prompts: int = 4
    group: int = 4
    prompt_length: int = 56
    completion_length: int = 24
    micro_rows: int = 8
    temperature: float = 0.7
    lora_rank: int = 16
    learning_rate: float = 1e-4
    seed: int = 0
    turns: int = 3
    """Updates of each side that are timed, in turns; 0 leaves the time out."""
    run_dir: str = ""
    """Folder of the two runs; a new `runs/demo-<time>` when empty."""

    def train_config(self, policy: str, run_dir: Path) -> TrainConfig:
        """The settings of one of the two runs."""
        shared = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name not in ("policy", "run_dir", "turns")
        }
        return TrainConfig(
            **shared, policy=policy, run_dir=str(run_dir), save_every=0, old_logps="rollout"
        )


@dataclasses.dataclass(frozen=True)
class Side:
    """One of the two runs, and what the comparison needs of it."""

    metrics: Sequence[dict[str, Any]]
    learner: Learner
    batches: Sequence[Batch]


def run_demo(config: DemoConfig, parts: Parts | None = None) -> int:
    """Runs both sides and prints the comparison.

    Args:
        config: sizes, seeds and the policy.
        parts: model, tokenizer and task, where they are not to be loaded by name.

    Returns:
        Exit status: 0, or 128 + the signal that stopped it.
    """
    began = time.perf_counter()
    base = Path(config.run_dir or f"runs/demo-{time.strftime('%Y%m%d-%H%M%S')}")
    configs = {
        "gc": config.train_config("gc", base / "gc"),
        "compressed": config.train_config(config.policy, base / "compressed"),
    }
    turns = number_faults(config, {"turns": Whole(0)}).values()
    refuse_faults(list(dict.fromkeys([*turns, *(f for c in configs.values() for f in faults(c))])))
    _say(began, f"loading {config.model}")
    parts = load_parts(configs["gc"]) if parts is None else parts
    learners = {name: Learner(settings, parts.model) for name, settings in configs.items()}
    state = learners["gc"].state
    start = jax.tree.map(jnp.copy, state.params)
    sides: dict[str, Side] = {}
    for name, learner in learners.items():
        _say(began, f"{config.updates} updates under {name}: {configs[name].policy}")
        # Both start from the same parameters; an update donates its state, so that the frozen
        # weights are those that the last update handed on.
        learner.state = dataclasses.replace(
            learner.state, params=jax.tree.map(jnp.copy, start), frozen=state.frozen
        )
        batches: list[Batch] = []
        run = train(
            configs[name], parts, learner=learner, on_update=lambda _, b, to=batches: to.append(b)
        )
        if run.stopped_by is not None:
            return 128 + run.stopped_by
        state = run.state
        sides[name] = Side(run.metrics, learner, batches)
    _say(began, "the gradient of both policies on one batch")
    batch = _most_exposed(sides)
    policies = sides["compressed"].learner.policies
    error = gradient_error(sides["gc"].learner, state, batch, policies)
    seconds = None
    if config.turns:
        _say(began, f"{config.turns} timed updates of each side, in turns")
        seconds = update_seconds(learners, state, batch, config.turns)
    _say(began, f"done; metrics in {base}\n")
    print(table(sides, error, seconds, configs["compressed"], parts))
    return 0


def gradient_error(
    learner: Learner, state: TrainState, batch: Batch, policies: tuple[Policy, ...]
) -> float:
    """Relative error of the update's gradient under `policies` against GC, same state and batch."""
    config = learner.config
    gradients = jax.jit(
        make_gradients(
            learner.graphdef,
            **loss_options(config),
            temperature=config.temperature or 1.0,
        ),
        static_argnums=0,
        compiler_options=compiler_options(),
    )
    exact, _ = gradients((Policy({}),) * len(policies), state, batch)
    found, _ = gradients(policies, state, batch)
    return relative_error(found, exact)


def update_seconds(
    learners: dict[str, Learner], state: TrainState, batch: Batch, turns: int
) -> dict[str, list[float]]:
    """Seconds of the learners' compiled updates, in turns; `state` is consumed.

    An update donates its state, so that each call gets the state that the one before returned:
    nothing is copied, and the work of an update does not depend on the numbers.
    """
    holder = [state]

    def run(name: str) -> Callable[[], Any]:
        def update() -> Any:
            holder[0], metrics = learners[name].compile(batch)(holder[0], batch)
            return holder[0], metrics

        return update

    return interleaved({name: run(name) for name in learners}, turns)


def table(
    sides: dict[str, Side],
    error: float,
    seconds: dict[str, list[float]] | None,
    config: TrainConfig,
    parts: Parts,
) -> str:
    """The comparison as text: every number is marked as counted, compiled or measured."""
    seq = config.prompt_length + config.completion_length
    about = versions()
    lines = [
        f"{config.model} ({parts.model.config.n_layers} blocks), {config.task}, "
        f"{config.prompts} prompts x {config.group} completions, "
        f"{config.micro_rows} x {seq} tokens a microbatch",
        f"{about['backend']} ({about['device']}), jax {about['jax']}, {config.dtype}",
        "",
        f"{'':<38}{'gc':>12}{'compressed':>12}",
    ]

    def row(label: str, values: Sequence[str], kind: str) -> None:
        cells = "".join(f"{value:>12}" for value in values)
        lines.append(f"{label:<38}{cells}  {kind}")

    for index in range(len(sides["gc"].metrics)):
        at = [side.metrics[index] for side in sides.values()]
        row(f"update {index + 1}: reward", [f"{m['reward']:.3f}" for m in at], "measured")
        row("          exposure", [f"{m['exposure']:.4f}" for m in at], "measured")
        row("          gradient norm", [f"{m['grad_norm']:.4f}" for m in at], "measured")
    abouts = [side.learner.about for side in sides.values()]
    for name, label in _KEPT.items():
        row(f"saved in all blocks: {label}", [_mib(a[name]) for a in abouts], "counted")
    row("update's temporaries", [_mib(a["update_temp_bytes"]) for a in abouts], "compiled")
    row("gradient's relative error", ["0", f"{error:.4f}"], "measured")
    if seconds is not None:
        gc, compressed = seconds["gc"], seconds["compressed"]
        lines.append(
            f"update's time, compressed to gc: {ratio(compressed, gc)}  measured, median (low to "
            f"high) of {len(gc)} pairs run in turns"
        )
    lines += [
        "",
        "counted: from shapes, by hilore_jax.explain, for one microbatch",
        "compiled: XLA's memory analysis of the compiled update",
        "measured: found by running on this machine; the error is against GC's gradient",
    ]
    return "\n".join(lines)


_KEPT = {
    "bytes_H": "store",
    "bytes_L": "compress",
    "bytes_R": "recompute",
    "bytes_O": "offload",
}


def _most_exposed(sides: dict[str, Side]) -> Batch:
    # A batch whose groups all have equal rewards has a zero gradient, hence no relative error.
    metrics = sides["compressed"].metrics
    best = max(range(len(metrics)), key=lambda index: metrics[index]["exposure"])
    return sides["compressed"].batches[best]


def _mib(value: int | None) -> str:
    return "unknown" if value is None else f"{value / 2**20:.1f} MiB"


def _say(began: float, text: str) -> None:
    print(f"[{time.perf_counter() - began:6.1f} s] {text}", file=sys.stderr, flush=True)
