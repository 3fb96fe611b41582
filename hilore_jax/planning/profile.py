"""Complete updates under several plans, measured in turns, and the matmuls that they really run."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from hilore_jax.actions import Policy
from hilore_jax.compiler import compiler_options
from hilore_jax.planning.executed import executed_matmuls
from hilore_jax.planning.plan import Plan, runs
from hilore_jax.planning.timing import Ratio, interleaved, ratio


@dataclasses.dataclass(frozen=True)
class Profile:
    """What one plan's updates took.

    Attributes:
        seconds: of each turn, measured.
        to_first: paired ratios of its times to those of the first plan.
        matmuls: that the compiled program runs.
        temporaries: bytes, compiled.
    """

    seconds: tuple[float, ...]
    to_first: Ratio
    matmuls: int
    temporaries: int


def profile_plan(
    update: Callable[..., Any],
    args: Callable[[tuple[Policy, ...]], tuple[Any, ...]],
    plans: Mapping[str, Plan | Sequence[Policy]],
    *,
    donate: tuple[int, ...] = (0,),
    repeats: int = 5,
    microbatches: int = 1,
) -> dict[str, Profile]:
    """Measures complete updates under two or more plans on the device that is here.

    Every turn starts from the same parameters, optimizer state and keys: `args` are made anew, and
    waited for, before the clock starts. Turns are interleaved, so that a slow phase of the machine
    meets all plans (HiLoRe's measured utility, methods 1.4).

    Args:
        update: `(policies, *args) -> (state, metrics)`.
        args: makes the update's arrays in the layout of the given policies; the same every time.
        plans: two or more, by name; `Plan`s, or policies. The first is the reference.
        donate: positions in `args` whose buffers the update may reuse.
        repeats: timed turns.
        microbatches: that one update runs; a plan claims matmuls of each.

    Raises:
        ValueError: fewer than two plans; or a `Plan` whose compiled program runs more or fewer
            matmuls than it claims, measured against the first plan.
    """
    if len(plans) < 2:
        raise ValueError(f"profile_plan compares plans: found {list(plans)}, expected two or more.")
    policies = {
        name: plan.policies if isinstance(plan, Plan) else tuple(plan)
        for name, plan in plans.items()
    }
    compiled = {}
    for name, each in policies.items():
        jitted = jax.jit(
            functools.partial(update, each),
            donate_argnums=donate,
            compiler_options=compiler_options(),
        )
        compiled[name] = jitted.lower(*args(each)).compile()
    matmuls = {name: executed_matmuls(program.as_text()) for name, program in compiled.items()}
    check_claims(plans, matmuls, microbatches)
    seconds = interleaved(
        {name: functools.partial(_run, program) for name, program in compiled.items()},
        repeats,
        prepare={name: functools.partial(args, policies[name]) for name in compiled},
    )
    first = next(iter(plans))
    return {
        name: Profile(
            tuple(seconds[name]),
            ratio(seconds[name], seconds[first]),
            matmuls[name],
            program.memory_analysis().temp_size_in_bytes,
        )
        for name, program in compiled.items()
    }


def check_claims(
    plans: Mapping[str, Plan | Sequence[Policy]], matmuls: Mapping[str, int], microbatches: int = 1
) -> None:
    """Refuses plans whose programs do not recompute what their entries say.

    Two plans of one update differ in the matmuls they run exactly as in those they recompute. But
    for one thing: a first block that is scanned alone is inlined by XLA, which then drops the
    gradient of its input, as nobody reads it. Such a plan may run fewer than it claims.

    Raises:
        ValueError: names the plan, and the matmuls claimed and found.
    """
    checked = {name: plan for name, plan in plans.items() if isinstance(plan, Plan)}
    claimed = {
        name: microbatches * sum(entry.matmuls for entry in plan.entries)
        for name, plan in checked.items()
    }
    alone = {name: runs(plan.policies)[0][1] == 1 for name, plan in checked.items()}
    first = next(iter(checked), "")
    for name in list(checked)[1:]:
        wanted = claimed[first] - claimed[name]
        found = matmuls[first] - matmuls[name]
        excused = (alone[name] and found > wanted) or (alone[first] and found < wanted)
        if wanted != found and not excused:
            raise ValueError(
                f"plan {name!r} claims to recompute {wanted} matmuls fewer than {first!r}, but its "
                f"compiled program runs {found} fewer ({matmuls[name]} against {matmuls[first]}). "
                "Was the plan made for this block, and does the update use its policies?"
            )


def _run(program: Any, args: tuple[Any, ...]) -> Any:
    return program(*args)
