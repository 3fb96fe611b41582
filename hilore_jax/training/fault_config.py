"""What a run does about rewards that fail and updates that are not finite."""

from __future__ import annotations

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True, kw_only=True)
class FaultSettings:
    """Faults among the settings of `hilore train`."""

    reward_failures: Literal["stop", "drop"] = "stop"
    """A reward that raises, hangs or is no finite number stops the run, or its prompt is left out
    of the update, counted and named."""
    reward_seconds: float = 10.0
    """The most that scoring one completion may take; 0 sets no limit."""
    nonfinite_limit: int = 0
    """Updates in a row that may be not finite before the run stops; each leaves the state as it
    is and is counted."""
