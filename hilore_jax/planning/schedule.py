"""What a calibration measures: which blocks take which policy, on which microbatch."""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import numpy as np

from hilore_jax import tracing
from hilore_jax.actions import Compress, Policy
from hilore_jax.planning.calibration import FORMS, model_fingerprint
from hilore_jax.planning.fingerprint import program_digest
from hilore_jax.planning.measurements import digest
from hilore_jax.planning.memory_cache import library_version
from hilore_jax.planning.plan import Blocks

MOST_POLICIES = 10
_LEAST_JOINT = 4


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The arguments of `hilore_jax.calibrate` that can be checked before there is any microbatch.

    Attributes:
        blocks: the repeated block.
        policies: to measure; those without compression are left out.
        count: microbatches.
        per_update: how many of them make one update; None: all.
        passes: most gradients to compute.
        risk: "squared" or "paper".
        seed: of the joint policies.

    Raises:
        ValueError: an unknown form, too few or too many policies, microbatches that do not make
            whole updates, or too few passes.
    """

    blocks: Blocks
    policies: tuple[Policy, ...]
    count: int
    per_update: int | None
    passes: int
    risk: str = "squared"
    seed: int = 0

    def __post_init__(self) -> None:
        _check(self.risk, self.entries, self.count, self.per_update)
        _ = self._joint

    @functools.cached_property
    def entries(self) -> tuple[Policy, ...]:
        """The policies that compress, each once."""
        return tuple(dict.fromkeys(p for p in self.policies if p.names(Compress)))

    @functools.cached_property
    def fingerprint(self) -> dict[str, str]:
        """The blocks', see `model_fingerprint`."""
        return model_fingerprint(self.blocks)

    @property
    def identity(self) -> str:
        """A hash of all that measurements depend on beside the loss and the values."""
        # Not JSON, which does not know a user's codec: the loss's program has what a codec does.
        policies = [str(policy) for policy in self.entries]
        how = [policies, self.passes, self.seed, self.count, self.per_update]
        block = program_digest(tracing.trace(self.blocks.fn, *self.blocks.args).closed)
        return digest([self.fingerprint, block, *how, jax.__version__, library_version()])

    @functools.cached_property
    def _joint(self) -> int:
        """Random policies on many blocks at once, from the passes that are left."""
        entries, blocks, count = len(self.entries), self.blocks.count, self.count
        least = count + entries * blocks
        joint = min(self.passes - least, 4 * count)
        if joint < 0 or (joint < _LEAST_JOINT and entries * blocks >= 8 * _LEAST_JOINT):
            raise ValueError(
                f"{entries} policies on {blocks} blocks and {count} exact gradients take {least} "
                f"passes, and {_LEAST_JOINT} joint ones, but passes={self.passes}: allow more "
                "passes, or give fewer policies."
            )
        return joint

    def choices(self) -> list[list[list[int]]]:
        """The choices to try on each microbatch beside the exact one, an entry for each block."""
        entries, blocks, count = len(self.entries), self.blocks.count, self.count
        found: list[list[list[int]]] = [[] for _ in range(count)]
        for unit in range(entries * blocks):
            index = [0] * blocks
            index[unit % blocks] = 1 + unit // blocks
            # Policies begin one further each: in step with the blocks, what belongs to a microbatch
            # could not be told from what belongs to a block.
            found[(unit + unit // blocks) % count].append(index)
        random = np.random.default_rng(self.seed)
        for n in range(self._joint):
            while sum(map(bool, index := random.integers(0, entries + 1, blocks).tolist())) < 2:
                if blocks < 2:
                    return found
            if index not in found[n % count]:
                found[n % count].append(index)
        return found


def _check(form: str, entries: Sequence[Policy], count: int, per_update: int | None) -> None:
    if form not in FORMS:
        raise ValueError(f"hl.calibrate(risk={form!r}): expected one of {FORMS}.")
    if not 0 < len(entries) <= MOST_POLICIES:
        raise ValueError(
            f"hl.calibrate was given {len(entries)} policies that compress, expected 1 to "
            f"{MOST_POLICIES}: each costs a gradient for every block. See "
            "hilore_jax.planning.frontier.frontier."
        )
    if count < 1 or (per_update is not None and (per_update < 1 or count % per_update)):
        raise ValueError(
            f"count={count} microbatches do not make whole updates of per_update={per_update}."
        )
