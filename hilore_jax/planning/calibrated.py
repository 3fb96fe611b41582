"""Each block's own menu: a shared one, restricted to what a calibration measured."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from hilore_jax.actions import Compress, Policy
from hilore_jax.planning.backward import block_program
from hilore_jax.planning.calibration import Calibration, model_fingerprint
from hilore_jax.planning.cost import Roofline
from hilore_jax.planning.frontier import distortion
from hilore_jax.planning.menu import Entry
from hilore_jax.planning.menus import BlockRisks
from hilore_jax.planning.plan import Blocks


def calibrated_menu(
    menu: Sequence[Entry],
    blocks: Blocks,
    target: Any,
    calibration: Calibration,
    exposure: float | None = None,
    codecs: Sequence[Compress] | None = None,
) -> tuple[tuple[Entry, ...], BlockRisks]:
    """A menu of exact and measured entries, and the risk of each entry in each block.

    An entry has the risk that was measured for a policy of the same distortion: what is stored
    exactly in one and recomputed exactly in the other makes no difference to the gradient. Measured
    policies that the menu lacks are added.

    Args:
        menu: the block's menu under assumed risks.
        blocks: the repeated block.
        target: a `planning.target.Target`, for the figures of added policies.
        calibration: measured risks.
        exposure: of the microbatch to plan for; None: the calibration's median.
        codecs: what may be used of what was measured; None: all.

    Returns:
        The entries, whose `risk` is that of the worst block, and `[blocks][entries]` risks,
        infinite where a block was not measured.

    Raises:
        ValueError: a calibration of another model's shape, of other codecs, or a bad exposure.
    """
    calibration.check(model_fingerprint(blocks))
    exposure = calibration.exposure if exposure is None else exposure
    program = block_program(blocks.fn, *blocks.args, argnums=blocks.argnums)
    measured = {distortion(p, program.traced): p for p in calibration.policies if _may(p, codecs)}
    if calibration.policies and not measured:
        raise ValueError(
            f"the calibration measured none of the codecs {list(map(str, codecs or ()))}; it has "
            + "; ".join(map(str, calibration.policies[:3]))
            + ". Calibrate with those codecs, or leave codecs out."
        )
    roofline = Roofline(target)
    known = {entry.policy for entry in menu}
    entries = list(menu)
    for policy in measured.values():
        if policy not in known:
            figures = program.figures(policy)
            seconds = roofline.backward(program, policy, figures)
            entries.append(Entry(policy, figures.nbytes, seconds, *figures.work, 0.0))
    found: list[tuple[Entry, list[float]]] = []
    for entry in entries:
        policy: Policy | None = entry.policy
        if policy.names(Compress):
            policy = measured.get(distortion(policy, program.traced))
        if policy is None:
            continue
        risks = [calibration.risk(policy, b, exposure) for b in range(blocks.count)]
        if any(map(math.isfinite, risks)):
            found.append((dataclasses.replace(entry, risk=max(risks)), risks))
    found.sort(key=lambda pair: (pair[0].nbytes, pair[0].seconds, pair[0].risk))
    return (
        tuple(entry for entry, _ in found),
        tuple(tuple(risks[b] for _, risks in found) for b in range(blocks.count)),
    )


def _may(policy: Policy, codecs: Sequence[Compress] | None) -> bool:
    return codecs is None or all(policy[name] in codecs for name in policy.names(Compress))
