"""The training loop: sample, score, update, record; stops and resumes without losing anything."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import json
import platform
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from hilore_jax.grpo import group_advantages
from hilore_jax.models.config import LoraConfig
from hilore_jax.models.decoder import Decoder, segment
from hilore_jax.training import checkpoint
from hilore_jax.training.config import TrainConfig, check
from hilore_jax.training.experience import (
    Experience,
    TextTokenizer,
    collect,
    logp_difference,
    micro,
    to_batch,
)
from hilore_jax.training.metrics import MetricsWriter, Progress
from hilore_jax.training.step import (
    Batch,
    TrainState,
    init_state,
    jit_update,
    make_actor_update,
    make_score,
    raise_if_nonfinite,
)
from hilore_jax.training.tasks import Task, parse_args, reasoning_gym_task
from hilore_jax.training.toy import copy_task, count_task

_VERSIONS = ("hilore_jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


@dataclasses.dataclass(frozen=True)
class Parts:
    """What a run is made of besides its settings."""

    model: Decoder
    tokenizer: TextTokenizer
    task: Task


@dataclasses.dataclass(frozen=True)
class Run:
    """What a run left behind."""

    graphdef: nnx.GraphDef
    state: TrainState
    metrics: tuple[dict[str, Any], ...]  # of the updates done by this call
    interrupted: bool

    def model(self) -> Decoder:
        """The trained model."""
        return nnx.merge(self.graphdef, self.state.params, self.state.frozen)


def load_task(config: TrainConfig) -> Task:
    """The task that the settings name."""
    args = parse_args(config.task_args)
    if config.task in ("copy", "count"):
        return {"copy": copy_task, "count": count_task}[config.task](**args, seed=config.seed)
    return reasoning_gym_task(
        config.task, args or None, seed=config.seed, format_reward=config.format_reward
    )


def load_parts(config: TrainConfig) -> Parts:
    """Task first (quick to refuse), then tokenizer and weights."""
    from hilore_jax.models import tokenizer, weights

    task = load_task(config)
    lora = LoraConfig(rank=config.lora_rank, alpha=config.lora_alpha) if config.lora_rank else None
    return Parts(
        # Weights that train are kept in float32: a small step would vanish in bfloat16.
        model=weights.load(
            config.model,
            dtype=config.dtype,
            param_dtype=config.dtype if lora else "float32",
            lora=lora,
        ),
        tokenizer=tokenizer.load(config.model),
        task=task,
    )


def make_optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """AdamW with the paper's settings, methods 1.1."""
    return optax.adamw(
        config.learning_rate, b1=0.9, b2=0.999, eps=1e-8, weight_decay=config.weight_decay
    )


class Learner:
    """The compiled pieces of a run: scoring, the update, and how often each was traced.

    Args:
        config: the run's settings.
        model: the policy to train; its arrays move into `state`.
    """

    def __init__(self, config: TrainConfig, model: Decoder):
        self.config = config
        self.policies = (config.parsed_policy,) * model.config.n_layers
        self.n_traces = 0
        self.temp_bytes: int | None = None
        optimizer = make_optimizer(config)
        key = jax.random.key(config.seed)
        self.graphdef, self.state = init_state(segment(model, self.policies), optimizer, key)
        self._reference = self._reference_params(model)
        temperature = config.temperature or 1.0
        self._score = make_score(self.graphdef, temperature=temperature)
        update = make_actor_update(
            self.graphdef,
            optimizer,
            clip=config.clip,
            beta=config.beta,
            temperature=temperature,
            max_grad_norm=config.max_grad_norm,
        )
        self._jitted = jit_update(self._counted(update))
        self._compiled: Callable[[TrainState, Batch], Any] | None = None

    def model(self) -> Decoder:
        """The current policy, for rollouts."""
        return nnx.merge(self.graphdef, self.state.params, self.state.frozen)

    def batch(self, experience: Experience) -> tuple[Batch, dict[str, float]]:
        """The update's batch: advantages, old and reference log-probs."""
        config = self.config
        advantages = group_advantages(jnp.asarray(experience.rewards))
        tokens = micro(experience.tokens, config.micro_rows)
        mask = micro(experience.attention_mask, config.micro_rows)
        old = micro(experience.rollout_logps, config.micro_rows)
        metrics = {}
        if config.old_logps == "score":
            old = self._scored(self.state.params, tokens, mask)
            metrics["rollout_logp_diff"] = logp_difference(experience, np.asarray(old))
        ref = None
        if self._reference is not None:
            ref = self._scored(self._reference, tokens, mask)
        return to_batch(experience, advantages, old, ref, config.micro_rows), metrics

    def compile(self, batch: Batch) -> None:
        """Compiles the update once, for this batch's shapes; `temp_bytes` is then known."""
        if self._compiled is None:
            lowered = self._jitted.lower(self.policies, self.state, batch)
            compiled = lowered.compile()
            analysis = compiled.memory_analysis()
            self.temp_bytes = None if analysis is None else int(analysis.temp_size_in_bytes)
            self._compiled = compiled

    def update(self, batch: Batch) -> dict[str, Any]:
        """One actor update; the state moves on. Raises FloatingPointError on a non-finite one."""
        self.compile(batch)
        assert self._compiled is not None
        self.state, metrics = self._compiled(self.state, batch)
        metrics = jax.device_get(metrics)
        raise_if_nonfinite(metrics, batch)
        del metrics["nonfinite_index"]
        return {name: value.item() for name, value in metrics.items()}

    def _scored(self, params, tokens, mask):
        width = self.config.completion_length
        return self._score(params, self.state.frozen, tokens, mask, completion=width)

    def _reference_params(self, model: Decoder) -> nnx.State | None:
        if self.config.beta == 0:
            return None
        # Adapters at zero are the base model; without them the start must be copied, since the
        # update donates its state.
        frozen = jnp.zeros_like if model.config.lora is not None else jnp.copy
        return jax.tree.map(frozen, self.state.params)

    def _counted(self, update):
        def counted(policies, state, batch):
            self.n_traces += 1
            return update(policies, state, batch)

        return counted


def train(
    config: TrainConfig,
    parts: Parts | None = None,
    *,
    learner: Learner | None = None,
    on_update: Callable[[dict[str, Any], Batch], None] | None = None,
) -> Run:
    """Trains, writing settings, versions, metrics and checkpoints to `config.run_dir`.

    Update n reads questions `n * prompts` to `(n + 1) * prompts` and the key `fold_in(key, n)`, so
    that a resumed run goes on exactly as it would have.

    Args:
        config: the settings; checked as a whole before anything is loaded.
        parts: model, tokenizer and task, where they are not to be loaded by name.
        learner: a learner made before for these settings and parts.
        on_update: called with each update's metrics and batch.

    Returns:
        The final state and this call's metrics; `interrupted` after SIGINT or SIGTERM, when the
        run can be resumed from the checkpoint just written.

    Raises:
        ValueError: settings that are wrong, or that differ from the checkpoint's.
        FloatingPointError: an update that was not finite; names the row and position.
    """
    check(config)
    parts = load_parts(config) if parts is None else parts
    _check_lengths(config, parts.model)
    run_dir = Path(config.run_dir)
    learner = Learner(config, parts.model) if learner is None else learner
    start = _resume(config, learner) if config.resume else 0
    run_dir.mkdir(parents=True, exist_ok=True)
    _write_json(run_dir / "config.json", dataclasses.asdict(config))
    _write_json(run_dir / "versions.json", versions(config))
    seen: list[dict[str, Any]] = []
    saved = start if start else None
    progress = Progress(config.updates, start, quiet=config.quiet)
    resume_step = start if config.resume else None
    with (
        MetricsWriter(run_dir / "metrics.jsonl", resume_step) as writer,
        contextlib.closing(progress),
        _stop_requests() as stop,
    ):
        step = start
        while step < config.updates and not stop.is_set():
            metrics, batch = _one_update(config, parts, learner, step)
            step += 1
            writer.write(metrics)
            progress.update(metrics)
            seen.append(metrics)
            if on_update is not None:
                on_update(metrics, batch)
            if config.save_every and step % config.save_every == 0:
                saved = _save(config, learner, step)
        if saved != step:
            _save(config, learner, step)
    return Run(learner.graphdef, learner.state, tuple(seen), step < config.updates)


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
    return found


def _one_update(
    config: TrainConfig, parts: Parts, learner: Learner, step: int
) -> tuple[dict[str, Any], Batch]:
    began = time.perf_counter()
    experience = collect(
        learner.model(),
        parts.tokenizer,
        parts.task,
        range(step * config.prompts, (step + 1) * config.prompts),
        jax.random.fold_in(learner.state.key, step),
        group=config.group,
        prompt_length=config.prompt_length,
        completion_length=config.completion_length,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
    )
    sampled = time.perf_counter()
    batch, scores = learner.batch(experience)
    learner.compile(batch)
    jax.block_until_ready(batch)
    scored = time.perf_counter()
    metrics = learner.update(batch)
    done = time.perf_counter()
    return {
        "step": step + 1,
        **experience.metrics,
        **scores,
        **metrics,
        "n_traces": learner.n_traces,
        "update_temp_bytes": learner.temp_bytes,
        "seconds/rollout": sampled - began,
        "seconds/update": done - scored,
    }, batch


def _check_lengths(config: TrainConfig, model: Decoder) -> None:
    total = config.prompt_length + config.completion_length
    if total > model.config.max_seq:
        raise ValueError(
            f"prompt_length + completion_length = {total} tokens exceeds the model's "
            f"{model.config.max_seq}; shorten one of them"
        )


def _checkpointed(state: TrainState) -> dict[str, Any]:
    # The frozen part is loaded from the model, never from a checkpoint.
    fields = ("params", "opt_state", "step", "key")
    return {name: getattr(state, name) for name in fields}


def _save(config: TrainConfig, learner: Learner, step: int) -> int:
    meta = {"fingerprint": config.fingerprint(), "data_position": step * config.prompts}
    folder = Path(config.run_dir) / "checkpoints"
    tree = _checkpointed(learner.state)
    checkpoint.save(folder, step, tree, meta, keep_latest=config.keep_checkpoints)
    return step


def _resume(config: TrainConfig, learner: Learner) -> int:
    found = checkpoint.restore(
        Path(config.run_dir) / "checkpoints", _checkpointed(learner.state), config.fingerprint()
    )
    if found is None:
        raise ValueError(f"nothing to resume: {config.run_dir}/checkpoints holds no checkpoint")
    tree, meta = found
    learner.state = dataclasses.replace(learner.state, **tree)
    return int(meta["step"])


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


@contextlib.contextmanager
def _stop_requests() -> Iterator[threading.Event]:
    """An event set by the first SIGINT or SIGTERM; a second SIGINT stops at once."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def request(number, frame):
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()
        print("\nstopping after this update (again to stop at once)", flush=True)

    before = {number: signal.signal(number, request) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
