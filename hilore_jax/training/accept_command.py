"""`hilore accept`: a plan tried on complete updates of real rollouts."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Annotated, Any, ClassVar

import jax
import jax.numpy as jnp
import tyro
from flax import nnx

from hilore_jax.actions import Policy
from hilore_jax.models.restack import restack
from hilore_jax.planning.accept import LIMIT, PeakOf, accept, verdict
from hilore_jax.planning.accept_ladder import accept_ladder, check_finite_bucket
from hilore_jax.planning.backward import block_program
from hilore_jax.planning.bar import Bar
from hilore_jax.planning.bounds import Real, Whole
from hilore_jax.planning.cost import Roofline
from hilore_jax.planning.device_memory import DevicePeak
from hilore_jax.planning.files import check_output, kind_among
from hilore_jax.planning.frontier import distortion
from hilore_jax.planning.ladder import Ladder
from hilore_jax.planning.leave_names import BlockView
from hilore_jax.planning.leave_out import Profiler
from hilore_jax.planning.menu import Entry
from hilore_jax.planning.out_of_memory import OutOfMemoryError, naming_out_of_memory
from hilore_jax.planning.plan import Plan, runs
from hilore_jax.planning.profile import profile_plan
from hilore_jax.planning.target import Target, parse_target
from hilore_jax.training.abstract import AbstractUpdate, check_plan, training_update
from hilore_jax.training.accept_gradients import mixed_gradients, update_gradients
from hilore_jax.training.batch import Batch
from hilore_jax.training.calibrate_command import RolloutConfig, say
from hilore_jax.training.held_out import check_held_out
from hilore_jax.training.load import load_file
from hilore_jax.training.parts import Parts, load_parts
from hilore_jax.training.rollouts import Measured, real_updates
from hilore_jax.training.situation import SKETCH_RANK
from hilore_jax.training.step import TrainState, init_state
from hilore_jax.training.update_memory import compiled_update, device_peak


@dataclasses.dataclass(frozen=True, kw_only=True)
class AcceptOptions(RolloutConfig):
    """Whether a plan, or each of a ladder's, keeps its budgets on real updates."""

    plan: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PLAN")]
    """The JSON file of a plan or a ladder, or --plan PLAN; it is written again with the result.
    Model, adapters, batch and dtype are taken from it where they are not given."""
    updates: int = 2
    """Complete updates to try it on; of a ladder, each plan on those whose exposure is its."""
    first: int = 1_000_000
    """Position in the task's stream to begin at, far from what was calibrated or trained on."""
    limit: float = LIMIT
    """Mean relative gradient error that is accepted."""
    measure: int = 0
    """Turns of measured complete updates that say which of the plan's policies pay; 0 for none.
    Only on the device that the plan is for."""
    out: str = ""
    """File to write instead."""

    BOUNDS: ClassVar[dict[str, Whole | Real]] = {
        **RolloutConfig.BOUNDS,
        "updates": Whole(),
        "first": Whole(0),
        "limit": Real(positive=True),
        "measure": Whole(0),
    }


def run_accept(config: AcceptOptions, parts: Parts | None = None) -> tuple[Plan, ...]:
    """Tries the plan, or those of the ladder, writes it with the result, and prints that.

    Args:
        config: the settings.
        parts: model, tokenizer and task, where they are not to be loaded by name.

    Returns:
        The plan, or the ladder's plans, as they were written.

    Raises:
        ValueError: settings that are wrong, prompts that were calibrated on, a plan for another
            model or batch, or a ladder of which nothing could be tried.
    """
    training = config.training()
    kind = kind_among(config.plan, ("plan", "ladder"))
    made: Plan | Ladder = load_file(config.plan, kind, "--plan")
    if isinstance(made, Ladder):
        check_finite_bucket(made)
    plans = made.plans[:-1] if isinstance(made, Ladder) else (made,)
    if plans[0].fingerprint.get(SKETCH_RANK, "0") != "0":
        raise ValueError(
            f"{config.plan} is for updates of LoGRA, whose gradients are sketches; hilore accept "
            "compares whole gradients. Train with it as it is: hilore train --plan "
            f"{config.plan}, and --measure-error-every for the error of its sketches"
        )
    device = _device(config.plan, plans[0])
    here = {"cuda": "gpu"}.get(device.platform, device.platform) == jax.default_backend()
    if config.measure and not here:
        raise ValueError(
            f"--measure: the plan is for {device.name}, here is {jax.default_backend()}. Measure "
            "where it will run."
        )
    check_output(config.out or config.plan, "--out" if config.out else "--plan", kind)
    check_held_out(plans[0].fingerprint, config, config.first)
    if parts is None:  # it is checked before any weight is read
        planned: dict[str, Any] = {kind: config.plan, "allow_rejected": True}
        parts = load_parts(dataclasses.replace(training, **planned))
    update = training_update(parts.model.config, training)
    for each in plans:
        check_plan(each, update)
    measured = _measured(update, plans) if here and device.count == 1 else None
    if measured is None:
        why = f"made for {device.name}" if not here or device.count > 1 else "it counts no memory"
        say(
            f"only compiled peaks are compared, none is measured on {jax.local_devices()[0]}: {why}"
        )
    say(f"sampling {config.updates} updates")
    data = real_updates(training, parts, config.updates, first=config.first, progress=True)
    # Of a measured plan, entries that were not timed have no seconds to compare.
    modelled = here and plans[0].cost == "modelled"
    say("gradients of each update: exact ones first, then under the plan")
    with Bar(True, None, "step") as bar:
        memory = functools.partial(compiled_update, update, plans[0].target)
        arguments = (_shown(bar, update_gradients(data, training), _gradient), data.updates)
        options: dict[str, Any] = {
            "memory": _shown(bar, memory, lambda _: "the complete update is compiled"),
            "measured": measured,
            "block": block_view(update, plans[0].target) if modelled else None,
            "profile": profiler(update, data, config.measure) if config.measure else None,
            "limit": config.limit,
        }
        if not here:  # as it was compiled when the plan was made
            del options["memory"]
        if isinstance(made, Ladder):
            options["mixed"] = _shown(bar, mixed_gradients(data, training), _mixed)
            options["save"] = lambda ladder: ladder.save(config.out or config.plan)
            tried = accept_ladder(made, *arguments, tokens=_tokens, **options)
            made, text = tried.ladder, str(tried)
        else:
            made = accept(made, *arguments, **options)
            text = verdict(made)
    made.save(config.out or config.plan)
    print(text)
    return made.plans if isinstance(made, Ladder) else (made,)


def _device(path: str, plan: Plan) -> Target:
    """What a plan is for."""
    try:
        return parse_target(plan.target)
    except ValueError as error:
        raise ValueError(f"{path}: target is {plan.target!r}: {error}") from None


def _measured(update: AbstractUpdate, plans: Sequence[Plan]) -> PeakOf | None:
    """Peaks on this device, those of some plans measured at once; None: it counts none.

    Each is run before anything else uses memory, the largest last: a device counts one peak for the
    whole process. Where there was no room for one, its peak is that error again.
    """

    @functools.cache
    def found(policies: tuple[Policy, ...]) -> DevicePeak | str | None:
        try:
            with naming_out_of_memory():
                return device_peak(update, policies)
        except OutOfMemoryError as error:
            return str(error)

    def peak(policies: tuple[Policy, ...]) -> DevicePeak | None:
        counted = found(policies)
        if isinstance(counted, str):
            raise OutOfMemoryError(counted)
        return counted

    ordered = sorted(plans, key=lambda each: each.memory.peak)
    return None if None in [found(each.policies) for each in ordered] else peak


def _tokens(batch: Batch) -> list[int]:
    """Optimized tokens of each microbatch."""
    return jnp.sum(batch.completion_mask, axis=(1, 2)).tolist()


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


def _mixed(policies: Sequence[Sequence[Policy]], _: Batch) -> str:
    return f"gradient of an update under {len(set(policies))} plans"


def block_view(update: AbstractUpdate, target: str) -> BlockView:
    """What leaving out a name changes in a block of the update, seconds by the roofline."""
    blocks = update.blocks()
    program = block_program(blocks.fn, *blocks.args, argnums=blocks.argnums)
    roofline = Roofline(parse_target(target))

    def entry(policy: Policy) -> Entry:
        figures = program.figures(policy)
        seconds = roofline.backward(program, policy, figures)
        return Entry(policy, figures.nbytes, seconds, *figures.work, 0.0)

    return BlockView(entry, functools.partial(distortion, traced=program.traced))


def profiler(update: AbstractUpdate, data: Measured, turns: int) -> Profiler:
    """Measures the first update under several policies, from the same weights, in turns."""
    model = nnx.merge(data.graphdef, data.params, data.frozen)

    def arguments(policies: tuple[Policy, ...]) -> tuple[TrainState, Batch]:
        lengths = tuple(n for _, n in runs(policies))
        state = init_state(restack(model, lengths), update.optimizer, jax.random.key(0))[1]
        return jax.tree.map(jnp.copy, state), data.updates[0]

    return functools.partial(profile_plan, update, arguments, repeats=turns)
