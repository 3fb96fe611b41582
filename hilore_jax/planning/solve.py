"""`plan`: choose, compile, correct, choose again; only what the compiler says fits is returned."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from hilore_jax.actions import Compress, Policy
from hilore_jax.planning.allocate import Allocation, allocate
from hilore_jax.planning.bar import Bar
from hilore_jax.planning.budget import Budget
from hilore_jax.planning.calibrated import calibrated_menu
from hilore_jax.planning.calibration import Calibration, check_exposure, model_fingerprint
from hilore_jax.planning.fingerprint import fingerprint
from hilore_jax.planning.memory import Memory, compiled_memory
from hilore_jax.planning.menu import Entry, block_menu
from hilore_jax.planning.menus import block_menus
from hilore_jax.planning.plan import Blocks, Plan, Trial, runs
from hilore_jax.planning.risks import default_risk, recommended_codecs
from hilore_jax.planning.target import Target, parse_target

_COMPILATIONS = 8  # with GC's and the baseline's
_CLOSE = 0.005  # of the budget: less left over than this is not worth another compilation

Update = Callable[[tuple[Policy, ...], Any, Any], Any]


def plan(
    update: Update,
    args: tuple[Any, ...] | Callable[[tuple[Policy, ...]], tuple[Any, ...]],
    *,
    blocks: Blocks,
    budget: Budget,
    target: str | Target = "device",
    donate: tuple[int, ...] = (0,),
    codecs: Sequence[Compress] | None = None,
    risks: Callable[[str, Compress], float] = default_risk,
    offload: bool = False,
    calibration: Calibration | None = None,
    exposure: float | None = None,
    progress: bool | None = None,
) -> Plan:
    """The policies, one a block, that recompute least within two budgets on a target device.

        minimize sum_b seconds[p_b]   s.t.   peak(p) <= M,   sum_b risk[p_b]^2 <= R^2

    Each p_b is an entry of the block's Pareto menu (HiLoRe's utility, memory and risk; methods 1.6
    with squared risks). The peak is not modelled: it is `arguments + outputs - aliased +
    temporaries` of the complete update in the target compiler's buffer assignment. What the
    compiler adds to the sum of kept bytes is measured at each trial and corrected for.

    Args:
        update: `(policies, *args) -> (state, metrics)`, pure; policies are static.
        args: arrays or `jax.ShapeDtypeStruct`s, with or without shardings. Or a function from the
            policies to them, where the state's layout follows the policies (stacks per segment).
        blocks: the repeated block.
        budget: memory and risk.
        target: `"cpu"`, `"device"` (the one attached), `"cuda:h200"`, `"cuda:h100-80x8"`,
            `"tpu:v5e"`, ..., or the path of a target file.
        donate: positions in `args` whose buffers the update may reuse.
        codecs: what a name may be compressed with; default: those of the risk table.
        risks: relative gradient error of compressing one name in one block.
        offload: also consider keeping names in pinned host memory.
        calibration: measured risks, block by block, in place of `risks`; what it did not measure
            is not used. The risk budget is then one microbatch's: its share of the update's.
        exposure: of the microbatches to plan for; default: the calibration's median.
        progress: show a bar over compilations; default: on a terminal.

    Returns:
        A plan whose compiled peak fits.

    Raises:
        ValueError: the budget is below what recomputing everything needs (says how much that is),
            a target or name is unknown, the peak does not depend on the policies, or the
            calibration is of another model's shape.

    Example:
        >>> import jax, jax.numpy as jnp, hilore_jax as hl
        >>> from jax.ad_checkpoint import checkpoint_name
        >>> def block(w, x):
        ...     return x + jnp.tanh(checkpoint_name(x @ w, "mlp_gate"))
        >>> def update(policies, w, x):
        ...     loss = lambda w: jnp.sum(hl.scan_blocks(block, w, x, policies))
        ...     return jax.tree.map(lambda a, g: a - g, w, jax.grad(loss)(w)), {}
        >>> w, x = jnp.ones((4, 16, 16)), jnp.ones((512, 16))
        >>> made = plan(
        ...     update,
        ...     (w, x),
        ...     blocks=Blocks(block, (w[0], x), 4),
        ...     budget=Budget("4x gc"),
        ...     target="cpu",
        ... )
        >>> made.memory.peak <= made.budget, made.removed_flops
        (True, 1.0)
    """
    device = parse_target(target)
    arguments = args if callable(args) else lambda policies: args
    all_recomputed = (Policy({}),) * blocks.count
    if calibration is not None:  # before anything long
        calibration.check(model_fingerprint(blocks))
        exposure = calibration.exposure if exposure is None else check_exposure(exposure)
    menu = block_menu(
        blocks.fn,
        *blocks.args,
        codecs=recommended_codecs() if codecs is None else codecs,
        risks=risks,
        target=device,
        argnums=blocks.argnums,
        offload=offload,
    )
    block_risks, paper = None, False
    if calibration is not None:
        menu, block_risks = calibrated_menu(menu, blocks, device, calibration, exposure, codecs)
        paper = calibration.form == "paper"
    menus = block_menus(menu, block_risks, blocks.count)
    choose = functools.partial(allocate, menus, risk=budget.risk, paper=paper)
    with Bar(progress, _COMPILATIONS) as bar:

        def compiled(policies: tuple[Policy, ...], fn: Update = update) -> Memory:
            bar.step(describe(policies))
            bound = functools.partial(fn, policies)
            return compiled_memory(bound, *arguments(policies), target=device, donate=donate)

        gc = compiled(all_recomputed)
        baseline = None
        if budget.times_gc is None:
            limit = budget.nbytes
        else:
            other = budget.baseline
            baseline = gc.peak if other is None else compiled(all_recomputed, other).peak
            limit = int(budget.times_gc * baseline)
        search = _Search(menu, blocks.count, limit, choose, gc, compiled)
        spent = 1 if budget.baseline is None else 2
        policies, memory, predicted = search.run(_COMPILATIONS - spent)
    found = choose(memory=max(0, limit - gc.peak - search.offset(policies)))
    return Plan(
        policies=policies,
        menu=menu,
        target=device.name,
        risk_budget=budget.risk,
        budget=limit,
        baseline=baseline,
        gc=gc,
        memory=memory,
        predicted=predicted,
        bound_seconds=found.bound_seconds,
        cost="modelled",
        fingerprint=fingerprint(
            blocks.fn,
            blocks.args,
            arguments(all_recomputed),
            blocks=blocks.count,
            target=device.name,
        ),
        trials=tuple(search.trials),
        block_risks=block_risks,
        exposure=None if calibration is None else exposure,
        paper=paper,
    )


def describe(policies: Sequence[Policy]) -> str:
    """Policies in short: how many blocks take which.

    Example:
        >>> describe([Policy({})] * 3)
        '3 x gc'
    """
    return "; ".join(f"{n} x {policy}" for policy, n in runs(policies))


class _Search:
    """Compilations of candidate plans, and what they taught about peaks."""

    def __init__(
        self,
        menu: tuple[Entry, ...],
        count: int,
        limit: int,
        choose: Callable[..., Allocation],
        gc: Memory,
        compiled: Callable[[tuple[Policy, ...]], Memory],
    ):
        self.count, self.limit, self.choose = count, limit, choose
        self.gc, self.compiled = gc, compiled
        self.done: dict[tuple[Policy, ...], Memory] = {(Policy({}),) * count: gc}
        self.entry = {entry.policy: entry for entry in menu}
        self.trials = [Trial(describe((Policy({}),) * count), None, gc.peak, gc.peak <= limit)]

    def kept(self, policies: tuple[Policy, ...]) -> int:
        """Bytes that all blocks keep, as counted from the block."""
        return sum(self.entry[policy].nbytes for policy in policies)

    def offset(self, policies: tuple[Policy, ...]) -> int:
        """What the compiler adds to GC's peak and the kept bytes, from the nearest trial.

        Transients follow which entries are used (decoding buffers, the widest block), so that a
        trial with the same set of entries says most, and any later trial more than an early one.
        """
        known = [trial for trial in self.done if self.kept(trial)]
        if not known:
            return 0
        wanted = set(policies)
        nearest = max(known, key=lambda t: len(wanted & set(t)) - len(set(t) - wanted))
        return self.done[nearest].peak - self.gc.peak - self.kept(nearest)

    def run(self, compilations: int) -> tuple[tuple[Policy, ...], Memory, int]:
        """The fastest candidate that fits, its memory and what was predicted for it.

        Searches the bytes that kept activations may take: at `low` the choice fits, at `high` it
        does not. Between them it goes where the last trial's peak points, or to the middle.
        """
        self._check_feasible()
        best = (Policy({}),) * self.count
        predicted = {best: self.gc.peak}
        low, high = 0, None
        spare = self.limit - self.gc.peak
        seen: set[int] = set()
        while compilations and spare not in seen:
            seen.add(spare)
            policies = self.choose(memory=max(0, spare)).policies
            if policies not in self.done:
                expected = self.gc.peak + self.kept(policies) + self.offset(policies)
                if (
                    high is None
                    and expected > self.limit
                    and low < (less := spare - expected + self.limit)
                ):
                    spare = less  # these entries are known to need more than they keep
                    continue
                compilations -= 1
                predicted[policies] = expected
                self._try(policies, expected)
            left = self.limit - self.done[policies].peak
            pointed = self.kept(policies) + left
            if left >= 0:
                low = max(low, spare)
                if self._seconds(policies) < self._seconds(best):
                    best = policies
                if high is None and left <= _CLOSE * self.limit:
                    break
            else:
                high = spare if high is None else min(high, spare)
            if high is not None:
                if high - low <= _CLOSE * self.limit:
                    break
                if not low < pointed < high:
                    pointed = (low + high) // 2
            spare = pointed
        return best, self.done[best], predicted[best]

    def _try(self, policies: tuple[Policy, ...], predicted: int) -> None:
        memory = self.compiled(policies)
        kept = self.kept(policies)
        if kept > 1024 and memory == self.gc:
            raise ValueError(
                "the update's compiled memory does not depend on the policies: "
                f"{describe(policies)}, which keeps {kept} bytes for backward, and "
                f"{describe((Policy({}),) * self.count)} both have a peak of {memory.peak} bytes. "
                "Does the update hand its policies to hl.scan_blocks, and is it the same block?"
            )
        self.done[policies] = memory
        fits = memory.peak <= self.limit
        self.trials.append(Trial(describe(policies), predicted, memory.peak, fits))

    def _seconds(self, policies: tuple[Policy, ...]) -> float:
        return sum(self.entry[policy].seconds for policy in policies)

    def _check_feasible(self) -> None:
        if self.gc.peak <= self.limit:
            return
        parts = {
            "arguments": self.gc.arguments,
            "temporaries": self.gc.temporaries,
            "outputs that are not donated": self.gc.outputs - self.gc.aliased,
        }
        largest = sorted(parts.items(), key=lambda part: -part[1])
        raise ValueError(
            f"the memory budget is {self.limit} bytes, but recomputing every block, the least that "
            f"policies can do, needs {self.gc.peak}: "
            + ", ".join(f"{name} {size}" for name, size in largest)
            + ". Raise the budget to that, or make microbatches smaller."
        )
