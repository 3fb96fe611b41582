"""Learning by dense AdamW, LoRA, LoGRA, and LoGRA without step control: reward, KL and memory.

A small decoder learns to reverse letters, several seeds; it starts half-way, where some updates of
dense AdamW have brought it, since adapters of a random model have nothing to adapt; a fifth way
there trains by AdamW what LoGRA leaves frozen. Then SmolLM2
on reasoning-gym's chain_sum, one seed, for some minutes a way. After every update the KL that it
really caused is measured, for all ways alike, on two responses of its batch: KL(before || after).

    python experiments/logra_learning.py            # about an hour on two cores; resumes
    python experiments/logra_learning.py --quick    # three updates of the small model
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from logra_ways import (
    OUT,
    SMALL_WAYS,
    TOKENIZER,
    WAYS,
    Settings,
    reverse_task,
    small_config,
    small_start,
    smollm2_config,
    with_adapters,
)

from hilore_jax.planning.memory_cache import write_whole
from hilore_jax.report.plots import Curves, Panel, plot_curves
from hilore_jax.training.batch import Batch
from hilore_jax.training.config import TrainConfig
from hilore_jax.training.learner import Learner
from hilore_jax.training.logra_probe import mean_realized_kl, probe_hidden, probes_of
from hilore_jax.training.parts import Parts, load_parts
from hilore_jax.training.trainer import train, versions


class KlMeter:
    """KL(before || after) of each update on two responses of its batch, nats a token."""

    def __init__(self, learner: Learner):
        self._learner = learner
        self._before = jax.tree.map(jnp.copy, learner.state.params)  # updates donate the state
        graphdef = learner.graphdef

        @jax.jit
        def measure(before: Any, after: Any, frozen: Any, batch: Batch) -> jax.Array:
            probes = probes_of(batch)
            old, _ = probe_hidden(graphdef, before, frozen, probes)
            new, head = probe_hidden(graphdef, after, frozen, probes)
            return mean_realized_kl(old, new, head, probes, 1.0)

        self._measure = measure

    def __call__(self, batch: Batch) -> float:
        """Of the update that was just made."""
        state = self._learner.state
        found = float(self._measure(self._before, state.params, state.frozen, batch))
        self._before = jax.tree.map(jnp.copy, state.params)
        return found


def run(config: TrainConfig, parts: Parts, minutes: float = 0.0) -> dict[str, Any]:
    """One run's curves and memory; ends after some minutes where they are given."""
    learner = Learner(config, parts.model)
    meter = KlMeter(learner)
    found: dict[str, Any] = {"reward": [], "realized_kl": [], "predicted_kl": [], "seconds": []}
    began = time.perf_counter()

    class Enough(Exception):
        """The time is up."""

    def on_update(metrics: dict[str, Any], batch: Batch) -> None:
        found["reward"].append(round(metrics["reward"], 4))
        found["realized_kl"].append(meter(batch))
        found["predicted_kl"].append(metrics.get("predicted_kl"))
        found["seconds"].append(round(metrics["seconds/update"], 3))
        if minutes and time.perf_counter() - began > 60 * minutes:
            raise Enough

    with contextlib.suppress(Enough):
        train(config, parts, learner=learner, on_update=on_update)
    leaves = jax.tree.leaves(learner.state)
    found["state_bytes"] = sum(getattr(leaf, "nbytes", 0) for leaf in leaves)
    found["update_temporary_bytes"] = learner.about.get("update_temp_bytes")
    return found


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """By model and way: reward of the first and last tenth, the KL of updates, memory."""
    found: dict[str, Any] = {}
    for key in dict.fromkeys((run["model"], run["way"]) for run in runs):
        mine = [run for run in runs if (run["model"], run["way"]) == key]
        tenth = [max(1, len(run["reward"]) // 10) for run in mine]
        kls = [kl for run in mine for kl in run["realized_kl"]]
        ratios = [
            seen / said
            for run in mine
            for seen, said in zip(run["realized_kl"], run["predicted_kl"], strict=True)
            if said
        ]
        found[", ".join(key)] = {
            "updates": [len(run["reward"]) for run in mine],
            "reward_first_tenth": [
                round(statistics.fmean(r["reward"][:n]), 4)
                for r, n in zip(mine, tenth, strict=True)
            ],
            "reward_last_tenth": [
                round(statistics.fmean(r["reward"][-n:]), 4)
                for r, n in zip(mine, tenth, strict=True)
            ],
            "realized_kl_median": float(f"{statistics.median(kls):.4g}"),
            "realized_kl_largest": float(f"{max(kls):.4g}"),
            "realized_over_predicted_median": round(statistics.median(ratios), 4) if ratios else "",
            "seconds_update_median": statistics.median(s for r in mine for s in r["seconds"][1:]),
            "state_MB": round(mine[0]["state_bytes"] / 1e6, 1),
            "temporary_MB": round((mine[0]["update_temporary_bytes"] or 0) / 1e6, 1),
        }
    return found


def wanted(settings: Settings) -> set[tuple[str, str, int]]:
    """Model, way and seed of every run."""
    small = {("small decoder", way, s) for way in SMALL_WAYS for s in range(settings.seeds)}
    return small | ({("SmolLM2", way, 0) for way in WAYS} if settings.minutes else set())


def draw(runs: list[dict[str, Any]], path: Path) -> None:
    """Reward and realized KL by update, a row for each model."""
    panels = []
    for model in dict.fromkeys(run["model"] for run in runs):
        rewards, kls = {}, {}
        for way in SMALL_WAYS:
            mine = [r for r in runs if (r["model"], r["way"]) == (model, way)]
            if not mine:
                continue
            length = min(len(run["reward"]) for run in mine)
            at = np.arange(1, length + 1)
            rewards[way] = Curves(at, np.array([r["reward"][:length] for r in mine]))
            kls[way] = Curves(at, np.array([r["realized_kl"][:length] for r in mine]))
        panels += [
            Panel(f"{model}: reward, average of 10 updates", "mean reward", rewards, average=10),
            Panel(f"{model}: KL that an update causes", "nats a token", kls, log=True, average=5),
        ]
    plot_curves(panels, path, title="GRPO by dense AdamW, LoRA and LoGRA, from one start")


def main(settings: Settings) -> int:
    """Runs, writes JSON and picture, prints the summary."""
    if settings.quick:
        settings = dataclasses.replace(settings, updates=3, start=2, seeds=1, minutes=0.0)
        if settings.out == str(OUT):
            settings = dataclasses.replace(settings, out="runs/logra_learning_quick.json")
    path = Path(settings.out)
    path.parent.mkdir(parents=True, exist_ok=True)
    shown = {k: v for k, v in dataclasses.asdict(settings).items() if k != "out"}
    runs: list[dict[str, Any]] = []
    if path.exists() and (old := json.loads(path.read_text()))["settings"] == shown:
        runs = old["runs"]  # go on

    def add(model: str, way: str, seed: int, **curves: Any) -> None:
        about = {"model": model, "way": way, "seed": seed, "versions": versions()}
        runs.append({**about, **curves})
        result = {
            "command": " ".join(["python experiments/logra_learning.py", *sys.argv[1:]]),
            "complete": not missing(),
            "settings": shown,
            "summary": summary(runs),
            "runs": runs,
        }
        write_whole(path, json.dumps(result) + "\n")
        last = json.dumps(summary(runs)[f"{model}, {way}"])
        print(f"{model}, {way}, seed {seed}: {last}", file=sys.stderr, flush=True)

    def missing() -> set[tuple[str, str, int]]:
        return wanted(settings) - {(r["model"], r["way"], r["seed"]) for r in runs}

    for seed in range(settings.seeds):
        todo = [way for way in SMALL_WAYS if ("small decoder", way, seed) in missing()]
        start = small_start(settings, seed) if todo else None
        for way in todo:
            assert start is not None
            model = with_adapters(start, way, settings.small_rank)
            with tempfile.TemporaryDirectory() as folder:
                config = small_config(settings, way, seed, folder)
                parts = Parts(model, TOKENIZER, reverse_task(seed))
                add("small decoder", way, seed, **run(config, parts))
    for way in WAYS:
        if ("SmolLM2", way, 0) not in missing():
            continue
        with tempfile.TemporaryDirectory() as folder:
            config = smollm2_config(settings, way, folder)
            add("SmolLM2", way, 0, **run(config, load_parts(config), settings.minutes))
    draw(runs, path.with_suffix(".png"))
    print(json.dumps(summary(runs), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Settings, description=__doc__)))
