"""What a plan or a calibration was made for, in words, and a command's settings taken from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hilore_jax.models.config import DecoderConfig
from hilore_jax.planning.fingerprint import differences
from hilore_jax.training.facts import (
    ALPHA,
    BETA,
    COMPLETION,
    DENSE,
    DTYPE,
    MICRO,
    MODEL,
    PROJECTION,
    RANK,
    ROWS,
    SEQ,
    SHAPE,
    SKETCH_RANK,
    SKETCH_TARGETS,
    WEIGHTS,
    check_facts,
)


def model_facts(shape: DecoderConfig) -> dict[str, str]:
    """What a calibration, and a plan for another device, must share with a run beside blocks.

    Example:
        >>> from hilore_jax.models.lookup import shape_of
        >>> model_facts(shape_of("smollm2-135m"))["LoRA rank"]
        '0'
    """
    sizes = {
        "width": shape.d_model,
        "width of the MLP": shape.d_ff,
        "heads": shape.n_heads,
        "heads of keys and values": shape.n_kv_heads,
        "words": shape.vocab_size,
    }
    sketched = {SKETCH_RANK: "0"}
    if shape.sketches is not None:
        sketched = {
            SKETCH_RANK: str(shape.sketches.sketches.rank),
            SKETCH_TARGETS: ",".join(shape.sketches.targets),
            PROJECTION: shape.sketches.sketches.kind,
            WEIGHTS: shape.param_dtype,
        }
    return {
        SHAPE: ", ".join(f"{name} {size}" for name, size in sizes.items()),
        RANK: str(shape.lora.rank if shape.lora else 0),
        **sketched,
    }


def dense_facts(shape: DecoderConfig, dense: bool) -> dict[str, str]:
    """Whether a LoGRA update trains parameters without sketches; empty for other updates."""
    return {} if shape.sketches is None else {DENSE: "adamw" if dense else "frozen"}


def update_facts(
    shape: DecoderConfig,
    *,
    micro: int,
    rows: int,
    seq: int,
    completion: int,
    beta: float,
    dense: bool = False,
) -> dict[str, str]:
    """An actor update's facts; those of a file are compared with those of a run.

    Args:
        shape: of the model.
        micro: microbatches of an update.
        rows: sequences of a microbatch.
        seq: tokens of a sequence.
        completion: its scored tokens.
        beta: weight of the reference term.
        dense: with sketches, all other parameters train too.
    """
    found = {ROWS: rows, SEQ: seq, COMPLETION: completion, MICRO: micro, DTYPE: shape.dtype}
    alpha = {} if shape.lora is None else {ALPHA: f"{shape.lora.alpha:g}"}
    named = {name: str(value) for name, value in found.items()}
    facts = {**model_facts(shape), **dense_facts(shape, dense), **alpha}
    return {**facts, **named, BETA: f"{beta:g}"}


def check_situation(
    planned: Mapping[str, str],
    found: Mapping[str, str],
    of: str,
    settings: Mapping[str, Any] | None = None,
) -> None:
    """Refuses another situation than a file's.

    Args:
        planned: the file's fingerprint.
        found: the run's, whole or in part.
        of: what the file is: "plan", "ladder" or "calibration".
        settings: of the command at hand, with which it agrees; default: `run_settings`.

    Raises:
        ValueError: names each difference, and the options that agree with the file.

    Example:
        >>> check_situation({"LoRA rank": "0"}, {"LoRA rank": "16"}, "plan")
        Traceback (most recent call last):
        ...
        ValueError: the plan was made for another situation: LoRA rank: the plan has 0, this run has
        16. Give --lora-rank 0, or make another plan.
    """
    check_facts(planned, f"the {of} is damaged", f"Make another {of}.")
    found = dict(found)
    # Of beta only whether there is a reference at all changes the program.
    if float(planned.get(BETA, 0)) and float(found.get(BETA, 0)):
        del found[BETA]
    differ = differences(planned, found, f"the {of} has {{}}, this run has {{}}")
    if not differ:
        return
    settings = run_settings(planned) if settings is None else settings
    names = {name for name in planned.keys() & found.keys() if planned[name] != found[name]}
    options = _options(planned, settings, names)
    options = options or "the model, adapters and batch that it was made for"
    raise ValueError(
        f"the {of} was made for another situation: {'; '.join(differ)}. Give {options}, or make "
        f"another {of}."
    )


def check_blocks(planned: Mapping[str, str], count: int, shape: DecoderConfig, of: str) -> None:
    """Refuses policies for another number of blocks, with what else differs of the model.

    Args:
        planned: the file's fingerprint.
        count: its policies.
        shape: of the model at hand.
        of: as for `check_situation`.

    Raises:
        ValueError: as `check_situation`.
    """
    if count != shape.n_layers:
        found = {"blocks": str(shape.n_layers), **model_facts(shape)}
        check_situation({"blocks": str(count), **planned}, found, of)


def run_settings(facts: Mapping[str, str], group: int = 1) -> dict[str, Any]:
    """The settings of `hilore accept` and `hilore train` that a plan says.

    Args:
        facts: its fingerprint; where it has none of these facts, as of an update of one's own in
            Python, the result is empty.
        group: completions a prompt of the run, as it was given.

    Example:
        >>> run_settings({"LoRA rank": "8", "tokens of a sequence": "96"})
        {'lora_rank': 8}
    """
    found: dict[str, Any] = _shared(facts)
    if {ROWS, SEQ, COMPLETION, MICRO} <= facts.keys():
        rows, seq, completion, micro = (int(facts[n]) for n in (ROWS, SEQ, COMPLETION, MICRO))
        found["micro_rows"], found["completion_length"] = rows, completion
        found["prompt_length"] = seq - completion
        if group > 0 and rows * micro % group == 0:  # another one is refused with the settings
            found["prompts"] = rows * micro // group
    if ALPHA in facts:
        found["lora_alpha"] = float(facts[ALPHA])
    return found


def plan_settings(facts: Mapping[str, str]) -> dict[str, Any]:
    """The settings of `hilore plan` that a calibration says.

    Example:
        >>> plan_settings({"model": "smollm2-135m-instruct", "dtype": "float32"})
        {'model': 'smollm2-135m-instruct', 'dtype': 'float32'}
    """
    found: dict[str, Any] = _shared(facts)
    if {ROWS, SEQ, COMPLETION, MICRO} <= facts.keys():
        found["batch"] = f"{facts[ROWS]}x{facts[SEQ]}"
        found["completion"], found["micro"] = int(facts[COMPLETION]), int(facts[MICRO])
    return found


def _shared(facts: Mapping[str, str]) -> dict[str, Any]:
    kinds = {"model": (MODEL, str), "lora_rank": (RANK, int), "dtype": (DTYPE, str)}
    kinds["beta"] = (BETA, float)
    found = {field: kind(facts[name]) for field, (name, kind) in kinds.items() if name in facts}
    if facts.get(SKETCH_RANK, "0") != "0":
        found |= {"optimizer": "logra", "rank": int(facts[SKETCH_RANK])}
        found["targets"] = facts.get(SKETCH_TARGETS, "all")
        more = {"projection": PROJECTION, "weights": WEIGHTS, "dense": DENSE}
        found |= {field: facts[name] for field, name in more.items() if name in facts}
    return found


def _options(planned: Mapping[str, str], settings: Mapping[str, Any], names: set[str]) -> str:
    """The options of a command with which the named facts agree."""
    wanted = [field for name, fields in _FIELDS.items() if name in names for field in fields]
    found = [
        f"--{field.replace('_', '-')} {settings[field]}"
        for field in dict.fromkeys(wanted)
        if field in settings
    ]
    if MICRO in names and ROWS in planned and "micro" not in settings:
        rows = int(planned[ROWS]) * int(planned[MICRO])
        found.append(f"--prompts and --group of {rows} rows in all")
    return " ".join(found)


# The settings that say a fact, in `hilore plan` or in `hilore accept` and `hilore train`.
_FIELDS: dict[str, tuple[str, ...]] = {
    "blocks": ("model",),
    SHAPE: ("model",),
    RANK: ("lora_rank",),
    ALPHA: ("lora_alpha",),
    SKETCH_RANK: ("optimizer", "rank"),
    SKETCH_TARGETS: ("targets",),
    PROJECTION: ("projection",),
    WEIGHTS: ("weights",),
    DENSE: ("dense",),
    DTYPE: ("dtype",),
    ROWS: ("batch", "micro_rows"),
    SEQ: ("batch", "prompt_length", "completion_length"),
    COMPLETION: ("completion", "prompt_length", "completion_length"),
    MICRO: ("micro",),
    BETA: ("beta",),
}
