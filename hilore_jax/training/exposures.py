"""Records of some updates' sequences: tokens, coefficients, groups and microbatches."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from hilore_jax.grpo import exposure
from hilore_jax.planning.fields import Field, Format, read_json
from hilore_jax.training.experience import Experience, TextTokenizer

FOLDER = "exposure"  # in the run folder, a file an update
# What bounds a record's size, and that of the folder (about 20 MB at the most).
SEQUENCES, TOKENS, PROMPT, RECORDS = 16, 1024, 2000, 50
_SCHEMA = 1
_LARGEST = 1e30  # of exposures and coefficients: sums of them stay within float32
_FORMAT = Format(
    "record",
    (_SCHEMA,),
    "remove it, and train again with --log-exposure-every to have another",
    ("step", "sequences"),
)


@dataclasses.dataclass(frozen=True)
class Coefficients:
    """What an update made of its rows.

    Attributes:
        omega: `d loss / d logp` of each token, 0 of those that are not optimized.
        micro: the microbatch of each row; -1 of rows that were left out.
    """

    omega: Float[np.ndarray, "rows completion"]
    micro: Int[np.ndarray, "rows"]


@dataclasses.dataclass(frozen=True)
class Completion:
    """One completion, token by token.

    Attributes:
        row: which of the update's rows.
        prompt: its end.
        tokens: ids of the optimized tokens, the first ones of a long completion.
        pieces: the text of each.
        omega: the coefficient of each.
    """

    row: int
    prompt: str
    tokens: tuple[int, ...]
    pieces: tuple[str, ...]
    omega: tuple[float, ...]

    def profile(self, total: float) -> Float[np.ndarray, "tokens"]:
        """Exposure `E_s = sum_{t >= s} |omega_t|` of the state at each token.

        Args:
            total: the row's exposure, tokens that are not recorded included.

        Example:
            >>> sequence = Completion(0, "", (5, 6), ("a", "b"), (0.5, -0.25))
            >>> sequence.profile(1.0).tolist()
            [1.0, 0.5]
        """
        if not self.omega:
            return np.zeros(0, np.float32)
        found = np.asarray(exposure(np.asarray(self.omega, np.float32), profile=True))
        return found + max(0.0, total - float(found[0]))


@dataclasses.dataclass(frozen=True)
class Record:
    """An update's rows, and its most exposed sequences in full.

    Attributes:
        step: the update, from 1.
        group: of each row, as all tuples below: which prompt.
        micro: its microbatch; -1 for a row that was left out.
        reward: of its completion.
        advantage: of the row.
        exposure: sum of |omega| over its tokens.
        tokens: its optimized tokens.
        sequences: the most exposed first.
    """

    step: int
    group: tuple[int, ...]
    micro: tuple[int, ...]
    reward: tuple[float, ...]
    advantage: tuple[float, ...]
    exposure: tuple[float, ...]
    tokens: tuple[int, ...]
    sequences: tuple[Completion, ...]


def make_record(
    step: int,
    experience: Experience,
    advantages: Float[np.ndarray, "rows"],
    found: Coefficients,
    tokenizer: TextTokenizer,
) -> Record:
    """The record of one update.

    Args:
        step: the update, from 1.
        experience: its rows.
        advantages: of each row.
        found: the update's coefficients.
        tokenizer: decodes the sequences that are kept in full.
    """
    rows, group = len(experience.tokens), experience.rewards.shape[1]
    totals = np.asarray(exposure(found.omega, experience.completion_mask, per_row=True))
    width = experience.completion_mask.shape[1]

    def completion(row: int) -> Completion:
        at = np.flatnonzero(experience.completion_mask[row])[:TOKENS]
        ids = [int(i) for i in experience.tokens[row, -width:][at]]
        prompt = experience.tokens[row, :-width][experience.attention_mask[row, :-width]]
        return Completion(
            row,
            tokenizer.decode(prompt.tolist())[-PROMPT:],
            tuple(ids),
            tuple(tokenizer.decode([i]) for i in ids),
            tuple(_short(w) for w in found.omega[row][at]),
        )

    order = np.argsort(-totals, kind="stable")[:SEQUENCES]
    return Record(
        step,
        tuple(row // group for row in range(rows)),
        tuple(int(m) for m in found.micro),
        tuple(float(r) for r in experience.rewards.reshape(-1)),
        tuple(_short(a) for a in advantages.reshape(-1)),
        tuple(_short(e) for e in totals),
        tuple(int(n) for n in experience.completion_mask.sum(axis=1)),
        tuple(completion(int(row)) for row in order),
    )


def write_record(run_dir: Path, record: Record) -> None:
    """Writes a record into the run folder; of many the newest stay, and the first."""
    folder = run_dir / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{record.step:08d}.json"
    fresh = path.with_suffix(".tmp")
    fresh.write_text(json.dumps({"schema": _SCHEMA, **dataclasses.asdict(record)}))
    os.replace(fresh, path)
    for old in record_paths(run_dir)[1 : 1 - RECORDS]:
        old.unlink()


def drop_records(run_dir: Path, step: int) -> None:
    """Removes records of updates after `step`, which a resumed run does again."""
    for path in record_paths(run_dir):
        if int(path.stem) > step:
            path.unlink()


def record_paths(run_dir: Path) -> list[Path]:
    """The records of a run folder, oldest first."""
    found = (run_dir / FOLDER).glob("[0-9]*.json")
    return sorted(path for path in found if path.stem.isdecimal())


def read_record(path: Path) -> Record:
    """Reads what `write_record` wrote.

    Raises:
        ValueError: a damaged file (names the field, what was found and what was expected), or one
            of another version.
    """
    _, file = read_json(path, _FORMAT)
    found = file.fields([f.name for f in dataclasses.fields(Record)])
    record = Record(
        found["step"].whole(1),
        tuple(each.whole() for each in found["group"].items()),
        tuple(int(each.number(least=-1.0)) for each in found["micro"].items()),
        tuple(each.any_number() for each in found["reward"].items()),
        tuple(each.any_number() for each in found["advantage"].items()),
        tuple(each.number(most=_LARGEST) for each in found["exposure"].items()),
        tuple(each.whole() for each in found["tokens"].items()),
        tuple(_completion(each) for each in found["sequences"].items()),
    )
    rows = len(record.group)
    for name in ("micro", "reward", "advantage", "exposure", "tokens"):
        if len(getattr(record, name)) != rows:
            found[name].damaged(f"{name} has {len(getattr(record, name))} rows, group has {rows}")
    for field, sequence in zip(found["sequences"].items(), record.sequences, strict=True):
        if sequence.row >= rows:
            field.damaged(f"{field.where}.row is {sequence.row}, but there are {rows} rows")
    return record


def _completion(field: Field) -> Completion:
    found = field.fields([f.name for f in dataclasses.fields(Completion)])
    made = Completion(
        found["row"].whole(),
        found["prompt"].any_text(),
        tuple(each.whole() for each in found["tokens"].items()),
        tuple(each.any_text() for each in found["pieces"].items()),
        tuple(each.number(least=-_LARGEST, most=_LARGEST) for each in found["omega"].items()),
    )
    lengths = {len(made.tokens), len(made.pieces), len(made.omega)}
    if len(lengths) > 1:
        field.damaged(f"{field.where} has tokens, pieces and omega of lengths {sorted(lengths)}")
    return made


def _short(value: Any) -> float:
    return float(f"{float(value):.6g}")
