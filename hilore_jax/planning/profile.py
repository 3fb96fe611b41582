"""Complete updates under several plans, measured in turns, and the matmuls that they really run."""

import dataclasses
import functools
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from hilore_jax.actions import Policy
from hilore_jax.compiler import compiler_options
from hilore_jax.planning import expect
from hilore_jax.planning.claims import PLAIN, check_claims
from hilore_jax.planning.executed import executed_matmuls
from hilore_jax.planning.plan import Plan
from hilore_jax.planning.request import check_args, check_arguments
from hilore_jax.planning.timing import Ratio, interleaved, quartiles, ratio


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

    @property
    def median(self) -> float:
        """Median of the turns, seconds."""
        return statistics.median(self.seconds)

    @property
    def spread(self) -> tuple[float, float]:
        """Quartiles of the turns, seconds."""
        return quartiles(self.seconds)


def profile_plan(
    update: Callable[..., Any],
    args: tuple[Any, ...] | Callable[[tuple[Policy, ...]], tuple[Any, ...]],
    plans: Mapping[str, Plan | Sequence[Policy]],
    *,
    donate: tuple[int, ...] = (0,),
    repeats: int = 5,
    microbatches: int = 1,
) -> dict[str, Profile]:
    """Measures complete updates under two or more plans on the device that is here.

    Every turn starts from the same parameters, optimizer state and keys: the arrays are copied, and
    waited for, before the clock starts, so that the update may take the copies' buffers. Turns are
    interleaved, so that a slow phase of the machine meets all plans (HiLoRe's measured utility,
    methods 1.4).

    Args:
        update: `(policies, *args) -> (state, metrics)`.
        args: the update's arrays; or makes them in the layout of the given policies, the same
            values every time.
        plans: two or more, by name; `Plan`s, or policies. The first is the reference. Policies are
            held to what the menu of a `Plan` beside them says; to nothing where there is none. With
            a `Plan`, the update is also compiled (not run) without rematerialization.
        donate: positions in `args` whose buffers the update may reuse.
        repeats: timed turns.
        microbatches: that one update runs; a plan claims matmuls of each.

    Raises:
        TypeError: an argument of a wrong kind.
        ValueError: fewer than two plans, or plans of different numbers of blocks; less than one
            repeat or microbatch; arguments that are shapes without values; or a plan whose
            compiled program still runs matmuls that it claims to have removed, or none of those
            that it claims to recompute.
    """
    policies = _checked(plans)
    expect.function("profile_plan(update=...)", update, "(policies, *args) -> (state, metrics)")
    check_args("profile_plan", args)
    expect.whole("profile_plan(repeats=...)", repeats)
    expect.whole("profile_plan(microbatches=...)", microbatches)
    arguments = args if callable(args) else lambda policies: args

    def compiled(each: tuple[Policy, ...]) -> Any:
        given = arguments(each)
        check_arguments("profile_plan", update, each, given, donate)
        expect.values(given, "args", "profile_plan runs the update", "Pass arrays.")
        bound = functools.partial(update, each)
        jitted = jax.jit(bound, donate_argnums=donate, compiler_options=compiler_options())
        return jitted.lower(*given).compile()

    plain = (PLAIN,) * len(next(iter(policies.values())))
    held = any(isinstance(plan, Plan) for plan in plans.values())
    different = {*policies.values(), plain} if held else {*policies.values()}
    programs = {each: compiled(each) for each in different}
    executed = {each: executed_matmuls(program.as_text()) for each, program in programs.items()}
    if held:
        found = {name: executed[each] for name, each in policies.items()}
        check_claims(plans, found, executed[plain], microbatches)
    seconds = interleaved(
        {name: functools.partial(_run, programs[each]) for name, each in policies.items()},
        repeats,
        prepare={
            name: lambda each=each: copies(arguments(each)) for name, each in policies.items()
        },
    )
    first = next(iter(plans))
    return {
        name: Profile(
            tuple(seconds[name]),
            ratio(seconds[name], seconds[first]),
            executed[each].matmuls,
            programs[each].memory_analysis().temp_size_in_bytes,
        )
        for name, each in policies.items()
    }


def _checked(plans: Any) -> dict[str, tuple[Policy, ...]]:
    """The policies of each plan, of one number of blocks."""
    where = "profile_plan(plans=...)"
    if not isinstance(plans, Mapping):
        expect.refuse(where, plans, "two or more hl.Plans, or policies, by name")
    if len(plans) < 2:
        raise ValueError(f"profile_plan compares plans: found {list(plans)}, expected two or more.")
    found: dict[str, tuple[Policy, ...]] = {}
    for name, plan in plans.items():
        given = plan.policies if isinstance(plan, Plan) else plan
        one = where.replace("=", f"[{name!r}]=")
        if isinstance(given, Policy):
            expect.refuse(one, given, "one policy a block: (policy,) * n_blocks")
        expect.all_of(one, given, lambda each: isinstance(each, Policy), "an hl.Policy")
        found[name] = tuple(given)
    counts = {name: len(each) for name, each in found.items()}
    if len(set(counts.values())) > 1 or not all(counts.values()):
        raise ValueError(f"profile_plan compares plans of one number of blocks, found {counts}.")
    return found


def _run(program: Any, args: tuple[Any, ...]) -> Any:
    return program(*args)


def copies(args: tuple[Any, ...], places: Any = None) -> tuple[Any, ...]:
    """Arrays of their own, which a program may then take for its outputs.

    Args:
        args: pytrees of arrays.
        places: where each goes, the same pytrees of shardings; None: where it is.
    """
    if places is not None:
        return jax.device_put(args, places, may_alias=False)
    return jax.tree.map(
        lambda leaf: jax.device_put(leaf, getattr(leaf, "sharding", None), may_alias=False), args
    )
