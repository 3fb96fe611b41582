"""`Plan`: the policies of an update, what was compiled to prove that they fit, and where from."""

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hilore_jax.actions import Policy
from hilore_jax.planning import expect
from hilore_jax.planning.allocate import allocate, total_risk
from hilore_jax.planning.fingerprint import differences
from hilore_jax.planning.measured import Measured
from hilore_jax.planning.memory import Memory
from hilore_jax.planning.memory_cache import write_whole
from hilore_jax.planning.menu import Entry
from hilore_jax.planning.menus import BlockRisks, block_menus


@dataclasses.dataclass(frozen=True)
class Blocks:
    """The repeated block of an update.

    Attributes:
        fn: the block as the update hands it to `hl.scan_blocks` or `hl.remat`.
        args: its arguments, arrays or `jax.ShapeDtypeStruct`s.
        count: how many there are, one policy each.
        argnums: arguments that the update differentiates; None: every floating-point one. Frozen
            weights belong into an argument of their own.

    Example:
        >>> import jax, jax.numpy as jnp, hilore_jax as hl
        >>> def block(w, x):
        ...     return x + jnp.tanh(jax.ad_checkpoint.checkpoint_name(x @ w, "mlp_gate"))
        >>> w, x = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((16, 16), (512, 16)))
        >>> hl.Blocks(block, (w, x), count=4).count
        4
    """

    fn: Callable
    args: tuple[Any, ...]
    count: int
    argnums: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        block = "block_fn(params, x, ...), as hl.scan_blocks takes it"
        expect.function("hl.Blocks(fn=...)", self.fn, block)
        if not isinstance(self.args, tuple):
            expect.refuse("hl.Blocks(args=...)", self.args, "a tuple, the block's arguments")
        expect.arrays("hl.Blocks(args=...)", self.args)
        expect.whole("hl.Blocks(count=...)", self.count)
        places, wanted = range(len(self.args)), self.argnums
        if wanted is not None and not (
            isinstance(wanted, tuple)
            and wanted
            and all(expect.is_whole(n) and n in places for n in wanted)
        ):
            raise ValueError(
                f"hl.Blocks(argnums={wanted!r}): expected a tuple of positions among the block's "
                f"{len(self.args)} arguments, such as (0,); None for every floating-point one."
            )


@dataclasses.dataclass(frozen=True)
class Trial:
    """One compilation on the way to a plan."""

    policies: str  # what was compiled
    predicted: int | None  # bytes, peak; None where nothing was there to predict from
    peak: int | None  # bytes, compiled; None where the compiler says: more than the device has
    fits: bool


@dataclasses.dataclass(frozen=True)
class Plan:
    """One policy a block, proved to fit by the target compiler's own buffer assignment.

    Attributes:
        policies: one a block.
        menu: the block's Pareto menu that they were chosen from.
        target: name of the device.
        risk_budget: R.
        budget: bytes, the peak allowed.
        baseline: compiled peak that a relative budget refers to, or None, bytes.
        gc: compiled memory with every block recomputed.
        memory: compiled memory of this plan.
        predicted: its peak as the trials before it predicted, bytes; GC's own where that is it.
        bound_seconds: no choice recomputes for less time in this budget (relaxation), seconds.
        cost: "modelled" (roofline) or "measured"; then the zero of all seconds is the fastest
            entry of the menu.
        fingerprint: what the plan holds for.
        trials: everything compiled.
        block_risks: `[blocks][entries]`, the risk of each menu entry in each block, from a
            calibration; None: `Entry.risk` holds for every block.
        exposure: what those risks are for.
        paper: risks add linearly, as in the paper.
        accepted: whether complete updates kept its budgets; None: not tried.
        acceptance: what was found then.
        measured: updates timed under the menu's entries, where `cost` is "measured".
        norm: Ghat, which divides calibrated risks; None: nothing does, or it was not kept.
        share: bytes of compiled peak for each byte that all blocks keep, as the search found it:
            a mesh divides them among its devices. None: not known.

    Example:
        >>> import jax, jax.numpy as jnp, hilore_jax as hl
        >>> def block(w, x):
        ...     return x + jnp.tanh(jax.ad_checkpoint.checkpoint_name(x @ w, "mlp_gate"))
        >>> def update(policies, w, x):
        ...     return w - jax.grad(lambda w: hl.scan_blocks(block, w, x, policies).sum())(w), {}
        >>> w, x = jnp.ones((4, 16, 16)), jnp.ones((512, 16))
        >>> blocks = hl.Blocks(block, (w[0], x), 4)
        >>> plan = hl.plan(update, (w, x), blocks=blocks, budget=hl.Budget("4x gc"), target="cpu")
        >>> len(plan.policies), plan.memory.peak <= plan.budget, plan.risk <= plan.risk_budget
        (4, True, True)
        >>> print(plan.explain().splitlines()[0])
        plan for cpu, 4 blocks
    """

    policies: tuple[Policy, ...]
    menu: tuple[Entry, ...]
    target: str
    risk_budget: float
    budget: int
    baseline: int | None
    gc: Memory
    memory: Memory
    predicted: int
    bound_seconds: float
    cost: str
    fingerprint: dict[str, str]
    trials: tuple[Trial, ...]
    block_risks: BlockRisks | None = None
    exposure: float | None = None
    paper: bool = False
    accepted: bool | None = None
    acceptance: dict[str, Any] | None = None
    measured: Measured | None = None
    norm: float | None = None
    share: float | None = None

    @functools.cached_property
    def menus(self) -> tuple[tuple[Entry, ...], ...]:
        """Each block's menu, with its own risks."""
        return block_menus(self.menu, self.block_risks, len(self.policies))

    @property
    def entries(self) -> tuple[Entry, ...]:
        """The menu entry of each block."""
        pairs = zip(self.menus, self.policies, strict=True)
        return tuple(next(e for e in menu if e.policy == policy) for menu, policy in pairs)

    @property
    def recompute_seconds(self) -> float:
        """Seconds a microbatch that backward spends on recomputation and codecs (`cost`)."""
        return sum(entry.seconds for entry in self.entries)

    @property
    def removed_flops(self) -> float:
        """Share of the matmul FLOPs that GC recomputes and this plan does not."""
        full = len(self.policies) * max(entry.flops for entry in self.menu)
        return 1 - sum(entry.flops for entry in self.entries) / full if full else 0.0

    @property
    def risk(self) -> float:
        """Predicted relative error of the whole gradient: root of the summed squares."""
        return total_risk((entry.risk for entry in self.entries), paper=self.paper)

    def __str__(self) -> str:
        return self.explain()

    def explain(self) -> str:
        """A table: block ranges x names, and where the memory goes."""
        from hilore_jax.planning.table import plan_table

        return plan_table(self)

    def pareto(self, points: int = 40) -> list[dict[str, float]]:
        """The best choice at each of a range of budgets, as the allocation predicts it.

        Returns:
            Rows of `peak` (bytes a device, on the line through GC's compiled peak and this plan's,
            and beyond that with the slope `share`), `seconds` (recomputation), `removed_flops`
            (share) and `risk`, from GC to the fastest choice within the risk budget; each row
            faster than the one before.
        """
        count = len(self.policies)
        most = count * max(entry.nbytes for entry in self.menu)
        full = count * max(entry.flops for entry in self.menu)
        rows: list[dict[str, float]] = []
        for i in range(points + 1):
            spare = most * i // points
            found = allocate(self.menus, spare, self.risk_budget, paper=self.paper)
            chosen = [menu[c] for menu, c in zip(self.menus, found.choices, strict=True)]
            row = {
                "peak": self.expected_peak(found.nbytes),
                "seconds": found.seconds,
                "removed_flops": 1 - sum(e.flops for e in chosen) / full if full else 0.0,
                "risk": found.risk,
            }
            if not rows or row["seconds"] < rows[-1]["seconds"]:
                rows.append(row)
        return rows

    def expected_peak(self, nbytes: int) -> float:
        """The peak where all blocks keep so many bytes, by the two compiled peaks and `share`."""
        kept = sum(entry.nbytes for entry in self.entries)
        slope = (self.memory.peak - self.gc.peak) / kept if kept else 1.0
        if nbytes <= kept:
            return self.gc.peak + slope * nbytes
        share = min(max(slope, 0.0), 1.0) if self.share is None else self.share
        return self.memory.peak + share * (nbytes - kept)

    def plot(self, path: str | Path | None = None) -> Any:
        """Draws `pareto()`, the budget and this plan; writes the picture where a path is given."""
        from hilore_jax.planning.picture import plot_pareto

        return plot_pareto(self, path)

    def check(self, found: Mapping[str, str]) -> None:
        """Refuses another situation than the planned one.

        Args:
            found: a `fingerprint` of the present situation, whole or in part.

        Raises:
            ValueError: names each difference.
        """
        if differ := differences(self.fingerprint, found):
            raise ValueError(
                "the plan was made for another situation: " + "; ".join(differ) + ". Plan again."
            )

    def save(self, path: str | Path) -> None:
        """Writes the plan as JSON; a reader never sees half of it."""
        from hilore_jax.planning.plan_file import plan_fields

        write_whole(Path(path), json.dumps(plan_fields(self), indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path, found: Mapping[str, str] | None = None) -> "Plan":
        """Reads a plan.

        Args:
            path: a file that `save` wrote.
            found: a `fingerprint` that must agree; jax's version is always compared.

        Raises:
            OSError: the file cannot be read.
            ValueError: not a plan, of a newer schema, damaged (names the field, what was found and
                what was expected), or made for another situation.
        """
        from hilore_jax.planning.plan_file import load_plan

        return load_plan(path, found)


def runs(policies: Sequence[Policy]) -> list[tuple[Policy, int]]:
    """Equal consecutive policies and how many there are.

    Example:
        >>> [n for _, n in runs([Policy({}), Policy({}), Policy({"q": Policy({}).default})])]
        [2, 1]
    """
    found: list[tuple[Policy, int]] = []
    for policy in policies:
        if found and found[-1][0] == policy:
            found[-1] = (policy, found[-1][1] + 1)
        else:
            found.append((policy, 1))
    return found
