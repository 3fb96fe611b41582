"""Compilations of candidate plans: which to try, and what they teach about peaks."""

import math
from collections.abc import Callable, Sequence

from hilore_jax.actions import Offload, Policy
from hilore_jax.planning.allocate import Allocation
from hilore_jax.planning.memory import Memory, TargetMemoryError
from hilore_jax.planning.menu import Entry
from hilore_jax.planning.plan import Trial, runs

# How far apart the candidates' kept bytes are: of GC's peak, and of their own.
_STEP, _GROWTH = 0.0025, 0.03
# How far compiled peaks are taken to lie below and above predicted ones: of GC's peak, and of the
# kept bytes. Below is common, as a block that keeps much has less to hold while it recomputes.
_MARGIN, _BELOW, _ABOVE = 0.03, 0.35, 0.1
_CLOSE = 0.0025  # of the budget: less left over than this is not worth another compilation

_RATE = math.log1p(_GROWTH)

Policies = tuple[Policy, ...]


class Search:
    """The fastest candidate whose compiled peak fits, in few compilations.

    Peaks are not what entries add up to: buffers for decoding, fragments and the compiler's own
    choices come and go. A search that follows them from budget to budget visits other candidates
    for each, and may miss with more memory what it found with less. So the candidates are the
    same for every budget: the best allocations of a fixed row of kept bytes, each at least as fast
    as the one before, and they are bisected in one fixed order. At candidate i

        its predicted peak is over the budget by more than a margin:    go on below i
        it is under the budget by more than that:                       go on above i; if nothing
                                                                        there fits, compile i
        otherwise it is compiled:                                       above i if it fits, or below

    The prediction is the line through the compiled peaks of the first candidate (GC) and the last,
    so that it too is the same for every budget, and a mesh that divides what blocks keep is seen in
    its slope. Each of the three answers can only move upwards with the budget; hence by induction
    over the halves the candidate that is found does, however noisy the peaks are: a larger budget
    is never slower. Only a search that runs out of compilations, which takes peaks farther from
    the line than the margin, can end early; what it returns fits all the same.

    Args:
        menu: the block's entries.
        count: blocks.
        limit: bytes that the peak may be.
        choose: the best allocation within `memory` bytes and the risk budget.
        gc: memory with every block recomputed.
        compiled: compiles a candidate.
        devices: that may divide kept bytes among them.
    """

    def __init__(
        self,
        menu: tuple[Entry, ...],
        count: int,
        limit: int,
        choose: Callable[..., Allocation],
        gc: Memory,
        compiled: Callable[[Policies], Memory],
        devices: int = 1,
    ):
        self.menu, self.count, self.limit, self.choose = menu, count, limit, choose
        self.gc, self.compiled, self.devices = gc, compiled, devices
        self.done: dict[Policies, Memory] = {(Policy({}),) * count: gc}
        self.refused: set[Policies] = set()
        self.entry = {entry.policy: entry for entry in menu}
        self.trials = [Trial(describe((Policy({}),) * count), None, gc.peak, gc.peak <= limit)]
        self._predicted = {(Policy({}),) * count: gc.peak}
        self._left = 0
        self.share = 1.0 / devices  # bytes of peak for each byte that blocks keep

    def kept(self, policies: Policies) -> int:
        """Bytes that all blocks keep, as counted from the block."""
        return sum(self.entry[policy].nbytes for policy in policies)

    def predict(self, policies: Policies) -> int:
        """The peak of a candidate, from GC's and those of the other trials.

        A trial with the same set of entries says most, as transients follow which entries are used
        (decoding buffers, the widest block); of those the nearest in bytes.
        """
        wanted, kept = set(policies), self.kept(policies)
        known = [p for p in self.done if self.kept(p) and p != policies]
        if not known or not kept:
            return self.gc.peak + round(kept / self.devices)
        nearest = min(known, key=lambda p: (len(wanted ^ set(p)), abs(kept - self.kept(p))))
        return max(0, self.done[nearest].peak + round(self.share * (kept - self.kept(nearest))))

    def spare(self, policies: Policies) -> int:
        """Bytes that blocks could keep within the limit, as far as this candidate's peak says."""
        return self.kept(policies) + int((self.limit - self.done[policies].peak) / self.share)

    def run(self, compilations: int) -> tuple[Policies, Memory, int]:
        """The fastest candidate that fits, its memory, and its peak as predicted before that."""
        check_feasible(self.gc, self.limit)
        self._left = compilations
        fastest = self._choose(sum(max(e.nbytes for e in self.menu) for _ in range(self.count)))
        most = self.kept(fastest)
        fits = self._fits(fastest)
        if fastest in self.done and most:
            above = self.done[fastest].peak - self.gc.peak
            self.share = min(max(above / most, 0.25 / self.devices), 1.0)
        if not fits and most:
            self._within(0, _power_of_two(self._place(most)))
        best = min(
            (p for p, memory in self.done.items() if memory.peak <= self.limit),
            key=lambda p: (self._seconds(p), self.kept(p)),
        )
        return best, self.done[best], self._predicted[best]

    def _place(self, kept: int) -> float:
        """The candidate's number, a real one, that keeps so many bytes; see `_bytes`."""
        return math.log1p(kept * self.share * _GROWTH / (_STEP * self.gc.peak)) / _RATE

    def _bytes(self, place: int) -> int:
        """Bytes that a candidate may keep: in even steps at first, then in even ratios."""
        return round(math.expm1(place * _RATE) * _STEP * self.gc.peak / _GROWTH / self.share)

    def _within(self, low: int, high: int) -> bool:
        """Whether a candidate strictly between two fits; it and others are in `done` then."""
        if high - low <= 1:
            return False
        middle = (low + high) // 2
        policies = self._choose(self._bytes(middle))
        if self._over(policies) > self._margin(policies):
            return self._within(low, middle)
        searched = self._over(policies) < -self._margin(policies, _ABOVE)
        if searched and self._within(middle, high):
            return True
        if not self._fits(policies):
            return self._within(low, middle)
        if not searched and self.limit - self.done[policies].peak > _CLOSE * self.limit:
            self._within(middle, high)
        return True

    def _over(self, policies: Policies) -> float:
        """Bytes by which the line through the compiled ends lies above the limit."""
        return self.gc.peak + self.share * self.kept(policies) - self.limit

    def _margin(self, policies: Policies, kept: float = _BELOW) -> float:
        return _MARGIN * self.gc.peak + kept * self.share * self.kept(policies)

    def _fits(self, policies: Policies) -> bool:
        if policies not in self.done and policies not in self.refused:
            if not self._left:
                return False
            self._left -= 1
            self._try(policies)
        return policies in self.done and self.done[policies].peak <= self.limit

    def _try(self, policies: Policies) -> None:
        predicted, kept = self.predict(policies), self.kept(policies)
        try:
            memory = self.compiled(policies)
        except TargetMemoryError:
            self.refused.add(policies)
            self.trials.append(Trial(describe(policies), predicted, None, False))
            return
        if kept > 1024 and memory == self.gc:
            raise ValueError(
                "the update's compiled memory does not depend on the policies: "
                f"{describe(policies)}, which keeps {kept} bytes for backward, and "
                f"{describe((Policy({}),) * self.count)} both have a peak of {memory.peak} bytes. "
                "Does the update hand its policies to hl.scan_blocks, and is it the same block?"
            )
        check_offload(policies, memory)
        self.done[policies], self._predicted[policies] = memory, predicted
        fits = memory.peak <= self.limit
        self.trials.append(Trial(describe(policies), predicted, memory.peak, fits))

    def _choose(self, spare: int) -> Policies:
        return self.choose(memory=max(0, spare)).policies

    def _seconds(self, policies: Policies) -> float:
        return sum(self.entry[policy].seconds for policy in policies)


def check_feasible(gc: Memory, limit: int) -> None:
    """Refuses a budget below what recomputing everything needs.

    Raises:
        ValueError: says how much that is, and of what it consists.
    """
    if gc.peak <= limit:
        return
    parts = {
        "arguments": gc.arguments,
        "temporaries": gc.temporaries,
        "outputs that are not donated": gc.outputs - gc.aliased,
    }
    largest = sorted(parts.items(), key=lambda part: -part[1])
    raise ValueError(
        f"the memory budget is {limit} bytes, but recomputing every block, the least that "
        f"policies can do, needs {gc.peak}: "
        + ", ".join(f"{name} {size}" for name, size in largest)
        + ". Raise the budget to that, or make microbatches smaller."
    )


def check_offload(policies: Policies, memory: Memory) -> None:
    """Refuses a program that offloads nothing, where its policies say that it does.

    Raises:
        ValueError: names the activations.
    """
    names = sorted({name for policy in policies for name in policy.names(Offload)})
    if names and not memory.host:
        raise ValueError(
            f"{', '.join(names)} should be kept in host memory, but the compiled program has none: "
            "the compiler kept them on the device, or they are no residuals of the block. Name the "
            "values that backward reads, or plan with offload=False."
        )


def describe(policies: Sequence[Policy]) -> str:
    """Policies in short: how many blocks take which.

    Example:
        >>> describe([Policy({})] * 3)
        '3 x gc'
    """
    return "; ".join(f"{n} x {policy}" for policy, n in runs(policies))


def _power_of_two(least: float) -> int:
    found = 1
    while found < least:
        found *= 2
    return found
