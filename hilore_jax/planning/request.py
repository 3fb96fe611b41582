"""What the planner's functions are asked for, checked before anything is traced or compiled."""

import contextlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from hilore_jax.actions import Compress, Policy
from hilore_jax.arguments import function_name
from hilore_jax.modules import own_policy
from hilore_jax.planning import expect
from hilore_jax.planning.budget import Budget
from hilore_jax.planning.calibration import Calibration
from hilore_jax.planning.fingerprint import describe
from hilore_jax.planning.plan import Blocks
from hilore_jax.planning.risks import default_risk
from hilore_jax.planning.target import Target

PLAN_OPTIONS = ("codecs", "cost", "donate", "offload", "progress", "risks")
"""What `hilore_jax.plan_ladder` hands on to `hilore_jax.plan` as it is."""

_SIGNATURE = "update(policies, *args) -> (state, metrics)"


def check_request(
    caller: str,
    *,
    update: Any,
    args: Any,
    blocks: Any,
    budget: Any,
    target: Any,
    codecs: Any = None,
    risks: Any = default_risk,
    offload: Any = False,
    calibration: Any = None,
    exposure: Any = None,
    progress: Any = None,
) -> None:
    """Refuses arguments of wrong kinds, as `hilore_jax.plan` describes them.

    Args:
        caller: the function that was given them, for the errors.
        update: a function.
        args: a tuple, or a function that makes one; what it makes is for `check_arguments`.
        blocks: `Blocks`.
        budget: `Budget`.
        target: a name, a path or a `Target`.
        codecs: a sequence of `Compress`, or None.
        risks: a function.
        offload: a bool.
        calibration: a `Calibration`, or None.
        exposure: a number, or None.
        progress: a bool, or None.

    Raises:
        TypeError, ValueError: names the argument, what was found and what was expected.
    """
    expect.function(f"{caller}(update=...)", update, _SIGNATURE)
    check_args(caller, args)
    check_blocks(caller, blocks)
    if not isinstance(budget, Budget):
        expect.refuse(
            f"{caller}(budget=...)", budget, 'an hl.Budget, such as hl.Budget("1.10x gc")'
        )
    if not isinstance(target, str | Path | Target):
        expect.refuse(f"{caller}(target=...)", target, 'a name such as "cuda:h200", or a Target')
    if codecs is not None:
        check_codecs(caller, codecs)
    expect.function(f"{caller}(risks=...)", risks, "of a name and an hl.Compress to its risk")
    if not isinstance(offload, bool):
        expect.refuse(f"{caller}(offload=...)", offload, "True or False")
    check_progress(caller, progress)
    check_calibration(caller, calibration)
    if exposure is not None:
        if not expect.is_number(exposure):
            expect.refuse(f"{caller}(exposure=...)", exposure, "a number >= 0")
        if calibration is None:
            raise ValueError(
                f"{caller}(exposure={exposure!r}) needs calibration=...: risks without one do not "
                "depend on exposure."
            )


def check_args(caller: str, args: Any) -> None:
    """Refuses what is neither a tuple nor a function that makes one."""
    if not isinstance(args, tuple) and not callable(args):
        where, remedy = f"{caller}(args=...)", "the tuple of what follows the policies, such as"
        expect.refuse(where, args, f"{remedy} (state, batch), or a function of the policies to it")


def check_blocks(caller: str, blocks: Any) -> None:
    """Refuses what is no `Blocks`, or of a block that has a policy of its own."""
    if not isinstance(blocks, Blocks):
        hint = "an hl.Blocks(block_fn, block_args, count)"
        expect.refuse(f"{caller}(blocks=...)", blocks, hint)
    own = own_policy(blocks.fn)
    if own is not None and not own.keeps_everything:
        raise ValueError(
            f"{caller}(blocks=...): {function_name(blocks.fn)} is decorated with hl.remat({own}), "
            "so that its policy is chosen already. Give hl.Blocks the undecorated block."
        )


def check_arguments(caller: str, update: Any, policies: Any, args: Any, donate: Any) -> None:
    """Refuses arguments that an update cannot be traced with.

    Args:
        caller: for the errors.
        update: `(policies, *args) -> (state, metrics)`.
        policies: one a block.
        args: the update's, for these policies.
        donate: positions among them.

    Raises:
        TypeError: they are no tuple, hold something else than arrays, or are not as many as the
            update takes.
        ValueError: a position that there is not.
    """
    if not isinstance(args, tuple):
        where = f"what {caller}(args) makes, ..."
        expect.refuse(where, args, "the tuple of what follows the policies")
    expect.arrays(f"{caller}(args=...)", args)
    expect.positions(f"{caller}(donate=...)", donate, len(args))
    try:
        bound = inspect.signature(update)
    except (TypeError, ValueError):  # of a C function
        return
    try:
        bound.bind(policies, *args)
    except TypeError as error:
        raise TypeError(
            f"{caller}(update=...): {function_name(update)}{bound} cannot be called with the "
            f"policies and {len(args)} arguments ({error}); expected {_SIGNATURE}."
        ) from None


@contextlib.contextmanager
def traceable(update: Any) -> Iterator[None]:
    """Adds to an error of tracing an update what the planner does with it."""
    try:
        yield
    except (jax.errors.JAXTypeError, jax.errors.JAXIndexError, TypeError) as error:
        error.add_note(
            f"hl.plan traces {function_name(update)} as jax.jit does, for {_SIGNATURE}: its "
            "policies are static, all of its other arguments are traced, and it returns arrays. "
            "Close over what steers Python code: functools.partial(update, name=...)."
        )
        raise


def check_codecs(caller: str, codecs: Any) -> None:
    """Refuses what is no sequence of `Compress`."""
    expect.all_of(
        f"{caller}(codecs=...)",
        codecs,
        lambda codec: isinstance(codec, Compress),
        'an hl.Compress, such as hl.Compress("int8")',
    )


def check_calibration(caller: str, calibration: Any) -> None:
    """Refuses what is neither a `Calibration` nor None."""
    if calibration is not None and not isinstance(calibration, Calibration):
        where = f"{caller}(calibration=...)"
        expect.refuse(where, calibration, "an hl.Calibration; read one with hl.Calibration.load")


def check_progress(caller: str, progress: Any) -> None:
    """Refuses what is neither a bool nor None."""
    if progress is not None and not isinstance(progress, bool):
        expect.refuse(f"{caller}(progress=...)", progress, "True, False or None")


def check_ladder(
    exposures: Any, share: Any, most: Any, plan_at: Any, options: Mapping[str, Any]
) -> None:
    """Refuses what `hilore_jax.plan_ladder` takes beside the arguments of `hilore_jax.plan`.

    Args:
        exposures: a sequence of numbers, or None; which numbers is for `buckets`.
        share: a number in (0, 1].
        most: a whole number, 1 or more.
        plan_at: a function, or None.
        options: others that were given.

    Raises:
        TypeError, ValueError: names the argument, what was found and what was expected.
    """
    caller = "hl.plan_ladder"
    if exposures is not None:
        expect.all_of(f"{caller}(exposures=...)", exposures, expect.is_number, "a number >= 0")
    if not expect.is_number(share):
        expect.refuse(f"{caller}(share=...)", share, "tokens / update tokens in (0, 1]")
    expect.whole(f"{caller}(most=...)", most)
    if plan_at is not None:
        expect.function(f"{caller}(plan_at=...)", plan_at, "of an exposure to a Plan")
    if unknown := [name for name in options if name not in PLAN_OPTIONS]:
        hint = " It plans at each of exposures=." if "exposure" in unknown else ""
        raise TypeError(
            f"{caller} has no argument {', '.join(unknown)}: beside its own it takes those of "
            f"hl.plan, {', '.join(PLAN_OPTIONS)}.{hint}"
        )


def check_calibrate(
    loss: Any,
    params: Any,
    microbatches: Any,
    *,
    blocks: Any,
    policies: Any,
    args: Any,
    numbers: Mapping[str, Any],
    resume: Any,
    progress: Any,
) -> None:
    """Refuses arguments of wrong kinds, as `hilore_jax.calibrate` describes them.

    Args:
        loss: a function.
        params: arrays.
        microbatches: a sequence of trees of arrays.
        blocks: `Blocks`.
        policies: a sequence of `Policy`.
        args: a tuple of arrays.
        numbers: whole numbers by name; None where one was left out.
        resume: a path, or None.
        progress: a bool, or None.

    Raises:
        TypeError, ValueError: names the argument, what was found and what was expected.
    """
    caller = "hl.calibrate"
    signature = "loss(policies, params, microbatch, *args) -> (loss, exposure)"
    expect.function(f"{caller}(loss=...)", loss, signature)
    check_blocks(caller, blocks)
    if isinstance(policies, Policy):
        where = f"{caller}(policies=...)"
        expect.refuse(where, policies, "a sequence of them: [policy]")
    expect.all_of(
        f"{caller}(policies=...)",
        policies,
        lambda policy: isinstance(policy, Policy),
        "an hl.Policy; hl.parse_policy reads its text",
    )
    if isinstance(microbatches, Mapping):
        where = f"{caller}(microbatches=...)"
        expect.refuse(where, microbatches, "a sequence of microbatches; one alone: [microbatch]")
    expect.all_of(f"{caller}(microbatches=...)", microbatches, lambda each: True, "a microbatch")
    if not isinstance(args, tuple):
        expect.refuse(f"{caller}(args=...)", args, "a tuple of what follows the microbatch")
    for name, value in numbers.items():
        if value is not None:
            expect.whole(f"{caller}({name}=...)", value, least=0 if name == "seed" else 1)
    if resume is not None and not isinstance(resume, str | Path):
        expect.refuse(f"{caller}(resume=...)", resume, "the path of a file, or None")
    check_progress(caller, progress)
    given = {"params": params, "microbatches": list(microbatches), "args": args}
    for name, tree in given.items():
        expect.arrays(f"{caller}({name}=...)", tree, "arrays")
        expect.values(tree, name, f"{caller} runs the loss", "Pass arrays.")
    _alike(given["microbatches"])


def _alike(microbatches: Sequence[Any]) -> None:
    """Refuses microbatches of unequal shapes, which one executable does not take."""
    kinds = [(jax.tree.structure(each), describe(each)) for each in microbatches]
    for i, kind in enumerate(kinds):
        if kind != kinds[0]:
            raise ValueError(
                f"hl.calibrate(microbatches=...): number {i} is {kind[1]} in {kind[0]}, number 0 "
                f"is {kinds[0][1]} in {kinds[0][0]}; expected equal shapes. Pad them to one length."
            )
