"""Predicted against measured gradient error of random plans, and what planning without it costs.

A calibration's risks are tried on rollouts that it has not seen. First random policies, drawn over
blocks and measured policies so that predictions spread over the range asked for, on microbatches of
different exposure: real ones, then some whose rows' advantages are scaled, each row by a factor of
its own. Then plans of complete updates: by risk, each microbatch by its exposure; and by the error
of the decoded tensors alone, which knows neither kappa nor exposure. Both from the same menu within
the same bytes; the second's threshold is the one at which the same error is predicted for both.

    hilore calibrate --out experiments/results/calibration_smollm2.json
    python experiments/risk_model.py          # 274 gradients; resumes
    python experiments/risk_model.py --quick  # a tiny random model
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import tyro
from flax import nnx
from risk_report import draw, summary, table
from risk_study import PLANNERS, Settings, Study
from tqdm import tqdm

from hilore_jax.compiler import compiler_options
from hilore_jax.intervene import Interventions
from hilore_jax.models.config import DecoderConfig
from hilore_jax.models.decoder import Decoder
from hilore_jax.planning.measurements import digest
from hilore_jax.planning.memory_cache import library_version, write_whole
from hilore_jax.planning.values import content
from hilore_jax.training.calibrate_command import CalibrateConfig, RolloutConfig, run_calibrate
from hilore_jax.training.parts import Parts, load_parts
from hilore_jax.training.toy import CharTokenizer, count_task
from hilore_jax.training.trainer import versions

QUICK: dict[str, Any] = {
    "task": "count",
    "prompts": 1,
    "group": 4,
    "micro_rows": 2,
    "prompt_length": 12,
    "completion_length": 4,
    "updates": 1,
    "policies": 6,
    "exposures": 4,
    "real": 2,
    "errors": (0.002, 0.02),
    "levels": (0.001, 0.0015),
}
QUICK_POLICIES = "mlp_up=int8:tile=32", "mlp_gate=int8:tile=32,mlp_up=int8:tile=32"


def small_parts() -> Parts:
    """A random decoder of two blocks, and a task whose rewards follow from what was sampled."""
    heads: dict[str, Any] = {"n_heads": 2, "n_kv_heads": 1, "head_dim": 16}
    config = DecoderConfig(vocab_size=64, d_model=32, d_ff=48, n_layers=2, max_seq=64, **heads)
    score = lambda answer, item: sum(map(ord, answer)) % 7 / 7  # noqa: E731
    task = dataclasses.replace(count_task(limit=3), score=score)
    return Parts(Decoder(config, rngs=nnx.Rngs(0)), CharTokenizer(), task)


class Probe:
    """The one executable: adds a microbatch's gradient to a sum, and compares that with another."""

    def __init__(self, loss: Any, params: Any, micro: Any, entries: Any, blocks: int, frozen: Any):
        def probe(total, reference, params, micro, index, first, frozen):
            def objective(params):
                chosen = Interventions(entries, index, jnp.zeros((blocks, 2)))
                return loss(chosen, params, micro, frozen)

            (_, exposure), grads = jax.value_and_grad(objective, has_aux=True)(params)
            total = jax.tree.map(lambda t, g: jnp.where(first, 0.0, t) + g, total, grads)
            pairs = list(zip(jax.tree.leaves(total), jax.tree.leaves(reference), strict=True))
            gap = sum(jnp.sum((t - r) ** 2) for t, r in pairs)
            norm = sum(jnp.sum(t**2) for t, _ in pairs)
            return total, (exposure, jnp.sqrt(gap), jnp.sqrt(norm))

        zeros = lambda: jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)  # noqa: E731
        self._total, self._reference, self._params, self._frozen = zeros(), zeros(), params, frozen
        given = self._arguments(micro, [0] * blocks, True)
        jitted = jax.jit(probe, donate_argnums=0, compiler_options=compiler_options())
        self._run = jitted.lower(*given).compile()

    def _arguments(self, micro: Any, index: Sequence[int], first: bool) -> tuple[Any, ...]:
        which = jnp.asarray(index, jnp.int32), jnp.array(first)
        return self._total, self._reference, self._params, micro, *which, self._frozen

    def __call__(self, micro: Any, index: Sequence[int], first: bool = True) -> list[float]:
        """Exposure, and of the sum (anew if `first`): distance from what was kept, and norm."""
        self._total, found = self._run(*self._arguments(micro, index, first))
        return [float(x) for x in jax.device_get(found)]

    def keep(self) -> None:
        """The sum is what the next ones are compared with."""
        self._total, self._reference = self._reference, self._total


class Record:
    """What was measured, written after every gradient."""

    def __init__(self, path: Path, identity: str):
        self.path, self.body = path, {"identity": identity, "seconds": 0.0, "rows": {}}
        self.began = time.perf_counter()
        if path.exists():
            found = json.loads(path.read_text())
            if found["identity"] != identity:
                raise ValueError(f"{path} holds measurements under other settings: remove it.")
            self.body = found

    @property
    def rows(self) -> dict[str, Any]:
        """By name."""
        return self.body["rows"]

    def add(self, name: str, row: dict[str, Any]) -> None:
        """Keeps a row."""
        now = time.perf_counter()
        self.body["seconds"], self.began = self.body["seconds"] + now - self.began, now
        self.rows[name] = row
        write_whole(self.path, json.dumps(self.body) + "\n")


def measure(study: Study, probe: Probe, record: Record, bar: tqdm) -> None:
    """Adds what the record lacks: plans of complete updates first, then random policies."""
    size, whole = study.per_update, study.micros
    exact = [0] * study.blocks.count
    plans = [
        (level, planner, choices)
        for level in study.settings.levels
        for planner, choices in study.plans(level).items()
    ]
    for u in range(study.settings.updates):
        micros = whole[u * size : (u + 1) * size]
        todo = [p for p in plans if f"update {u} {p[1]} {p[0]:g}" not in record.rows]
        bar.update(size * (len(plans) - len(todo)))
        if not todo:
            bar.update(size)
            continue
        for m, micro in enumerate(micros):
            _, _, norm = probe(micro, exact, m == 0)
            bar.update()
        probe.keep()
        for level, planner, every in todo:
            choices, exposures, found = every[u * size : (u + 1) * size], [], []
            for m, (micro, chosen) in enumerate(zip(micros, choices, strict=True)):
                found = probe(micro, [study.places[c] for c in chosen], m == 0)
                exposures.append(found[0])
                bar.update()
            row = {"update": u, "planner": planner, "level": level, "norm": norm}
            row |= {"error": found[1] / norm, **study.figures(choices, exposures)}
            record.add(f"update {u} {planner} {level:g}", row)
    for m, (micro, _, real) in enumerate(study.tried):
        trials = [(i, index) for i, (index, at) in enumerate(study.drawn) if m in at]
        todo = [(i, index) for i, index in trials if f"policy {i} on {m}" not in record.rows]
        bar.update(len(trials) - len(todo))
        if todo:
            _, _, norm = probe(micro, exact)
            probe.keep()
        bar.update()
        for i, index in todo:
            exposure, gap, _ = probe(micro, index)
            row = {"policy": i, "microbatch": m, "real": real, "exposure": exposure, "norm": norm}
            row["measured"] = gap / study.calibration.norm
            row["predicted"] = study.predicted(index, exposure)
            row["tensor_error"] = study.tensor_error(index)
            record.add(f"policy {i} on {m}", row | {"chosen": list(index)})
            bar.update()


def prepare(settings: Settings) -> tuple[Settings, Parts]:
    """The model; a quick run also makes its calibration."""
    if not settings.quick:
        return settings, load_parts(settings.training())
    settings, parts = dataclasses.replace(settings, **QUICK), small_parts()
    if not Path(settings.calibration).exists():
        shared = {f.name: getattr(settings, f.name) for f in dataclasses.fields(RolloutConfig)}
        how = {"microbatches": 2, "passes": 20, "policies": 0, "also": QUICK_POLICIES}
        run_calibrate(CalibrateConfig(**shared, **how, out=settings.calibration), parts)
    return settings, parts


def main(argv: Sequence[str] | None = None) -> int:
    """Measures what is missing, writes the result and its picture; 130 after an interruption."""
    argv = list(sys.argv[1:] if argv is None else argv)
    settings = tyro.cli(Settings, args=argv, prog="risk_model.py", description=__doc__)
    name = "runs/risk_model_quick.json" if settings.quick else "results/risk_model.json"
    out = Path(settings.out or (name if settings.quick else Path(__file__).parent / name))
    out.parent.mkdir(parents=True, exist_ok=True)
    if not settings.calibration:
        beside = Path(__file__).parent / "results" / "calibration_smollm2.json"
        given = out.with_suffix(".calibration.json") if settings.quick else beside
        settings = dataclasses.replace(settings, calibration=str(given))
    settings, parts = prepare(settings)
    study = Study(settings, parts)
    given = {
        k: v for k, v in dataclasses.asdict(settings).items() if k not in ("out", "calibration")
    }
    calibration = [study.risks, study.calibration.norm]
    # Without the floats: a log-prob that is computed again may differ in its last bits.
    sampled = [content(micro, floats=False) for micro in study.micros]
    identity = digest([given, calibration, jax.__version__, library_version(), *sampled])
    record = Record(out.with_suffix(".partial.json"), identity)
    begun = time.perf_counter()
    first = study.tried[0][0]
    probe = Probe(
        study.loss, study.data.params, first, study.entries, study.blocks.count, study.data.frozen
    )
    record.body["compile_seconds"] = round(time.perf_counter() - begun, 1)
    total = study.passes
    with tqdm(total=total, unit="pass", disable=None) as bar:
        try:
            measure(study, probe, record, bar)
        except KeyboardInterrupt:
            print(f"stopped; the same command goes on from {record.path.name}", file=sys.stderr)
            return 130
    rows = list(record.rows.values())
    trials = [row for row in rows if "policy" in row]
    updates = [row for row in rows if "planner" in row]
    result = {
        "command": " ".join(["python experiments/risk_model.py", *argv]),
        "versions": versions(),
        "settings": given,
        "model": "random" if settings.quick else settings.model,
        "passes": total,
        "minutes": round(record.body["seconds"] / 60, 1),
        "measured": "norm of the gradient's error over the calibration's norm of an update's "
        "gradient; of complete updates over the exact gradient's own norm",
        "recomputed": "matmul FLOPs that backward evaluates again, share of gradient "
        "checkpointing's",
        "memory": study.memory,
        "calibration": {
            **{k: getattr(study.calibration, k) for k in ("norm", "bias", "exposures", "factors")},
            "policies": [str(policy) for policy in study.entries],
        },
        "exposures": [[e, "real" if real else "scaled"] for _, e, real in study.tried],
        "summary": summary(
            trials, updates, study.calibration.bias, study.calibration.norm, PLANNERS
        ),
    }
    lines = lambda rows: ",\n".join("  " + json.dumps(row) for row in rows)  # noqa: E731
    text = json.dumps(result | {"trials": [], "updates": []}, indent=1)
    for key, found in (("trials", trials), ("updates", updates)):
        text = text.replace(f'"{key}": []', f'"{key}": [\n{lines(found)}\n ]')
    write_whole(out, text + "\n")
    draw(result | {"trials": trials, "updates": updates}, out.with_suffix(".png"))
    with contextlib.suppress(FileNotFoundError):
        record.path.unlink()
    print(table(result["summary"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
