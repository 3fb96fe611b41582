"""A run folder as `hilore train` leaves it, made by hand."""

import json

import pytest

from hilore_jax.training.exposures import Completion, Record, write_record

TEXTS = (
    ("Let", " me", " add", ":", "\n", "3", " +", " $", "4", "_", " =", " 7", ""),
    ("no", " idea", "\x1b[31m"),
)


def make_record(step, pieces=TEXTS):
    sequences = tuple(
        Completion(
            row=row,
            prompt="What is 3 + 4?\n",
            tokens=tuple(range(len(text))),
            pieces=text,
            omega=tuple([(-1) ** row * weight / len(text)] * len(text)),
        )
        for (row, weight), text in zip(((3, 2.0), (0, 1.0)), pieces, strict=True)
    )
    return Record(
        step=step,
        group=(0, 0, 1, 1),
        micro=(0, -1, 1, 1),
        reward=(0.0, 0.0, 0.5, 1.0),
        advantage=(-1.0, 0.0, 0.25, 2.0),
        exposure=(1.0, 0.0, 0.25, 2.0),
        tokens=(3, 5, 5, 20),
        sequences=sequences,
    )


def write_run(folder, updates=4, **changes):
    """Metrics of some updates, errors measured in every second, a record of the first and third."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for step in range(1, updates + 1):
        line = {
            "step": step,
            "exposure": 3.25,
            "micro_exposure": [1.0 * step, 2.0][: 1 + step % 2],
            "risk_used": 0.004 * step,
            "risk_budget": 0.015,
        }
        if step % 2:
            line |= {"gradient_error": 0.005 * step, "predicted_error": 0.0075}
        line |= changes
        lines.append(json.dumps({k: v for k, v in line.items() if v != "gone"}))
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    settings = {"model": "tiny", "task": "count", "policy": "gc", "plan": "plans/a.json"}
    (folder / "config.json").write_text(json.dumps(settings))
    for step in (1, 3):
        write_record(folder, make_record(step))
    return folder


@pytest.fixture
def run_folder(tmp_path):
    return write_run(tmp_path / "run")


@pytest.fixture
def make_run():
    return write_run
