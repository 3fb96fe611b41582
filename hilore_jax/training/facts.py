"""What a plan or a calibration says it was made for: names of facts, and what their values may be.

Facts are text, in the `fingerprint` of a file; commands take settings from them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import get_args

from hilore_jax.logra.projection import Kind
from hilore_jax.planning import expect
from hilore_jax.planning.bounds import RANK as MOST_RANK
from hilore_jax.planning.bounds import Real, Whole

MODEL = "model"  # its name or folder, which is not compared: its shape is
SHAPE = "model's shape"
SKETCH_RANK, SKETCH_TARGETS = "LoGRA rank", "LoGRA targets"
PROJECTION, WEIGHTS, DENSE = "LoGRA projection", "LoGRA weights", "parameters without sketches"
RANK, ALPHA, DTYPE = "LoRA rank", "LoRA alpha", "dtype"
ROWS, SEQ = "sequences of a microbatch", "tokens of a sequence"
COMPLETION, MICRO, BETA = "scored tokens of a sequence", "microbatches of an update", "beta"
# Of a calibration and of plans by it: which prompts it saw.
TASK, PROMPTS = "task of the calibration", "prompts of the calibration"

_NUMBERS: dict[str, Whole | Real] = {
    RANK: Whole(0, MOST_RANK),
    SKETCH_RANK: Whole(0, MOST_RANK),
    ALPHA: Real(positive=True),
    BETA: Real(),
    PROMPTS: Whole(0),
    **dict.fromkeys((ROWS, SEQ, COMPLETION, MICRO), Whole()),
}
_WORDS = {
    PROJECTION: get_args(Kind),
    WEIGHTS: ("float32", "bfloat16"),
    DENSE: ("frozen", "adamw"),
    DTYPE: ("float32", "bfloat16", "float16"),
}
_WHOLE = re.compile(r"-?[0-9]{1,20}", re.ASCII)


def check_facts(facts: Mapping[str, str], where: str, remedy: str) -> None:
    """Refuses facts that cannot be: they were not written by this library.

    Args:
        facts: a fingerprint; those that it lacks, and those of other names, are not checked.
        where: what errors call it, such as "plan.json is a damaged plan file".
        remedy: what to do, such as "Plan again.".

    Raises:
        ValueError: names the first that is wrong.

    Example:
        >>> check_facts({"LoRA rank": "many"}, "plan.json is a damaged plan file", "Plan again.")
        Traceback (most recent call last):
        ...
        ValueError: plan.json is a damaged plan file: fingerprint.LoRA rank must be a whole number,
        found 'many'. Plan again.
    """
    for name, bound in _NUMBERS.items():
        if name in facts and (fault := bound.fault(name, _number(facts[name], bound))):
            raise ValueError(f"{where}: fingerprint.{fault}. {remedy}")
    for name, words in _WORDS.items():
        if name in facts and facts[name] not in words:
            raise ValueError(
                f"{where}: fingerprint.{name} must be {' or '.join(words)}, found "
                f"{expect.shown(facts[name])}. {remedy}"
            )
    if {SEQ, COMPLETION} <= facts.keys() and int(facts[SEQ]) <= int(facts[COMPLETION]):
        raise ValueError(
            f"{where}: fingerprint.{SEQ} must be above {COMPLETION}, {facts[COMPLETION]}, found "
            f"{facts[SEQ]}. {remedy}"
        )


def _number(text: str, bound: Whole | Real) -> int | float | str:
    """The number that a text is, or the text, which is no number then."""
    if isinstance(bound, Whole):
        return int(text) if _WHOLE.fullmatch(text) else text
    try:
        return float(text)
    except ValueError:
        return text
