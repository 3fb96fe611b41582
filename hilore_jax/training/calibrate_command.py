"""`hilore calibrate`: measured risks of compression for a model, on its own rollouts."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp

from hilore_jax.actions import Policy
from hilore_jax.planning.accept import LIMIT
from hilore_jax.planning.bounds import Real, Whole, number_faults, refuse_faults
from hilore_jax.planning.calibrate import calibrate
from hilore_jax.planning.calibration import Calibration
from hilore_jax.planning.files import check_output
from hilore_jax.planning.frontier import frontier
from hilore_jax.planning.measurements import check_record
from hilore_jax.planning.menu import block_menu
from hilore_jax.planning.plan import Blocks
from hilore_jax.planning.risks import default_risk, recommended_codecs
from hilore_jax.planning.schedule import Schedule
from hilore_jax.planning.target import parse_target
from hilore_jax.training.abstract import training_update
from hilore_jax.training.config import Rank, TrainConfig, faults
from hilore_jax.training.config_files import read_policy
from hilore_jax.training.gradients import make_micro_loss
from hilore_jax.training.held_out import seen
from hilore_jax.training.parts import Parts, load_parts
from hilore_jax.training.rollouts import Measured, real_updates
from hilore_jax.training.situation import MODEL


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """The updates that are measured on."""

    model: str = "smollm2-135m-instruct"
    """Bundled model's name, Hugging Face folder, or GGUF file."""
    lora_rank: Rank = 0
    """Rank of LoRA adapters; 0 trains every parameter."""
    task: str = "chain_sum"
    """A reasoning-gym dataset, or the built-in `copy` or `count`."""
    task_args: str = ""
    """The task's arguments, `key=value` pairs separated by commas."""
    prompts: int = 4
    """Prompts an update."""
    group: int = 8
    """Completions a prompt (G)."""
    micro_rows: int = 4
    """Rows of one microbatch."""
    prompt_length: int = 64
    """Tokens kept for a prompt."""
    completion_length: int = 32
    """Longest completion, tokens."""
    temperature: float = 1.0
    beta: float = 0.0
    """Weight of the K3 term; the reference is the model itself."""
    clip: float = 0.2
    format_reward: float = 0.0
    seed: int = 0
    dtype: str = "float32"
    """Compute dtype."""

    BOUNDS: ClassVar[dict[str, Whole | Real]] = {
        name: TrainConfig.BOUNDS[name]
        for name in (
            *("lora_rank", "prompts", "group", "micro_rows", "prompt_length", "completion_length"),
            *("temperature", "beta", "clip", "format_reward", "seed"),
        )
    }

    def training(self) -> TrainConfig:
        """As settings of a training run, checked, and the others with them.

        Raises:
            ValueError: lists every fault.
        """
        # Subclasses have settings of their own, some with the name of another one of training's.
        names = {field.name for field in dataclasses.fields(TrainConfig)}
        names &= {field.name for field in dataclasses.fields(RolloutConfig)}
        shared = {name: getattr(self, name) for name in names}
        config = TrainConfig(**shared, quiet=True)
        wrong = [fault for fault in faults(config) if "run_dir" not in fault]
        own = {name: bound for name, bound in self.BOUNDS.items() if name not in names}
        wrong += number_faults(self, own).values()
        refuse_faults(wrong or self.together(config))
        return config

    def together(self, training: TrainConfig) -> list[str]:
        """What is wrong with settings that are right by themselves, one sentence each."""
        return []


@dataclasses.dataclass(frozen=True, kw_only=True)
class CalibrateConfig(RolloutConfig):
    """Measured risks of compressing each block, on a model's own rollouts."""

    microbatches: int = 16
    """Microbatches to measure on; whole updates."""
    passes: int = 350
    """Most gradients to compute."""
    policies: int = 9
    """Policies of the menu to measure, each on every block."""
    also: tuple[str, ...] = ()
    """Further policies, as `hilore explain --policy` reads them."""
    form: Literal["squared", "paper"] = "squared"
    """Of the risks: `squared` ones add up as squares; `paper`: linear, of relative gradients."""
    target: str = "cpu"
    """Device whose menu is measured."""
    out: str = "calibration.json"
    """File to write; measurements are kept beside it until it is complete, and the same command
    goes on with them after an interruption."""

    BOUNDS: ClassVar[dict[str, Whole | Real]] = {
        **RolloutConfig.BOUNDS,
        "microbatches": Whole(),
        "passes": Whole(),
        "policies": Whole(0),
    }

    def together(self, training: TrainConfig) -> list[str]:
        """What is wrong with settings that are right by themselves, one sentence each."""
        per_update = training.rows // training.micro_rows
        if self.microbatches % per_update == 0:
            return []
        return [
            f"microbatches must be a multiple of {per_update}, the microbatches of an update of "
            f"{training.rows} rows, found {self.microbatches}"
        ]


def run_calibrate(config: CalibrateConfig, parts: Parts | None = None) -> Calibration:
    """Samples, measures, writes and prints.

    Args:
        config: the settings.
        parts: model, tokenizer and task, where they are not to be loaded by name.

    Raises:
        ValueError: settings that are wrong, or rollouts that teach nothing.
    """
    training = config.training()
    per_update = training.rows // training.micro_rows
    also = tuple(read_policy(text, "--also") for text in config.also)
    parse_target(config.target)
    check_output(config.out, "--out", "calibration")
    partial = Path(config.out).with_suffix(".partial.json")
    check_output(partial, "measurements beside --out:", "measurements")
    if parts is None:
        parts = load_parts(training, also)
    update = training_update(parts.model.config, training)
    blocks = update.blocks()
    chosen = (*default_policies(blocks, config), *also)
    how: dict[str, Any] = {
        "policies": chosen,
        "count": config.microbatches,
        "per_update": per_update,
        "passes": config.passes,
        "risk": config.form,
        "seed": config.seed,
    }
    check_record(partial, Schedule(blocks, **how).identity)  # all of it before the first rollout
    try:
        say(f"sampling {config.microbatches} microbatches")
        data = real_updates(training, parts, config.microbatches // per_update, progress=True)
        say(f"measuring {len(chosen)} policies on {blocks.count} blocks")
        made = calibrate(
            micro_loss(data, training),
            data.params,
            microbatches(data),
            blocks=blocks,
            args=(data.frozen,),
            resume=partial,
            progress=True,
            **how,
        )
    except KeyboardInterrupt:
        if partial.exists():
            raise KeyboardInterrupt(
                f"stopped; what was measured is kept in {partial}, and the same command goes on "
                "from there"
            ) from None
        raise
    recorded = {MODEL: config.model, **update.facts(), **seen(config, data.prompts)}
    made = dataclasses.replace(made, fingerprint={**made.fingerprint, **recorded})
    made.save(config.out)
    partial.unlink()
    print(made)
    return made


def say(text: str) -> None:
    """A line about what comes next."""
    print(text, file=sys.stderr, flush=True)


def default_policies(blocks: Blocks, config: CalibrateConfig) -> tuple[Policy, ...]:
    """Those of the block's menu under the default risks, each of another distortion."""
    if not config.policies:
        return ()
    menu = block_menu(
        blocks.fn,
        *blocks.args,
        codecs=recommended_codecs(),
        risks=default_risk,
        target=parse_target(config.target),
        argnums=blocks.argnums,
    )
    # Up to three times the gradient error that is accepted, were all blocks to take the entry.
    limit = 3 * LIMIT / blocks.count**0.5
    return frontier(menu, blocks.fn, *blocks.args, most=config.policies, risk=limit)


def microbatches(data: Measured) -> list[tuple]:
    """`(microbatch, tokens of its update)` of all updates, in order."""
    found = []
    for batch in data.updates:
        tokens = jnp.sum(batch.completion_mask, dtype=jnp.float32)
        count = batch.tokens.shape[0]
        found += [(jax.tree.map(lambda x, m=m: x[m], batch), tokens) for m in range(count)]
    return found


def micro_loss(data: Measured, config: TrainConfig):
    """`loss(policies, params, (microbatch, update tokens), frozen) -> (loss, exposure)`."""
    found = make_micro_loss(
        data.graphdef, clip=config.clip, beta=config.beta, temperature=config.temperature
    )

    def loss(policies, params, microbatch, frozen):
        value, seen = found(params, frozen, *microbatch, policies)
        return value, seen["exposure"]

    return loss
