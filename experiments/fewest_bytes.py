"""The fewest bytes at which backward recomputes no matmul and the gradient is as good as asked.

From a calibration of SmolLM2: of the menu's entries that recompute no matmul, those of least bytes
whose calibrated risks add up to a gradient error of at most 0.005, 0.01 and 0.015 of a complete
update; then the error that real, held-out updates have under them.

    hilore calibrate --out calibration.json
    python experiments/fewest_bytes.py --calibration calibration.json    # 10 minutes on two cores
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
import sys
from pathlib import Path

import tyro

import hilore_jax as hl
from hilore_jax.grpo.gradient_norm import drift
from hilore_jax.planning.allocate import Allocation, allocate, total_risk
from hilore_jax.planning.calibrated import calibrated_menu
from hilore_jax.planning.memory_cache import write_whole
from hilore_jax.planning.menu import Entry, block_menu
from hilore_jax.planning.menus import BlockRisks, block_menus
from hilore_jax.planning.plan import runs
from hilore_jax.planning.realized import gradient_norm, relative_error
from hilore_jax.planning.risks import default_risk, recommended_codecs
from hilore_jax.planning.target import parse_target
from hilore_jax.training.abstract import training_update
from hilore_jax.training.accept_gradients import update_gradients
from hilore_jax.training.calibrate_command import RolloutConfig
from hilore_jax.training.parts import Parts, load_parts
from hilore_jax.training.rollouts import real_updates
from hilore_jax.training.trainer import versions

Menu = tuple[tuple[Entry, ...], BlockRisks]

OUT = Path(__file__).parent / "results" / "fewest_bytes.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(RolloutConfig):
    """Least bytes without a recomputed matmul, by gradient error."""

    calibration: str = "calibration.json"
    """The model's calibration."""
    risks: tuple[float, ...] = (0.0, 0.005, 0.01, 0.0125, 0.015)
    """Gradient errors of a complete update to plan for."""
    updates: int = 2
    """Held-out updates to try the choices on."""
    first: int = 1_000_000
    """Position in the task's stream where those begin."""
    out: str = str(OUT)
    """JSON file."""


def calibrated(blocks: hl.Blocks, made: hl.Calibration, exposure: float) -> Menu:
    """The block's menu, and the risk of each entry in each block, at an exposure."""
    target = parse_target("cpu")
    menu = block_menu(
        blocks.fn,
        *blocks.args,
        codecs=recommended_codecs(),
        risks=default_risk,
        target=target,
        argnums=blocks.argnums,
    )
    return calibrated_menu(menu, blocks, target, made, exposure)


def fewest_bytes(found: Menu, risk: float, paper: bool = False) -> Allocation:
    """The allocation of least bytes among the entries that recompute no matmul."""
    menu, risks = found
    free = [i for i, entry in enumerate(menu) if not entry.matmuls]
    # What is minimized is called seconds there.
    sized = tuple(dataclasses.replace(menu[i], seconds=float(menu[i].nbytes)) for i in free)
    chosen = tuple(tuple(row[i] for i in free) for row in risks)
    return allocate(block_menus(sized, chosen, len(risks)), 2**50, risk, paper=paper)


def main(config: Config, parts: Parts | None = None) -> None:
    """Chooses, measures, writes."""
    training = config.training()
    made = hl.Calibration.load(config.calibration)
    parts = load_parts(training) if parts is None else parts
    blocks = training_update(parts.model.config, training).blocks()
    per_update = training.rows // training.micro_rows
    whole = [
        math.hypot(*made.exposures[i : i + per_update])
        for i in range(0, len(made.exposures), per_update)
    ]
    exposure = statistics.fmean(whole)  # squared risks of an update's microbatches add up
    data = real_updates(training, parts, config.updates, first=config.first)
    gradients = update_gradients(data, training)
    recompute, paper = (hl.Policy({}),) * blocks.count, made.form == "paper"
    truth, own = [], []
    for update in data.updates:
        exact, exposures = gradients(recompute, update)
        # Risks are for the calibration's mean exposure and norm; each update has its own.
        moved = 1.0 if paper else drift(gradient_norm(exact), made.norm)
        share = [float(e) / exposure / moved for e in exposures]
        own.append(total_risk(share, paper=paper))
        truth.append(exact)

    menu, rows = calibrated(blocks, made, exposure), []
    for risk in config.risks:
        found = fewest_bytes(menu, risk, paper)
        errors = [
            relative_error(gradients(found.policies, update)[0], exact)
            for update, exact in zip(data.updates, truth, strict=True)
        ]
        rows.append(
            {
                "risk_budget": risk,
                "kept_bytes": found.nbytes,
                "risk": found.risk,
                "predicted_error": found.risk * statistics.fmean(own),
                "measured_error": statistics.fmean(errors),
                "by_update": errors,
                "predicted_by_update": [found.risk * factor for factor in own],
                "policies": [[n, str(policy)] for policy, n in runs(found.policies)],
            }
        )
        shown = {k: v for k, v in rows[-1].items() if k != "policies"}
        print(json.dumps(shown), file=sys.stderr, flush=True)
    about = {
        "command": "python experiments/fewest_bytes.py --calibration calibration.json",
        "versions": versions(),
        "model": config.model,
        "kept_bytes": "counted, of all blocks and one microbatch",
        "microbatch": [training.micro_rows, training.prompt_length + training.completion_length],
        "dtype": config.dtype,
        "exposure": exposure,
        "predicted_error": "at the updates' own exposures and gradient norms",
        "rows": rows,
    }
    out = Path(config.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(out, json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Config))
