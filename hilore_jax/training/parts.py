"""What a run is made of besides its settings: model, tokenizer and task, checked before loading."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Sequence
from pathlib import Path

import jax

from hilore_jax.actions import Policy
from hilore_jax.models.config import DecoderConfig, LoraConfig
from hilore_jax.models.decoder import Decoder
from hilore_jax.remat import remat
from hilore_jax.training.abstract import check_plan, training_update
from hilore_jax.training.config import TrainConfig
from hilore_jax.training.experience import TextTokenizer
from hilore_jax.training.logra_config import run_shape, say_narrow
from hilore_jax.training.report import block_and_arguments
from hilore_jax.training.strategy import loaded_plans, plans
from hilore_jax.training.tasks import Task, check_args, parse_args, reasoning_gym_task
from hilore_jax.training.toy import copy_task, count_task

_BUILT_IN = {"copy": copy_task, "count": count_task}


@dataclasses.dataclass(frozen=True)
class Parts:
    """What a run is made of besides its settings."""

    model: Decoder
    tokenizer: TextTokenizer
    task: Task


def load_task(config: TrainConfig) -> Task:
    """The task that the settings name."""
    args = parse_args(config.task_args)
    if config.task in _BUILT_IN:
        make = _BUILT_IN[config.task]
        known = [name for name in inspect.signature(make).parameters if name != "seed"]
        check_args(config.task, args, known)
        return make(**args, seed=config.seed)
    return reasoning_gym_task(
        config.task, args or None, seed=config.seed, format_reward=config.format_reward
    )


def load_parts(config: TrainConfig, also: Sequence[Policy] = ()) -> Parts:
    """Task and shape first (quick to refuse), then tokenizer and weights.

    Args:
        config: the settings.
        also: further policies that the model's blocks must be able to honour.

    Raises:
        ValueError, ImportError, FileNotFoundError: whatever is not there or does not fit.
    """
    from hilore_jax.models import tokenizer, weights

    task = load_task(config)
    rank = config.adapter_rank
    lora = LoraConfig(rank=rank, alpha=config.lora_alpha) if rank else None
    # Weights that train are kept in float32: a small step would vanish in bfloat16, unless it is
    # rounded at random.
    stored = config.dtype if lora else config.weights
    name = source(config.model)
    shape = weights.open_source(name)[0]
    shape = dataclasses.replace(shape, dtype=config.dtype, param_dtype=stored, lora=lora)
    check_model(config, shape, also)
    model = weights.load(name, dtype=config.dtype, param_dtype=stored, lora=lora)
    return Parts(model, tokenizer.load(name), task)


def source(model: str) -> str:
    """The name or path that holds a model's weights.

    Raises:
        ValueError: the name of a shape without weights; says how to get them.

    Example:
        >>> source("smollm2-135m")
        'smollm2-135m-instruct'
    """
    from hilore_jax.models.bundled import BUNDLED
    from hilore_jax.models.shapes import FAMILIES

    if f"{model}-instruct" in BUNDLED:
        return f"{model}-instruct"
    if model.lower() in FAMILIES and not Path(model).exists():
        raise ValueError(
            f"{model} is known by its shape only, weights ship for {', '.join(BUNDLED)}. Download "
            "the model's Hugging Face repository, `hf download ORGANIZATION/NAME --local-dir "
            "FOLDER`, and pass --model FOLDER."
        )
    return model


def check_model(config: TrainConfig, shape: DecoderConfig, also: Sequence[Policy] = ()) -> None:
    """Refuses settings that the model cannot carry out; one block is traced by shapes.

    Args:
        config: the settings.
        shape: of the model.
        also: further policies.

    Raises:
        ValueError: a sequence that is too long, or a policy that a block cannot honour, or a
            plan for another model or batch.
    """
    total = config.prompt_length + config.completion_length
    if total > shape.max_seq:
        raise ValueError(
            f"prompt_length + completion_length = {total} tokens exceeds the model's "
            f"{shape.max_seq}; shorten one of them"
        )
    shape = run_shape(config, shape)
    say_narrow(shape, config.dense)
    for made in loaded_plans(config, shape):
        check_plan(made, training_update(shape, config))
    block, arguments = block_and_arguments(shape, config.micro_rows, total)
    wanted = {policy for policies in (*plans(config, shape), also) for policy in policies}
    for policy in wanted:
        decorated = remat(policy)(block)
        # The derivative too: a codec meets its activation's shape only there.
        jax.eval_shape(lambda p, x, *rest: jax.vjp(decorated, p, x, *rest)[0], *arguments)  # noqa: B023
