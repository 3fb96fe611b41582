"""What `risk_model.py` tries: held-out microbatches, random policies, and the plans to compare."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

import hilore_jax as hl
from hilore_jax.planning.allocate import allocate, total_risk
from hilore_jax.planning.backward import block_program
from hilore_jax.planning.calibrated import calibrated_menu
from hilore_jax.planning.calibration import model_fingerprint
from hilore_jax.planning.frontier import distortion
from hilore_jax.planning.menu import block_menu
from hilore_jax.planning.risks import default_risk
from hilore_jax.planning.target import parse_target
from hilore_jax.training.abstract import training_update
from hilore_jax.training.calibrate_command import (
    RolloutConfig,
    micro_loss,
    microbatches,
)
from hilore_jax.training.parts import Parts
from hilore_jax.training.rollouts import real_updates

PLANNERS = "by risk", "by tensor error"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(RolloutConfig):
    """Predicted against measured gradient error."""

    calibration: str = ""
    """File that `hilore calibrate` wrote for this model and batch; when empty,
    `results/calibration_smollm2.json` beside this script, or for a quick run one of its own."""
    updates: int = 2
    """Complete held-out updates."""
    first: int = 2_000_000
    """Position in the task's stream to begin at."""
    policies: int = 60
    """Random policies."""
    exposures: int = 10
    """Microbatches of different exposure that they are tried on."""
    real: int = 6
    """How many of these are as they were sampled; the others' advantages are scaled."""
    each: int = 2
    """Microbatches that every policy is tried on."""
    errors: tuple[float, float] = (0.002, 0.1)
    """Range of predicted errors."""
    levels: tuple[float, ...] = (0.005, 0.01, 0.015, 0.03)
    """Gradient errors of a complete update to plan for."""
    quick: bool = False
    """A random model and a calibration of a few passes, to see that it works."""
    out: str = ""
    """JSON file; when empty, `results/risk_model.json` beside this script, or
    `runs/risk_model_quick.json` for a quick run. A picture is written beside it."""


class Study:
    """Everything that is known before the first gradient: data, menu, risks, policies."""

    def __init__(self, settings: Settings, parts: Parts):
        self.settings, self.calibration = settings, hl.Calibration.load(settings.calibration)
        if self.calibration.form != "squared":
            raise ValueError(f"{settings.calibration} has risks of the paper's form: use squared.")
        training = settings.training()
        update = training_update(parts.model.config, training)
        self.blocks = update.blocks()
        self.calibration.check(model_fingerprint(self.blocks))
        self.data = real_updates(training, parts, settings.updates, first=settings.first)
        self.loss, self.micros = micro_loss(self.data, training), microbatches(self.data)
        self.per_update = training.rows // training.micro_rows
        self.training, self.entries = training, self.calibration.policies
        count = range(self.blocks.count)
        fits = {(m.policy, m.block): m for m in self.calibration.measured}
        # At exposure 1, by block and entry, 0 first: they grow in proportion.
        self.risks = [
            [0.0, *(self.calibration.risk(p, b, 1.0) for p in self.entries)] for b in count
        ]
        self.errors = [[0.0, *(fits[p, b].error for p in self.entries)] for b in count]
        self._menu()
        self.tried = self._exposures()
        self.drawn = list(self._policies())

    def exposure(self, micro: Any) -> float:
        """Before any pass: the log-probs of the rollouts are the policy's own."""
        batch, tokens = micro
        omega = hl.grpo.loss_and_coefficients(
            *(batch.logp_old, batch.logp_old, batch.logp_ref, batch.advantages),
            *(batch.completion_mask, tokens),
            clip=self.training.clip,
            beta=self.training.beta,
        )[1]
        return float(hl.grpo.exposure(omega, batch.completion_mask))

    def _menu(self) -> None:
        """The menu of exact and measured entries, and each one's place in `entries`."""
        target, blocks = parse_target("cpu"), self.blocks
        used = [action for p in self.entries for _, action in p.actions]
        codecs = dict.fromkeys(action for action in used if isinstance(action, hl.Compress))
        how = {"risks": default_risk, "target": target, "argnums": blocks.argnums}
        menu = block_menu(blocks.fn, *blocks.args, codecs=tuple(codecs), **how)
        found, _ = calibrated_menu(menu, blocks, target, self.calibration, 1.0)
        # What is compared is what is recomputed: matmuls, whatever a device makes of them.
        self.menu = [dataclasses.replace(e, seconds=float(e.flops)) for e in found]
        traced = block_program(blocks.fn, *blocks.args, argnums=blocks.argnums).traced
        places = {distortion(p, traced): 1 + i for i, p in enumerate(self.entries)}
        places |= {distortion(hl.Policy({}), traced): 0}
        self.places = [places[distortion(entry.policy, traced)] for entry in self.menu]
        # As much as compression needs to leave nothing, or least, to recompute.
        lossy = [e for e, place in zip(self.menu, self.places, strict=True) if place]
        least = min(e.flops for e in lossy)
        self.memory = blocks.count * min(e.nbytes for e in lossy if e.flops == least)

    def _exposures(self) -> list[tuple[Any, float, bool]]:
        """Microbatches to try policies on: with their exposure, and whether they are real."""
        known = sorted(((self.exposure(m), i) for i, m in enumerate(self.micros)))
        settings, rng = self.settings, np.random.default_rng(self.settings.seed)
        real = [known[round(x)] for x in np.linspace(0, len(known) - 1, settings.real)]
        found = [(self.micros[i], e, True) for e, i in real]
        top = settings.errors[1] / 0.7 / total_risk(max(row) for row in self.risks)
        low, number = 1.5 * known[-1][0], settings.exposures - settings.real
        for wanted in np.geomspace(low, np.clip(top, 1.5 * low, 64 * low), number):
            batch, tokens = self.micros[known[rng.integers(len(known))][1]]
            factors = jnp.asarray(2 ** rng.uniform(-3, 3, batch.advantages.shape), jnp.float32)
            made = dataclasses.replace(batch, advantages=batch.advantages * factors)
            scale = wanted / self.exposure((made, tokens))
            made = dataclasses.replace(made, advantages=made.advantages * scale)
            found.append(((made, tokens), float(wanted), False))
        return found

    def _policies(self) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Random choices of an entry by block, and the microbatches to try them on.

        Of many draws of how many blocks, which, and which entries, the one whose prediction is
        closest to what is wanted.
        """
        rng, count, n = np.random.default_rng(1), self.blocks.count, len(self.tried)
        risks, usable = np.array(self.risks), np.isfinite(self.risks)
        most = total_risk(max(r for r in row if math.isfinite(r)) for row in self.risks)
        for i in range(self.settings.policies):
            exposure, low = self.tried[i % n][1], self.settings.errors[0]
            high = max(min(self.settings.errors[1], 0.7 * most * exposure), low)
            share = (i // n + rng.uniform()) / math.ceil(self.settings.policies / n)
            wanted, best = low * (high / low) ** share, (math.inf, ())
            for _ in range(400):
                size = math.ceil(count ** rng.uniform(0, 1))
                index = np.zeros(count, int)
                index[rng.permutation(count)[:size]] = rng.integers(1, risks.shape[1], size)
                index *= usable[np.arange(count), index]
                if index.any():
                    off = abs(math.log(self.predicted(index.tolist(), exposure) / wanted))
                    best = min(best, (off, tuple(index.tolist())))
            step = max(1, n // self.settings.each)
            yield (
                best[1],
                tuple(dict.fromkeys((i + step * k) % n for k in range(self.settings.each))),
            )

    def predicted(self, index: Sequence[int], exposure: float) -> float:
        """Root of the sum of squared risks."""
        return exposure * total_risk(row[i] for row, i in zip(self.risks, index, strict=True))

    def tensor_error(self, index: Sequence[int]) -> float:
        """The same sum of the decoded tensors' own relative errors."""
        return total_risk(row[i] for row, i in zip(self.errors, index, strict=True))

    def plan(self, table: list[list[float]], scale: float, risk: float) -> tuple[int, ...]:
        """A choice of menu entries by block: the least recomputed within `risk` and the memory."""
        menus = [
            [
                dataclasses.replace(entry, risk=row[place] * scale)
                for entry, place in zip(self.menu, self.places, strict=True)
            ]
            for row in table
        ]
        return allocate(menus, self.memory, risk).choices

    def plans(self, level: float) -> dict[str, list[tuple[int, ...]]]:
        """Each planner's choices by microbatch of all updates, for one level of error."""
        exposures = [self.exposure(micro) for micro in self.micros]
        tokens = [float(jnp.sum(b.completion_mask) / whole) for b, whole in self.micros]

        def mean_error(choices: tuple[int, ...]) -> float:
            index = [self.places[c] for c in choices]
            squares = sum(self.predicted(index, e) ** 2 for e in exposures)
            return math.sqrt(squares / self.settings.updates)

        low, high = 0.0, 1.01 * total_risk(max(row) for row in self.errors)
        alone = self.plan(self.errors, 1.0, low)
        for _ in range(8):
            middle = (low + high) / 2
            tried = self.plan(self.errors, 1.0, middle)
            if mean_error(tried) <= level:
                low, alone = middle, tried
            else:
                high = middle
        pairs = zip(exposures, tokens, strict=True)
        by_risk = [self.plan(self.risks, e, level * math.sqrt(share)) for e, share in pairs]
        return dict(zip(PLANNERS, (by_risk, [alone] * len(exposures)), strict=True))

    def figures(
        self, choices: Sequence[tuple[int, ...]], exposures: Sequence[float]
    ) -> dict[str, float]:
        """Of one update's choices by microbatch: what they predict and recompute."""
        indices = [[self.places[c] for c in chosen] for chosen in choices]
        pairs = zip(indices, exposures, strict=True)
        entries = [self.menu[c] for chosen in choices for c in chosen]
        full = max(e.flops for e in self.menu)
        return {
            "predicted": total_risk(self.predicted(index, e) for index, e in pairs),
            "flops": sum(e.flops for e in entries) / len(entries) / full,
            "bytes": sum(e.nbytes for e in entries) / len(choices),
            "compressed": sum(bool(i) for index in indices for i in index) / len(entries),
        }

    @property
    def passes(self) -> int:
        """Gradients to compute, where nothing is known yet."""
        plans = 1 + len(PLANNERS) * len(self.settings.levels)
        return len(self.micros) * plans + len(self.tried) + sum(len(at) for _, at in self.drawn)
