"""What complete updates under the entries of a menu took, and the menu at those prices."""

import dataclasses
import json
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from hilore_jax.actions import Policy
from hilore_jax.planning.fingerprint import differences
from hilore_jax.planning.menu import Entry
from hilore_jax.planning.menus import BlockRisks
from hilore_jax.planning.pareto import undominated
from hilore_jax.planning.timing import quartiles


@dataclasses.dataclass(frozen=True)
class Timing:
    """What one policy saves against recomputing everything (GC).

    Attributes:
        policy: of each of `blocks` blocks; the others were recomputed.
        saved: median of the paired differences of complete updates, GC less policy, seconds a
            block and microbatch; negative where the policy is slower.
        low: their lower quartile.
        high: their upper quartile.
        blocks: how many fitted the device.
    """

    policy: Policy
    saved: float
    low: float
    high: float
    blocks: int


@dataclasses.dataclass(frozen=True)
class Measured:
    """Measured seconds of a menu's entries; `hilore_jax.plan(cost=...)` takes it for other budgets.

    Attributes:
        timings: one a measured policy, GC among them.
        turns: timed updates under each.
        update_seconds: median of complete updates under GC.
        left_out: policies of the menu that were not measured, and why.
        fingerprint: what the figures hold for.
    """

    timings: tuple[Timing, ...]
    turns: int
    update_seconds: float
    left_out: tuple[tuple[str, str], ...]
    fingerprint: dict[str, str]

    def check(self, found: Mapping[str, str]) -> None:
        """Refuses to price the blocks of another update or device.

        Raises:
            ValueError: names each difference.
        """
        if differ := differences(self.fingerprint, found):
            raise ValueError(
                "the seconds were measured in another situation: "
                + "; ".join(differ).replace("planned for", "measured with")
                + '. Measure again with cost="measured".'
            )

    def price(
        self, menu: Sequence[Entry], block_risks: BlockRisks | None = None
    ) -> tuple[tuple[Entry, ...], BlockRisks | None]:
        """A menu with measured seconds.

        Their zero is the fastest of the entries: only differences can be measured, and only they
        matter to an allocation. What was not measured is left out, as is what another entry now
        beats in bytes, seconds and every block's risk; so is all that is slower than GC.

        Args:
            menu: modelled entries.
            block_risks: `[blocks][entries]`, where blocks have risks of their own.

        Returns:
            The entries that are left, by bytes, and their columns of `block_risks`.

        Raises:
            ValueError: GC is not in the menu, or was not measured.

        Example:
            >>> from hilore_jax.actions import Store
            >>> gc, kept = Policy({}), Policy({"attn_out": Store()})
            >>> menu = Entry(gc, 0, 9.0, 2, 96, 0.0), Entry(kept, 100, 8.0, 1, 32, 0.0)
            >>> times = Timing(gc, 0.0, 0.0, 0.0, 4), Timing(kept, 0.5, 0.4, 0.6, 4)
            >>> priced, _ = Measured(times, 5, 20.0, (), {}).price(menu)
            >>> [entry.seconds for entry in priced]
            [0.5, 0.0]
        """
        saved = {timing.policy: timing.saved for timing in self.timings}
        places = {e.policy: i for i, e in enumerate(menu) if e.policy in saved}
        if Policy({}) not in places:
            raise ValueError(
                "the menu cannot be priced: recomputing everything is not in it or was not "
                f"measured; measured were {'; '.join(map(str, saved))}."
            )
        most = max(saved[policy] for policy in places)
        entries = [
            dataclasses.replace(menu[i], seconds=most - saved[policy])
            for policy, i in places.items()
        ]

        def figures(entry: Entry) -> tuple[float | int, ...]:
            i = places[entry.policy]
            risks = [entry.risk] if block_risks is None else [row[i] for row in block_risks]
            return (entry.nbytes, entry.seconds, *risks)

        left = undominated(entries, figures)
        if all(entry.policy != Policy({}) for entry in left):  # offloading may beat it
            left = [*left, *(entry for entry in entries if entry.policy == Policy({}))]
        left = sorted(left, key=lambda e: (e.nbytes, e.seconds, e.risk))
        if block_risks is not None:
            columns = [places[entry.policy] for entry in left]
            block_risks = tuple(tuple(row[i] for i in columns) for row in block_risks)
        return tuple(left), block_risks

    def spread(self, policy: Policy) -> tuple[float, float] | None:
        """Quartiles of the seconds that a policy saves a block and microbatch, where measured."""
        found = next((t for t in self.timings if t.policy == policy), None)
        return None if found is None else (found.low, found.high)

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return dataclasses.asdict(self) | {
            "timings": [
                {**dataclasses.asdict(t), "policy": json.loads(t.policy.to_json())}
                for t in self.timings
            ]
        }


def paired(theirs: Sequence[float], ours: Sequence[float]) -> tuple[float, float, float]:
    """Median and quartiles of paired differences, `theirs` less `ours`.

    Example:
        >>> paired([5.0, 9.0, 7.0], [4.0, 5.0, 5.0])
        (2.0, 1.5, 3.0)
    """
    pairs = [a - b for a, b in zip(theirs, ours, strict=True)]
    return statistics.median(pairs), *quartiles(pairs)
