"""The training loop: sample, score, update, record; stops and resumes without losing anything."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.metadata
import json
import platform
import secrets
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from hilore_jax.models.decoder import Decoder
from hilore_jax.training import checkpoint
from hilore_jax.training.batch import Batch
from hilore_jax.training.config import TrainConfig, check
from hilore_jax.training.exposures import drop_records
from hilore_jax.training.external import Rollouts, rollout_folder
from hilore_jax.training.learner import Learner
from hilore_jax.training.metrics import MetricsWriter, Progress
from hilore_jax.training.minibatch import updates_per_rollout
from hilore_jax.training.one_update import evaluation, one_update, sample_rollout
from hilore_jax.training.parts import Parts, check_model, load_parts
from hilore_jax.training.saver import Saver
from hilore_jax.training.step import TrainState

_VERSIONS = ("hilore_jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


@dataclasses.dataclass(frozen=True)
class Run:
    """What a run left behind."""

    graphdef: nnx.GraphDef
    state: TrainState
    metrics: tuple[dict[str, Any], ...]  # of the updates done by this call
    stopped_by: signal.Signals | None = None  # what interrupted the run before its last update

    def model(self) -> Decoder:
        """The trained model."""
        return nnx.merge(self.graphdef, self.state.params, self.state.frozen)


def train(
    config: TrainConfig,
    parts: Parts | None = None,
    *,
    learner: Learner | None = None,
    rollouts: Rollouts | None = None,
    on_update: Callable[[dict[str, Any], Batch], None] | None = None,
) -> Run:
    """Trains, writing settings, versions, metrics and checkpoints to `config.run_dir`.

    Rollout n reads questions `n * prompts` to `(n + 1) * prompts` and the key `fold_in(key, n)`, so
    that a resumed run goes on exactly as it would have. Checkpoints lie between rollouts.

    Args:
        config: the settings; checked as a whole before anything is loaded.
        parts: model, tokenizer and task, where they are not to be loaded by name.
        learner: a learner made before for these settings and parts.
        rollouts: completions of another engine by the rollout's number, in place of sampling;
            `config.rollouts` names a folder of them.
        on_update: called with each update's metrics and batch.

    Returns:
        The final state and this call's metrics; `stopped_by` after SIGINT or SIGTERM, when the
        run can be resumed from the checkpoint just written.

    Raises:
        ValueError: settings that are wrong, or that differ from the checkpoint's; a prompt that is
            too long, a reward that fails, or a packet that the sync folder does not take.
        OSError: the last checkpoint could not be written; of those before, a warning is logged.
        FloatingPointError: an update that was not finite, one more in a row than
            `nonfinite_limit`; names the row and position. Here, for a failed reward and for a
            packet, the updates made are kept in a checkpoint.
        KeyboardInterrupt: a second SIGINT or SIGTERM; the metrics and the last checkpoint stay.
    """
    check(config)
    _say(config, f"loading {config.model} and the task {config.task}")
    if parts is None:
        parts = load_parts(config)
    else:
        check_model(config, parts.model.config)
    if rollouts is None and config.rollouts:
        rollouts = rollout_folder(config.rollouts, config.rollout_timeout)
    _say(config, "compiling; the first update takes longer than the others")
    run_dir = Path(config.run_dir)
    learner = Learner(config, parts.model) if learner is None else learner
    start, name = _resume(config, learner) if config.resume else (0, secrets.token_hex(8))
    run_dir.mkdir(parents=True, exist_ok=True)
    _write_json(run_dir / "config.json", dataclasses.asdict(config))
    _write_json(run_dir / "versions.json", versions(config))
    drop_records(run_dir, start)
    if learner.publisher is not None:
        learner.publisher.start(int(learner.state.step), learner.state.params, name)
    seen: list[dict[str, Any]] = []
    saved, due = int(learner.state.step), False
    bad = 0  # updates in a row that were not finite
    progress = Progress(config.updates, start, quiet=config.quiet)
    resume_step = start if config.resume else None
    with (
        MetricsWriter(run_dir / "metrics.jsonl", resume_step) as writer,
        contextlib.closing(progress),
        _stop_requests() as requests,
        Saver(run_dir / "checkpoints", keep_latest=config.keep_checkpoints) as saver,
    ):
        save = functools.partial(_save, config, learner, name, saver, seen)
        step, per, rollout = start, updates_per_rollout(config), None
        # A rollout is learned from to its end: what sampled it is not in a checkpoint.
        while step < config.updates and not (requests and step % per == 0):
            try:
                if step % per == 0:
                    rollout = sample_rollout(config, parts, learner, step // per, rollouts)
                assert rollout is not None
                tolerate = bad < config.nonfinite_limit
                metrics, batch = one_update(
                    config, parts, learner, rollout, step, tolerate=tolerate
                )
            except (ValueError, FloatingPointError):  # the state is as the last update left it
                if saved != int(learner.state.step) and step % per == 0:
                    save(step)
                raise
            step += 1
            bad = bad + 1 if metrics["nonfinite"] else 0
            try:
                metrics |= learner.publish()
            except (ValueError, OSError):  # the update itself is done
                writer.write(metrics)
                if step % per == 0:
                    save(step)
                raise
            metrics |= evaluation(config, parts, learner, step)
            writer.write(metrics)
            progress.update(metrics)
            seen.append(metrics)
            if on_update is not None:
                on_update(metrics, batch)
            due = due or bool(config.save_every and step % config.save_every == 0)
            if due and step % per == 0 and saved != int(learner.state.step):
                saved, due = save(step), False
        if saved != int(learner.state.step):
            save(step)
    stopped_by = requests[0] if step < config.updates else None
    return Run(learner.graphdef, learner.state, tuple(seen), stopped_by)


def versions(config: TrainConfig | None = None) -> dict[str, Any]:
    """Versions, device and policy: what a number of this run depends on."""
    found: dict[str, Any] = {"python": platform.python_version()}
    for name in _VERSIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    device = jax.devices()[0]
    found |= {"backend": device.platform, "device": device.device_kind}
    found["devices"] = jax.device_count()
    if config is not None:
        found["policy"] = json.loads(config.parsed_policy.to_json())
        if config.ladder:
            found |= {"policy": "ladder", "ladder": config.fingerprint()["ladder"]}
    return found


def _say(config: TrainConfig, text: str) -> None:
    if not config.quiet:
        print(text, file=sys.stderr, flush=True)


def _checkpointed(state: TrainState) -> dict[str, Any]:
    # The frozen part is loaded from the model, never from a checkpoint.
    fields = ("params", "opt_state", "step", "key", "ghat")
    return {name: getattr(state, name) for name in fields}


def _fingerprint(config: TrainConfig, learner: Learner) -> dict[str, Any]:
    if learner.state.ghat is None:
        return config.fingerprint()
    # Not in checkpoints of before, nor in those of runs without calibrated risks.
    follows = "a moving average (--fixed-gradient-norm: as calibrated)"
    return {**config.fingerprint(), "gradient norm of risks": follows}


def _save(
    config: TrainConfig,
    learner: Learner,
    name: str,
    saver: Saver,
    seen: list[dict[str, Any]],
    updates: int,
) -> int:
    """Begins a checkpoint, scored by the last evaluation or the mean reward of the last updates.

    Returns:
        The state's own count of updates, so that no checkpoint's name can be wrong; updates that
        were not finite moved the run through the data alone.
    """
    step = int(learner.state.step)
    position = updates // updates_per_rollout(config) * config.prompts
    meta = {"fingerprint": _fingerprint(config, learner), "data_position": position}
    meta["run"] = name
    score = _score(seen[-(config.save_every or len(seen)) :])
    saver.save(step, _checkpointed(learner.state), meta, score=score)
    return step


def _score(lines: list[dict[str, Any]]) -> float | None:
    """How good the policy is by the metrics since about the last checkpoint."""
    evaluated = [line["eval/reward"] for line in lines if "eval/reward" in line]
    rewards = evaluated[-1:] or [line["reward"] for line in lines]
    return float(np.mean(rewards)) if rewards else None


def _resume(config: TrainConfig, learner: Learner) -> tuple[int, str]:
    """Puts the newest checkpoint into the learner; how far the run was, and its name."""
    found = checkpoint.restore(
        Path(config.run_dir) / "checkpoints",
        _checkpointed(learner.state),
        _fingerprint(config, learner),
    )
    if found is None:
        raise ValueError(
            f"nothing to resume: {config.run_dir}/checkpoints holds no checkpoint; start anew in "
            "another run folder"
        )
    tree, meta = found
    step, made = int(meta["step"]), int(tree["step"])
    if made != step:
        raise ValueError(
            f"{config.run_dir}/checkpoints/{step:08d} holds the state after update {made}, its "
            f"name says {step}: it would repeat or leave out updates. Remove it, to resume from "
            "the checkpoint before, or start anew in another run folder"
        )
    learner.state = dataclasses.replace(learner.state, **tree)
    # Those of before had no name; of LoGRA runs, whose packets need one, these are not resumed.
    rollouts = int(meta["data_position"]) // config.prompts
    return rollouts * updates_per_rollout(config), meta.get("run") or secrets.token_hex(8)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


@contextlib.contextmanager
def _stop_requests() -> Iterator[list[signal.Signals]]:
    """The first SIGINT or SIGTERM received, as a list that is empty before; a second stops."""
    requests: list[signal.Signals] = []
    if threading.current_thread() is not threading.main_thread():
        yield requests
        return

    def request(number, frame):
        if requests:
            raise KeyboardInterrupt
        requests.append(signal.Signals(number))
        print(
            f"\n{requests[0].name}: stopping after this update (again to stop at once)",
            file=sys.stderr,
            flush=True,
        )

    before = {number: signal.signal(number, request) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield requests
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
