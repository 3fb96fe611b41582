"""`hilore accept`: a plan tried on complete updates of real rollouts."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import tyro
from flax import nnx

from hilore_jax.actions import Policy
from hilore_jax.compiler import compiler_options
from hilore_jax.models.restack import restack
from hilore_jax.planning.accept import LIMIT, accept
from hilore_jax.planning.backward import block_program
from hilore_jax.planning.bar import Bar
from hilore_jax.planning.cost import Roofline
from hilore_jax.planning.files import check_output
from hilore_jax.planning.leave_out import Profiler
from hilore_jax.planning.memory import compiled_memory
from hilore_jax.planning.menu import Entry
from hilore_jax.planning.plan import Plan, runs
from hilore_jax.planning.profile import profile_plan
from hilore_jax.planning.target import parse_target
from hilore_jax.training.abstract import AbstractUpdate, check_plan, training_update
from hilore_jax.training.batch import Batch
from hilore_jax.training.calibrate_command import RolloutConfig, say
from hilore_jax.training.config import TrainConfig
from hilore_jax.training.gradients import add_gradients, make_micro_gradients, zero_gradients
from hilore_jax.training.load import load_file
from hilore_jax.training.parts import Parts, load_parts
from hilore_jax.training.rollouts import Measured, real_updates
from hilore_jax.training.step import TrainState, init_state


@dataclasses.dataclass(frozen=True, kw_only=True)
class AcceptOptions(RolloutConfig):
    """Whether a plan keeps its memory and its gradient error on real updates."""

    plan: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PLAN")]
    """The plan's JSON file, or --plan PLAN; it is written again with the result. Model, adapters,
    batch and dtype are taken from it where they are not given."""
    updates: int = 2
    """Complete updates to try it on."""
    first: int = 1_000_000
    """Position in the task's stream to begin at, far from what was calibrated or trained on."""
    limit: float = LIMIT
    """Mean relative gradient error that is accepted."""
    measure: int = 0
    """Turns of measured complete updates that say which of the plan's policies pay; 0 for none.
    Only on the device that the plan is for."""
    out: str = ""
    """File to write instead."""


def run_accept(config: AcceptOptions, parts: Parts | None = None) -> Plan:
    """Tries the plan, writes it with the result, and prints that.

    Args:
        config: the settings.
        parts: model, tokenizer and task, where they are not to be loaded by name.

    Returns:
        The plan as it was written.

    Raises:
        ValueError: settings that are wrong, or a plan for another model or batch.
    """
    training = config.training()
    _check(config)
    made: Plan = load_file(config.plan, "plan", "--plan")
    platform = parse_target(made.target).platform
    if config.measure and {"cuda": "gpu"}.get(platform, platform) != jax.default_backend():
        raise ValueError(
            f"--measure: the plan is for {made.target}, here is {jax.default_backend()}. Measure "
            "where it will run."
        )
    check_output(config.out or config.plan, "--out" if config.out else "--plan", "plan")
    if parts is None:  # it is checked before any weight is read
        planned = {"plan": config.plan, "allow_rejected": True}
        parts = load_parts(dataclasses.replace(training, **planned))
    update = training_update(parts.model.config, training)
    blocks = update.blocks()
    check_plan(made, update)
    say(f"sampling {config.updates} updates")
    first = config.first
    data = real_updates(training, parts, config.updates, first=first, progress=True)
    program = block_program(blocks.fn, *blocks.args, argnums=blocks.argnums)
    roofline = Roofline(parse_target(made.target))

    def entry(policy: Policy) -> Entry:
        figures = program.figures(policy)
        seconds = roofline.backward(program, policy, figures)
        return Entry(policy, figures.nbytes, seconds, *figures.work, 0.0)

    here = made.target.startswith("cpu")
    # Of a measured plan, entries that were not timed have no seconds to compare.
    modelled = here and made.cost == "modelled"
    say("gradients of each update: exact ones first, then under the plan")
    with Bar(True, None, "step") as bar:
        peak = functools.partial(compiled_peak, update, made.target) if here else None
        made = accept(
            made,
            _shown(bar, update_gradients(data, training), _gradient),
            data.updates,
            peak=peak and _shown(bar, peak, lambda _: "the complete update is compiled"),
            entry=entry if modelled else None,
            profile=profiler(update, data, config.measure) if config.measure else None,
            limit=config.limit,
        )
    made.save(config.out or config.plan)
    assert made.acceptance is not None
    print(f"{'accepted' if made.accepted else 'rejected'}: {made.acceptance['reason']}")
    if made.acceptance["removed"]:
        print("left out: " + "; ".join(made.acceptance["removed"]))
    return made


def _check(config: AcceptOptions) -> None:
    if config.updates < 1:
        raise ValueError(f"--updates {config.updates}: expected at least one complete update")
    if config.measure < 0:
        raise ValueError(f"--measure {config.measure}: expected a number of turns >= 0")
    if config.first < 0:
        raise ValueError(f"--first {config.first}: expected a position >= 0")
    if not 0 < config.limit < math.inf:
        raise ValueError(f"--limit {config.limit}: expected a relative error above 0")


def _shown(bar: Bar, fn: Callable[..., Any], what: Callable[..., str]) -> Callable[..., Any]:
    """A function whose calls the bar shows."""

    def call(*args: Any) -> Any:
        bar.step(what(*args))
        found = jax.block_until_ready(fn(*args))
        bar.end()
        return found

    return call


def _gradient(policies: Sequence[Policy], _: Batch) -> str:
    exact = all(policy == Policy({}) for policy in policies)
    return "exact gradient of an update" if exact else "gradient of an update under the plan"


def compiled_peak(update: AbstractUpdate, target: str, policies: tuple[Policy, ...]) -> int:
    """Peak bytes of the complete update under these policies, by the target's compiler."""
    bound = functools.partial(update, policies)
    arguments = update.arguments(policies)
    return compiled_memory(bound, *arguments, target=parse_target(target), donate=(0,)).peak


def profiler(update: AbstractUpdate, data: Measured, turns: int) -> Profiler:
    """Measures the first update under several policies, from the same weights, in turns."""
    model = nnx.merge(data.graphdef, data.params, data.frozen)

    def arguments(policies: tuple[Policy, ...]) -> tuple[TrainState, Batch]:
        lengths = tuple(n for _, n in runs(policies))
        state = init_state(restack(model, lengths), update.optimizer, jax.random.key(0))[1]
        return jax.tree.map(jnp.copy, state), data.updates[0]

    return functools.partial(profile_plan, update, arguments, repeats=turns)


def update_gradients(data: Measured, config: TrainConfig):
    """`gradients(policies, batch) -> (gradient, exposures)` of complete updates, jitted."""
    micro_gradients = make_micro_gradients(
        data.graphdef, clip=config.clip, beta=config.beta, temperature=config.temperature
    )

    def gradients(policies: Sequence[Policy], params: Any, frozen: Any, batch: Batch):
        tokens = jnp.sum(batch.completion_mask, dtype=jnp.float32)

        def accumulate(total, micro):
            grads, seen = micro_gradients(policies, params, frozen, micro, tokens)
            return add_gradients(total, grads), seen["exposure"]

        return jax.lax.scan(accumulate, zero_gradients(params), batch)

    jitted = jax.jit(gradients, static_argnums=0, compiler_options=compiler_options())
    return lambda policies, batch: jitted(tuple(policies), data.params, data.frozen, batch)
