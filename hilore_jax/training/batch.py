"""What an update learns from: the rows of one update, in microbatches of equal shape."""

from __future__ import annotations

import dataclasses
import typing
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int

from hilore_jax.training.rollout import check_prompts


@typing.no_type_check  # jax puts slices and placeholders in the fields; `check_batch` checks them
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """One update's rows, cut into microbatches of equal shape.

    A row is a left-padded prompt followed by a right-padded completion, which takes the last
    `completion` positions; position t-1 scores token t.
    """

    tokens: Int[Array, "micro rows seq"]
    attention_mask: Bool[Array, "micro rows seq"]
    completion_mask: Bool[Array, "micro rows completion"]  # the optimized tokens
    logp_old: Float[Array, "micro rows completion"]  # nats
    logp_ref: Float[Array, "micro rows completion"] | None  # nats
    advantages: Float[Array, "micro rows"] | Float[Array, "micro rows completion"]
    # nats; with these the update says how far the rollouts' policy is from the trained one
    logp_rollout: Float[Array, "micro rows completion"] | None = None
    # `grpo.loss_divisors` of the complete update; None: its tokens
    divisors: Float[Array, "micro rows"] | None = None


def check_batch(batch: Batch) -> None:
    """Checks that shapes and dtypes fit together and, on concrete arrays, the padding.

    Raises:
        ValueError: names every field at fault, or the row whose padding is on the wrong side.
    """
    fields = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    fields = {name: value for name, value in fields.items() if value is not None}
    shapes = {name: value.shape for name, value in fields.items()}
    if len(shapes["tokens"]) != 3:
        raise ValueError(f"batch.tokens must be [micro, rows, seq], found {shapes['tokens']}")
    micro, rows, seq = shapes["tokens"]
    completion = shapes["completion_mask"][-1] if shapes["completion_mask"] else 0
    expected: dict[str, tuple[int, ...]] = dict.fromkeys(shapes, (micro, rows, completion))
    expected |= {"tokens": (micro, rows, seq), "attention_mask": (micro, rows, seq)}
    expected |= {"divisors": (micro, rows)}
    if len(shapes["advantages"]) != 3:
        expected["advantages"] = (micro, rows)
    wrong = [
        f"batch.{name} is {list(shape)}, expected {list(expected[name])}"
        for name, shape in shapes.items()
        if shape != expected[name]
    ]
    if wrong:
        raise ValueError("; ".join(wrong) + " (micro, rows, then seq or completion)")
    if not 0 < completion < seq:
        raise ValueError(f"a completion of {completion} tokens needs a longer sequence than {seq}")
    for name, value in fields.items():
        kind, article = _KINDS[name]
        if not jax.numpy.issubdtype(value.dtype, kind):
            raise ValueError(f"batch.{name} is {value.dtype}, expected {article}")
    if not isinstance(batch.attention_mask, Tracer):
        _check_padding(np.asarray(batch.attention_mask), np.asarray(batch.completion_mask))


def micro(array: Any, micro_rows: int) -> Any:
    """`[rows, ...]` cut into `[rows / micro_rows, micro_rows, ...]`.

    Raises:
        ValueError: the rows do not divide into microbatches of that size.

    Example:
        >>> micro(np.arange(4), 2).tolist()
        [[0, 1], [2, 3]]
    """
    if micro_rows < 1 or array.shape[0] % micro_rows:
        raise ValueError(f"{array.shape[0]} rows do not divide into microbatches of {micro_rows}")
    return array.reshape(-1, micro_rows, *array.shape[1:])


_KINDS = {
    "tokens": (np.integer, "an integer dtype"),
    "attention_mask": (np.bool_, "bool"),
    "completion_mask": (np.bool_, "bool"),
    "logp_old": (np.floating, "a floating-point dtype"),
    "logp_ref": (np.floating, "a floating-point dtype"),
    "advantages": (np.floating, "a floating-point dtype"),
    "logp_rollout": (np.floating, "a floating-point dtype"),
    "divisors": (np.floating, "a floating-point dtype"),
}


def _check_padding(attention: np.ndarray, completion: np.ndarray) -> None:
    """Prompts are padded on the left, completions on the right, and only real tokens train."""
    width = completion.shape[-1]
    rows = attention.reshape(-1, attention.shape[-1])
    check_prompts(rows[:, :-width])
    answers = rows[:, -width:]
    gaps = np.flatnonzero(np.any(np.diff(answers.astype(np.int8), axis=1) > 0, axis=1))
    if len(gaps):
        raise ValueError(
            f"the completion of row {gaps[0]} is padded on the left or has a gap; its mask must be "
            f"ones, then zeros, found {answers[gaps[0]].astype(int).tolist()}"
        )
    padding = np.flatnonzero(np.any(completion.reshape(-1, width) & ~answers, axis=1))
    if len(padding):
        raise ValueError(
            f"row {padding[0]} optimizes padding: completion_mask is True where attention_mask is "
            "False"
        )
