"""Planners compared: compiled peak and modelled recomputation of one actor update, by target.

For each model and target: gradient checkpointing, no rematerialization, sqrt, selective, dots,
greedy, adacc and ours, each compiled for the target, which need not be here. Ours has chunked
logits, and so has every other; "gc, whole logits" is what most trainers run. A curve is what the
allocation predicts for other budgets than the plan's.

    python experiments/compare_planners.py                       # an hour on two cores; resumes
    python experiments/compare_planners.py --models qwen2.5-3b --targets cuda:h200
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")

import tyro

import hilore_jax as hl
from hilore_jax.planning.baselines import BASELINES, Block, baseline
from hilore_jax.planning.cost import recompute_seconds
from hilore_jax.planning.memory import compiled_memory
from hilore_jax.planning.memory_cache import write_whole
from hilore_jax.planning.plan import runs
from hilore_jax.planning.target import parse_target
from hilore_jax.training.plan_command import PlanConfig, abstract_update
from hilore_jax.training.trainer import versions

RESULTS = Path(__file__).parent / "results"


@dataclasses.dataclass(frozen=True)
class Config:
    """Planners compared on compiled updates."""

    models: tuple[str, ...] = ("qwen2.5-1.5b", "qwen2.5-3b", "qwen2.5-7b")
    targets: tuple[str, ...] = ("cuda:h200", "cuda:l40s-48")
    batch: str = "2x2048"
    lora: int = 16
    risk: float = 0.015
    out: str = str(RESULTS / "compare_planners.json")


def compare(config: Config, model: str, target_name: str) -> list[dict[str, Any]]:
    """The rows of one model on one target."""
    asked = PlanConfig(
        model=model, batch=config.batch, lora_rank=config.lora, target=target_name, risk=config.risk
    )
    update, target = abstract_update(asked), parse_target(target_name)
    blocks = update.blocks()
    whole = dataclasses.replace(update, head="whole")
    gc = (hl.Policy({}),) * blocks.count

    @functools.cache
    def seconds(policy: hl.Policy) -> float:
        return recompute_seconds(
            policy, blocks.fn, *blocks.args, argnums=blocks.argnums, target=target
        )

    @functools.cache
    def flops(policy: hl.Policy) -> int:
        explained = hl.explain(policy, blocks.fn, *blocks.args, argnums=blocks.argnums)
        return explained.recomputed.flops

    def row(name: str, policies: tuple[hl.Policy, ...], fn: Any = update) -> dict[str, Any]:
        memory = compiled_memory(
            functools.partial(fn, policies), *fn.arguments(policies), target=target, donate=(0,)
        )
        total = sum(map(flops, policies))
        found = {
            "model": model,
            "target": target_name,
            "planner": name,
            "peak_bytes": memory.peak,
            "recompute_seconds": sum(map(seconds, policies)),
            "recomputed_tflop": total / 1e12,
            "removed_flops": 1 - total / sum(map(flops, gc)),
        }
        print(json.dumps(found), file=sys.stderr, flush=True)
        return found

    rows = [row("gc, whole logits", gc, whole), row("gc", gc)]
    limit = int(1.1 * rows[1]["peak_bytes"])
    block = Block(blocks.fn, blocks.args, target, blocks.argnums)
    for name in BASELINES:
        if name != "gc":
            policies = baseline(name, block, blocks.count, limit - rows[1]["peak_bytes"])
            rows.append(row(name, policies))
    for label, budget in (
        ("hilore, 1.10 x gc", hl.Budget("1.10x gc", config.risk)),
        ("hilore, 1.10 x gc with whole logits", hl.Budget("1.10x gc", config.risk, whole)),
    ):
        made = hl.plan(update, update.arguments, blocks=blocks, budget=budget, target=target)
        removed = rows[1]["recompute_seconds"] - made.recompute_seconds
        possible = rows[1]["recompute_seconds"] - made.bound_seconds
        rows.append(
            row(label, made.policies)
            | {
                "budget_bytes": made.budget,
                "predicted_peak_bytes": made.predicted,
                "risk": made.risk,
                "share_of_lp_bound": removed / possible if possible else 1.0,
                "compilations": len(made.trials),
                "policies": [[n, str(policy)] for policy, n in runs(made.policies)],
                "pareto": [[row["peak"], row["seconds"]] for row in made.pareto()],
            }
        )
    for each in rows:
        each["fits"] = each["peak_bytes"] <= each.setdefault("budget_bytes", limit)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown, a table for each model and target."""
    parts = []
    for model, target in dict.fromkeys((row["model"], row["target"]) for row in rows):
        lines = [
            f"{model} on {target}",
            "",
            "| planner | peak, GiB | recomputation, ms | matmul FLOPs removed | of the LP bound |",
            "| --- | --- | --- | --- | --- |",
        ]
        for row in rows:
            if (row["model"], row["target"]) != (model, target):
                continue
            share = row.get("share_of_lp_bound")
            cells = (
                row["planner"] + ("" if row["fits"] else " (over budget)"),
                f"{row['peak_bytes'] / 2**30:.2f}",
                f"{1e3 * row['recompute_seconds']:.1f}",
                f"{row['removed_flops']:.1%}",
                "" if share is None else f"{share:.1%}",
            )
            lines.append("| " + " | ".join(cells) + " |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Peak memory against modelled recompute time, a panel for each model and target."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    cases = list(dict.fromkeys((row["model"], row["target"]) for row in rows))
    targets = list(dict.fromkeys(target for _, target in cases))
    models = list(dict.fromkeys(model for model, _ in cases))
    figure = Figure(figsize=(5 * len(models), 4 * len(targets)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(targets), len(models), squeeze=False)
    planners = list(dict.fromkeys(row["planner"] for row in rows))
    markers = dict(zip(planners, "sDx^v<>PoX*", strict=False))
    for row in rows:
        ours = row["planner"].startswith("hilore")
        axis = axes[targets.index(row["target"])][models.index(row["model"])]
        if pareto := row.get("pareto"):
            curve = [(peak / 2**30, 1e3 * seconds) for peak, seconds in pareto]
            axis.plot(*zip(*curve, strict=True), color="#d55e00", linewidth=1, alpha=0.6)
        axis.plot(
            row["peak_bytes"] / 2**30,
            1e3 * row["recompute_seconds"],
            markers[row["planner"]],
            markersize=10 if ours else 7,
            color="#d55e00" if ours else "#333333",
            label=row["planner"],
        )
    for target, line in zip(targets, axes, strict=True):
        for model, axis in zip(models, line, strict=True):
            axis.set_title(f"{model} on {target}")
            axis.set_xlabel("compiled peak, GiB")
            axis.set_ylabel("recomputation, ms a microbatch (modelled)")
            axis.grid(alpha=0.3)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False)
    figure.savefig(path, dpi=110)


def main(config: Config) -> None:
    """Compares what is not yet in the results, draws all of them, and prints the models' tables."""
    out = Path(config.out)
    done = json.loads(out.read_text())["rows"] if out.exists() else []
    for model in config.models:
        for target in config.targets:
            if any((row["model"], row["target"]) == (model, target) for row in done):
                continue
            done += compare(config, model, target)
            about = {
                "command": "python experiments/compare_planners.py",
                "versions": versions(),
                "batch": config.batch,
                "lora": config.lora,
                "risk": config.risk,
                "peak": "compiled",
                "seconds": "modelled",
                "rows": done,
            }
            write_whole(out, json.dumps(about, indent=1) + "\n")
    draw(done, out.with_suffix(".png"))
    print(table([row for row in done if row["model"] in config.models]))


if __name__ == "__main__":
    main(tyro.cli(Config))
