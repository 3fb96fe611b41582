"""`plan`: choose, compile, correct, choose again; only what the compiler says fits is returned."""

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

from hilore_jax.actions import Compress, Policy
from hilore_jax.planning.allocate import allocate
from hilore_jax.planning.bar import Bar
from hilore_jax.planning.budget import Budget
from hilore_jax.planning.calibrated import calibrated_menu
from hilore_jax.planning.calibration import Calibration, check_exposure, model_fingerprint
from hilore_jax.planning.fingerprint import fingerprint
from hilore_jax.planning.measure import (
    Measurement,
    check_measurable,
    measure,
    parse_cost,
    shortlist,
)
from hilore_jax.planning.measured import Measured
from hilore_jax.planning.memory import Memory, compiled_memory
from hilore_jax.planning.menu import block_menu
from hilore_jax.planning.menus import block_menus
from hilore_jax.planning.named import same_block
from hilore_jax.planning.plan import Blocks, Plan
from hilore_jax.planning.request import check_arguments, check_request, traceable
from hilore_jax.planning.risks import default_risk, recommended_codecs
from hilore_jax.planning.search import Search, check_feasible, describe
from hilore_jax.planning.target import Target, parse_target

_log = logging.getLogger("hilore_jax")
_COMPILATIONS = 8  # with GC's and the baseline's

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
    cost: str | Measurement | Measured = "modelled",
    calibration: Calibration | None = None,
    exposure: float | None = None,
    progress: bool | None = None,
) -> Plan:
    """The policies, one a block, that recompute least within two budgets on a target device.

        minimize sum_b seconds[p_b]   s.t.   peak(p) <= M,   sum_b risk[p_b]^2 <= R^2

    Each p_b is an entry of the block's Pareto menu (HiLoRe's utility, memory and risk; methods 1.6
    with squared risks). The peak is not modelled: it is `arguments + outputs - aliased +
    temporaries` of the complete update in the target compiler's buffer assignment. What the
    compiler makes of the kept bytes is measured at each trial and corrected for
    (`planning.search`, which also says why a larger budget is never slower).

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
        cost: seconds of recomputation, "modelled" by a roofline or "measured": the menu is found
            with the roofline, then complete updates under its entries are timed in turns on this
            device (`planning.measure`), which takes arrays as `args` and minutes. Or a
            `planning.measure.Measurement`, which says how; or the `measured` of an earlier plan.
        calibration: measured risks, block by block, in place of `risks`; what it did not measure
            is not used. The risk budget is then one microbatch's: its share of the update's.
        exposure: of the microbatches to plan for; default: the calibration's median.
        progress: show a bar over compilations, or a line each off a terminal; default: a bar on
            a terminal.

    Returns:
        A plan whose compiled peak fits.

    Raises:
        TypeError: an argument of a wrong kind.
        ValueError: the budget is below what recomputing everything needs (says how much that is),
            a target or name is unknown, the update's program names other activations than the
            block, or its peak does not depend on the policies, or the calibration is of another
            model's shape. With a measured cost: the target is not here, or an argument is a shape.

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
    check_request(
        "hl.plan",
        update=update,
        args=args,
        blocks=blocks,
        budget=budget,
        target=target,
        codecs=codecs,
        risks=risks,
        offload=offload,
        calibration=calibration,
        exposure=exposure,
        progress=progress,
    )
    pricing = parse_cost(cost)
    arguments = args if callable(args) else lambda policies: args
    all_recomputed = (Policy({}),) * blocks.count
    given = arguments(all_recomputed)
    check_arguments("hl.plan", update, all_recomputed, given, donate)
    device = parse_target(target)
    if offload and not device.host_link:
        _log.warning(
            "offload is ignored: target %r has no host memory whose link is known.", device.name
        )
    situation = fingerprint(
        blocks.fn,
        blocks.args,
        given,
        blocks=blocks.count,
        argnums=blocks.argnums,
        target=device.name,
    )
    if isinstance(pricing, Measurement):
        check_measurable(given, device)
    elif pricing is not None:
        pricing.check(situation)
    del given  # arrays may be large, and measuring needs room
    if calibration is not None:  # before anything long
        calibration.check(model_fingerprint(blocks))
        exposure = calibration.exposure if exposure is None else check_exposure(float(exposure))
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
    with Bar(progress, _COMPILATIONS) as bar:

        def compiled(policies: tuple[Policy, ...], fn: Update = update, **how: Any) -> Memory:
            bar.step(describe(policies))
            bound = functools.partial(fn, policies)
            with traceable(fn):
                memory = compiled_memory(
                    bound, *arguments(policies), target=device, donate=donate, **how
                )
            bar.end(f"peak {memory.peak / 2**30:.3f} GiB")
            return memory

        gc = compiled(all_recomputed, inspect=same_block(blocks, menu))
        baseline = None
        if budget.times_gc is None:
            limit = budget.nbytes
        else:
            other = budget.baseline
            baseline = gc.peak if other is None else compiled(all_recomputed, other).peak
            limit = int(budget.times_gc * baseline)
        # A TPU's compiler refuses what its device cannot hold: no budget reaches beyond that.
        most = min(limit, device.memory) if device.platform == "tpu" else limit
        check_feasible(gc, most)
        if isinstance(pricing, Measurement):
            menus = block_menus(menu, block_risks, blocks.count)
            pricing = measure(
                update,
                arguments,
                menu,
                shortlist(menus, budget.risk, paper, pricing.most),
                blocks=blocks.count,
                target=device,
                donate=donate,
                how=pricing,
                fingerprint=situation,
                progress=progress,
            )
        if pricing is not None:
            menu, block_risks = pricing.price(menu, block_risks)
        menus = block_menus(menu, block_risks, blocks.count)
        choose = functools.partial(allocate, menus, risk=budget.risk, paper=paper)
        search = Search(menu, blocks.count, most, choose, gc, compiled, device.count)
        spent = 1 if budget.baseline is None else 2
        policies, memory, predicted = search.run(_COMPILATIONS - spent)
    found = choose(memory=search.spare(policies))
    return Plan(
        policies=policies,
        menu=menu,
        target=device.name,
        risk_budget=float(budget.risk),
        budget=limit,
        baseline=baseline,
        gc=gc,
        memory=memory,
        predicted=predicted,
        bound_seconds=found.bound_seconds,
        cost="modelled" if pricing is None else "measured",
        fingerprint=situation,
        trials=tuple(search.trials),
        block_risks=block_risks,
        exposure=None if calibration is None else exposure,
        paper=paper,
        measured=pricing,
        share=search.share,
    )
