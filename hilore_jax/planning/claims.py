"""Whether compiled programs run as many matmuls fewer as plans claim."""

from collections.abc import Mapping, Sequence

from hilore_jax.actions import Policy
from hilore_jax.planning.executed import Executed
from hilore_jax.planning.plan import Plan, runs
from hilore_jax.work import Work


def check_claims(
    plans: Mapping[str, Plan | Sequence[Policy]],
    executed: Mapping[str, Executed],
    microbatches: int = 1,
) -> None:
    """Refuses plans whose programs do not recompute what their entries say.

    Two plans of one update differ in the matmuls they run, and in their FLOPs, exactly as in those
    they recompute (HiLoRe's graph-attributed equations, methods 1.4: what is claimed to be removed
    is gone, and no more). All are compared with the first; policies without a plan claim what the
    menu of a plan beside them says.

    Args:
        plans: by name; `Plan`s, or policies.
        executed: what each one's program runs.
        microbatches: of an update, each of which spares what a plan claims.

    Raises:
        ValueError: names the plan, and the matmuls or FLOPs claimed and found.
    """
    known: dict[Policy, Work] = {}
    for plan in plans.values():
        if isinstance(plan, Plan):
            known |= {entry.policy: Work(entry.matmuls, entry.flops) for entry in plan.menu}
    claims: dict[str, Work] = {}
    policies: dict[str, Sequence[Policy]] = {}
    for name, plan in plans.items():
        own = {}
        if isinstance(plan, Plan):  # its own menu first: plans may disagree
            own = {entry.policy: Work(entry.matmuls, entry.flops) for entry in plan.menu}
        policies[name] = plan.policies if isinstance(plan, Plan) else tuple(plan)
        each = [Work(0, 0) if p.keeps_everything else (known | own).get(p) for p in policies[name]]
        if None not in each:
            claims[name] = sum(filter(None, each), Work(0, 0)) * microbatches
    first = next(iter(claims), "")
    for name in list(claims)[1:]:
        fault = claim_fault(
            claims[first] - claims[name],
            executed[first],
            executed[name],
            alone=(starts_alone(policies[first]), starts_alone(policies[name])),
        )
        if fault:
            raise ValueError(
                f"plan {name!r} claims to recompute {fault[0]} fewer than {first!r}, but its "
                f"compiled program runs {fault[1]}. "
                "Was the plan made for this block, and does the update use its policies?"
            )


def claim_fault(
    claimed: Work, reference: Executed, found: Executed, alone: tuple[bool, bool] = (False, False)
) -> tuple[str, str] | None:
    """What is claimed to be spared and what is, in words, where the two differ.

    FLOPs are compared where both programs show them, as compilers join matmuls; else matmuls.

    Args:
        claimed: what the other program should run less than the reference.
        reference: what the reference runs.
        found: what the other runs.
        alone: of both, whether the first block is scanned by itself. XLA inlines it, and drops the
            gradient of its input, which nobody reads: it may run fewer than it claims.

    Example:
        >>> claim_fault(Work(1, 60), Executed(3, 180), Executed(2, 120))
        >>> claim_fault(Work(1, 60), Executed(3, 180), Executed(2, 150))
        ('60 FLOPs of matmuls', '30 fewer (150 against 180)')
    """
    if reference.flops is not None and found.flops is not None:
        wanted, base, other, what = claimed.flops, reference.flops, found.flops, " FLOPs of matmuls"
    else:
        wanted, base, other, what = claimed.matmuls, reference.matmuls, found.matmuls, " matmuls"
    spared = base - other
    excused = (alone[1] and spared > wanted) or (alone[0] and spared < wanted)
    if spared == wanted or excused:
        return None
    return f"{wanted}{what}", f"{spared} fewer ({other} against {base})"


def starts_alone(policies: Sequence[Policy]) -> bool:
    """Whether the first block is a run by itself.

    Example:
        >>> starts_alone([Policy({})]), starts_alone([Policy({})] * 2)
        (True, False)
    """
    return runs(policies)[0][1] == 1
