"""Whether a calibration's exposures are those of the microbatches that are planned for."""

from __future__ import annotations

from collections.abc import Mapping

from hilore_jax.planning.calibration import Calibration
from hilore_jax.training.situation import COMPLETION, MICRO, ROWS, SEQ

_BATCH = (MICRO, ROWS, SEQ, COMPLETION)


def other_batch(calibration: Calibration, facts: Mapping[str, str]) -> str:
    """What of a calibration's exposures does not hold for a batch; empty where they do.

    Exposure sums |omega| over a microbatch, and omega has 1/N of the complete update in it (methods
    of arXiv 2609.33570): with a fourth of the microbatches it is four times as large, and so is
    every risk, where the risk budget is only twice as large.

    Args:
        calibration: the measured risks.
        facts: of the update that is planned, `situation.update_facts`.

    Returns:
        A sentence that names both batches.

    Example:
        >>> made = Calibration((), 1.0, 1.0, (0.5,), {}, 1, 1.0, 1, {})
        >>> other_batch(made, {})
        'the calibration does not say of which batch its exposures are (median 0.5)'
    """
    measured = calibration.fingerprint
    if not _says(measured):
        return (
            "the calibration does not say of which batch its exposures are (median "
            f"{calibration.exposure:.4g})"
        )
    if all(measured[name] == facts[name] for name in _BATCH):
        return ""
    return (
        f"the calibration's exposures (median {calibration.exposure:.4g}) are of "
        f"{_words(measured)}, this plan is for {_words(facts)}"
    )


def check_exposure_of(calibration: Calibration, facts: Mapping[str, str]) -> None:
    """Refuses the calibration's median exposure for another batch than it was measured on.

    Args:
        calibration: as for `other_batch`.
        facts: as for `other_batch`.

    Raises:
        ValueError: names both batches, and what to give.
    """
    wrong = other_batch(calibration, facts)
    if not wrong:
        return
    measured = calibration.fingerprint
    if not _says(measured):
        raise ValueError(
            f"{wrong}, and a plan's risks grow with it. Give --exposure, the median of a "
            "microbatch of the run (hilore exposure shows a run's)."
        )
    guess = calibration.exposure * int(measured[MICRO]) / int(facts[MICRO])
    raise ValueError(
        f"{wrong}, and a plan's risks grow with exposure. Give --exposure, the median of a "
        f"microbatch of the run (hilore exposure shows a run's); about {guess:.4g} where the "
        f"advantages are as large and microbatches are equal shares of an update. Or plan for the "
        f"calibration's batch, --batch {measured[ROWS]}x{measured[SEQ]} --completion "
        f"{measured[COMPLETION]} --micro {measured[MICRO]}."
    )


def _says(facts: Mapping[str, str]) -> bool:
    return facts.keys() >= set(_BATCH)


def _words(facts: Mapping[str, str]) -> str:
    micro, rows, seq, completion = (facts[name] for name in _BATCH)
    return (
        f"updates of {micro} microbatches of {rows} sequences of {seq} tokens, "
        f"{completion} of them scored"
    )
