"""`hilore plan`: a plan for a model's actor update by name, without weights or the device."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import optax

from hilore_jax._extras import require
from hilore_jax.logra.sketches import Sketches
from hilore_jax.models.config import DecoderConfig, LoraConfig, SketchConfig
from hilore_jax.models.lookup import shape_of
from hilore_jax.planning.bounds import refuse_faults
from hilore_jax.planning.buckets import microbatch_risk
from hilore_jax.planning.budget import Budget
from hilore_jax.planning.calibration import Calibration, model_fingerprint
from hilore_jax.planning.files import check_output
from hilore_jax.planning.ladder import Ladder, plan_ladder
from hilore_jax.planning.measure import Measurement, check_measurable
from hilore_jax.planning.measured import Measured
from hilore_jax.planning.plan import Plan
from hilore_jax.planning.solve import plan
from hilore_jax.planning.target import parse_target
from hilore_jax.training.abstract import AbstractUpdate
from hilore_jax.training.batch_exposure import check_exposure_of, other_batch
from hilore_jax.training.held_out import carried
from hilore_jax.training.load import load_file
from hilore_jax.training.logra_config import say_narrow, targets_of
from hilore_jax.training.plan_config import PlanConfig, batch_of, plan_faults
from hilore_jax.training.situation import MODEL, check_situation, model_facts, plan_settings


def run_plan(config: PlanConfig) -> Plan | Ladder:
    """Plans, prints the table, and writes what was asked for.

    Raises:
        ValueError: an option that cannot be read, or a budget that cannot be met.
    """
    calibration = _checked(config)
    update = abstract_update(config)
    say_narrow(update.config, config.dense)
    if calibration is not None:
        _check_calibration(calibration, update)
        if config.ladder:  # it is selected from by what exposures are
            if other := other_batch(calibration, update.facts()):
                print(f"the ladder's buckets: {other}", file=sys.stderr, flush=True)
        elif config.exposure is None:
            check_exposure_of(calibration, update.facts())
    cost = planning_cost(config, update)
    whole = dataclasses.replace(update, head="whole")
    share = 1 / config.micro
    risk = config.risk
    if calibration is not None and not config.ladder:
        # Calibrated risks are a microbatch's, default ones a whole update's. A ladder has its own
        # way of sharing R.
        risk = microbatch_risk(risk, share, paper=calibration.form == "paper")
    budget = Budget(
        config.memory, risk, baseline=whole if config.baseline == "whole-logits" else None
    )
    options: dict[str, Any] = {
        "blocks": update.blocks(),
        "budget": budget,
        "target": config.target,
        "offload": config.offload,
        "cost": cost,
        "calibration": calibration,
        "progress": True,
    }
    args = update.random_arguments() if isinstance(cost, Measurement) else update.arguments
    try:
        if config.ladder:
            made = plan_ladder(update, args, share=share, **options)
        else:
            made = plan(update, args, exposure=config.exposure, **options)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            "stopped, no file was written; what was compiled is kept, and the same command goes on "
            "from there"
        ) from None
    prompts = {} if calibration is None else carried(calibration.fingerprint)
    made = _recorded(made, {MODEL: config.model, **update.facts(), **prompts})
    print(made)
    if isinstance(made, Ladder):
        made.save(config.ladder)
        return made
    if config.out:
        made.save(config.out)
    if config.plot:
        made.plot(config.plot)
    return made


def _checked(config: PlanConfig) -> Calibration | None:
    """The calibration, after all that can be said of the options without the model."""
    refuse_faults(plan_faults(config))
    calibration: Calibration | None = None
    if config.calibration:
        calibration = load_file(config.calibration, "calibration", "--calibration")
    if calibration is None and config.exposure is not None:
        raise ValueError("--exposure needs --calibration: default risks do not depend on it")
    if config.ladder:
        _check_ladder(config, calibration)
        check_output(config.ladder, "--ladder", "ladder")
    if config.out:
        check_output(config.out, "--out", "plan")
    if config.plot:
        check_output(config.plot, "--plot")
        if Path(config.plot).suffix.lower() not in (".png", ".svg", ".pdf"):
            raise ValueError(f"--plot {config.plot}: expected a name ending in .png, .svg or .pdf")
        require("matplotlib", "plots", "--plot")
    return calibration


def _check_calibration(calibration: Calibration, update: AbstractUpdate) -> None:
    """Refuses another model's before anything long, in words where the file has them."""
    facts, settings = calibration.fingerprint, plan_settings(calibration.fingerprint)
    found = {**model_fingerprint(update.blocks()), **model_facts(update.config)}
    check_situation(facts, found, "calibration", settings)


def _recorded(made: Plan | Ladder, facts: dict[str, str]) -> Plan | Ladder:
    """A plan, or all of a ladder's, that says what it was made for."""
    if isinstance(made, Ladder):
        return dataclasses.replace(made, plans=tuple(_recorded(p, facts) for p in made.plans))
    return dataclasses.replace(made, fingerprint={**made.fingerprint, **facts})


def _check_ladder(config: PlanConfig, calibration: Calibration | None) -> None:
    if calibration is None:
        raise ValueError(
            "--ladder needs --calibration: default risks do not depend on the exposure that its "
            "plans are for"
        )
    asked = {"out": config.out, "plot": config.plot, "exposure": config.exposure is not None}
    if wrong := [f"--{name}" for name, given in asked.items() if given]:
        raise ValueError(
            f"{' and '.join(wrong)} belong to a single plan, --ladder writes one for each power of "
            "two of exposure: give one or the other"
        )


def planning_cost(
    config: PlanConfig, update: AbstractUpdate | None = None
) -> str | Measurement | Measured:
    """What `--cost` asks for.

    Args:
        config: the settings.
        update: what is planned; None: a plan's seconds are not held against it.

    Raises:
        ValueError: an unknown word, a target that is not here, or a plan that was not measured, or
            was for another update.
    """
    if config.cost.endswith(".json"):
        other: Plan = load_file(config.cost, "plan", "--cost")
        measured = other.measured
        if measured is None:
            raise ValueError(
                f"--cost {config.cost}: the seconds of that plan are modelled; expected a plan "
                "that was made with --cost measured"
            )
        if update is not None:
            facts = other.fingerprint
            check_situation(facts, update.facts(), "measured plan", plan_settings(facts))
        return measured
    if config.cost == "modelled":
        return config.cost
    if config.cost != "measured":
        raise ValueError(
            f"--cost {config.cost}: expected modelled, measured, or a measured plan's JSON file"
        )
    check_measurable((), parse_target(config.target))  # before any weight is made
    return Measurement(turns=config.turns, microbatches=config.micro)


def abstract_update(config: PlanConfig) -> AbstractUpdate:
    """The model's actor update by shapes.

    Raises:
        ValueError: a batch that is not ROWSxTOKENS, or an unknown model.
    """
    rows, seq = batch_of(config)
    completion = config.completion or seq - 1
    if not 0 < completion < seq:
        raise ValueError(f"--completion {completion}: expected 1 to {seq - 1} of {seq} tokens")
    return AbstractUpdate(
        model_shape(config, parse_target(config.target).platform),
        micro=config.micro,
        rows=rows,
        seq=seq,
        completion=completion,
        optimizer=optax.adamw(1e-6),
        beta=config.beta,
        dense=config.dense == "adamw",
    )


def model_shape(config: PlanConfig, platform: str) -> DecoderConfig:
    """The model's config, with the attention that runs on the target's platform."""
    lora = LoraConfig(rank=config.lora_rank) if config.lora_rank else None
    # As `hilore train` keeps them: weights that train are in float32, unless steps into them are
    # rounded at random.
    stored = config.dtype if lora else "float32"
    fields = {"dtype": config.dtype, "param_dtype": stored, "lora": lora}
    if config.optimizer == "logra":
        sketches = Sketches(rank=config.rank, kind=config.projection, dtype=config.dtype)
        fields["param_dtype"] = config.weights
        fields["sketches"] = SketchConfig(sketches, targets_of(config))
    shape = shape_of(config.model, **fields)
    fits = shape.head_dim <= 128 and shape.head_dim % 8 == 0 and shape.dtype != "float32"
    kind = "cudnn" if platform == "cuda" and fits else "xla"
    return dataclasses.replace(shape, attention=kind)
