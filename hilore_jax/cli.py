"""The `hilore` command: each subcommand imports what it needs when it is called."""

from __future__ import annotations

import dataclasses
import glob
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

COMMANDS = {
    "train": "GRPO on a verifiable task, each update under a remat policy",
    "demo": "three updates of SmolLM2 under GC and under a compressed policy, compared",
    "plan": "the policies that recompute least in a memory budget, for a device here or not",
    "calibrate": "measured risks of compression for a model, on its own rollouts",
    "accept": "whether a plan keeps its memory and its gradient error on real updates",
    "exposure": "which tokens, groups and microbatches of a run can take low precision",
    "explain": "what a policy saves and recomputes in one block of a model, or a plan file",
    "bench": "memory and speed against jax.checkpoint and plain code",
    "doctor": "versions, devices, and which extras are installed",
}
_USAGE = "usage: hilore COMMAND [options]\n\ncommands:\n" + "".join(
    f"  {name:<10}{text}\n" for name, text in COMMANDS.items()
)
_HELP = _USAGE + "\n`hilore COMMAND --help` lists a command's options.\n"
# Faults of the input: the message says all, a traceback would hide it.
_EXPECTED = (ValueError, ImportError, FileNotFoundError, FloatingPointError)


@dataclasses.dataclass(frozen=True)
class ExplainConfig:
    """What a policy saves and recomputes in one block of a model, without its weights."""

    policy: str = "gc"
    """`gc`, `store`, a JSON file, or pairs such as `mlp_gate=int8,attn_out=store`."""
    model: str = "smollm2-135m"
    """A family by name, such as `qwen2.5-3b`, or a folder with a config.json."""
    rows: int = 1
    """Sequences."""
    seq: int = 512
    """Tokens a sequence."""
    dtype: str = "bfloat16"
    """Compute and storage dtype."""
    lora_rank: int = 0
    """Rank of LoRA adapters; 0 for none."""


@dataclasses.dataclass(frozen=True)
class DoctorConfig:
    """Versions, devices, and which extras are installed."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: arguments after the program's name; the process's when None.

    Returns:
        Exit status: 0 done, 1 a rejected plan, 2 wrong input, 130 or 143 stopped by a signal.
    """
    # jax's CUDA plugin, where it is installed without a GPU, would print a traceback as it loads.
    # On a machine with one its check of CUDA's libraries stays on.
    if not glob.glob("/dev/nvidia*"):
        os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] in ("-h", "--help"):
        print(_HELP, end="")
        return 0 if argv else 2
    if argv[0] not in COMMANDS:
        print(f"hilore: unknown command {argv[0]!r}\n\n{_HELP}", end="", file=sys.stderr)
        return 2
    run: Callable[[Sequence[str]], int | None] = globals()[f"_{argv[0]}"]
    try:
        return run(argv[1:]) or 0
    except _EXPECTED as error:
        print(f"hilore {argv[0]}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"hilore {argv[0]}: stopped at once", file=sys.stderr)
        return 130


def _parse(kind: type, command: str, argv: Sequence[str]) -> Any:
    import tyro

    return tyro.cli(kind, args=list(argv), prog=f"hilore {command}")


def _train(argv: Sequence[str]) -> int:
    from hilore_jax.training.config import TrainConfig, check

    config = _parse(TrainConfig, "train", argv)
    check(config)
    from hilore_jax.training.trainer import train

    run = train(config)
    if run.stopped_by is None:
        return 0
    print(
        f"hilore train: stopped by {run.stopped_by.name}; metrics and a checkpoint are in "
        f"{config.run_dir}. To go on, add --resume to the same command",
        file=sys.stderr,
    )
    return 128 + run.stopped_by


def _demo(argv: Sequence[str]) -> int:
    from hilore_jax.training.demo import DemoConfig, run_demo

    return run_demo(_parse(DemoConfig, "demo", argv))


def _bench(argv: Sequence[str]) -> int | None:
    return importlib.import_module("hilore_jax.report.bench").main(list(argv))


def _plan(argv: Sequence[str]) -> None:
    from hilore_jax.training.plan_command import PlanConfig, run_plan

    run_plan(_parse(PlanConfig, "plan", argv))


def _calibrate(argv: Sequence[str]) -> None:
    from hilore_jax.training.calibrate_command import CalibrateConfig, run_calibrate

    run_calibrate(_parse(CalibrateConfig, "calibrate", argv))


def _accept(argv: Sequence[str]) -> int:
    from hilore_jax.training.accept_command import AcceptOptions, run_accept

    if argv and not argv[0].startswith("-"):
        argv = ["--plan", *argv]
    return 0 if run_accept(_parse(AcceptOptions, "accept", argv)).accepted else 1


def _exposure(argv: Sequence[str]) -> None:
    from hilore_jax.report.exposure_command import ExposureConfig, run_exposure

    if argv and not argv[0].startswith("-"):
        argv = ["--run-dir", *argv]
    run_exposure(_parse(ExposureConfig, "exposure", argv))


def _explain(argv: Sequence[str]) -> None:
    if len(argv) == 1 and argv[0].endswith(".json"):
        from hilore_jax.planning.plan import Plan

        print(Plan.load(argv[0]))
        return
    config = _parse(ExplainConfig, "explain", argv)
    least = {"rows": 1, "seq": 1, "lora_rank": 0}
    for name, minimum in least.items():
        if getattr(config, name) < minimum:
            option = name.replace("_", "-")
            raise ValueError(f"--{option} must be >= {minimum}, found {getattr(config, name)}")
    from hilore_jax.explain import explain
    from hilore_jax.models.config import LoraConfig
    from hilore_jax.models.lookup import shape_of
    from hilore_jax.spelling import parse_policy
    from hilore_jax.training.report import block_and_arguments

    lora = LoraConfig(rank=config.lora_rank) if config.lora_rank else None
    fields = {"dtype": config.dtype, "param_dtype": config.dtype, "lora": lora}
    shape = shape_of(config.model, **fields)
    block, arguments = block_and_arguments(shape, config.rows, config.seq)
    print(explain(parse_policy(config.policy), block, *arguments, argnums=(0, 1)))


def _doctor(argv: Sequence[str]) -> None:
    _parse(DoctorConfig, "doctor", argv)
    import jax

    from hilore_jax.training.trainer import versions

    for name, value in versions().items():
        print(f"{name:<18}{value}")
    for device in jax.devices():
        print(f"{'':<18}{device} {sorted(m.kind for m in device.addressable_memories())}")
    for extra, modules in _EXTRAS.items():
        missing = [name for name in modules if not _is_installed(name)]
        state = f'missing {missing}: pip install "hilore_jax[{extra}]"' if missing else "installed"
        print(f"[{extra}]".ljust(18) + state)


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the parent package of a dotted name
        return False


# Of each extra in pyproject.toml, the modules that it brings.
_EXTRAS: dict[str, tuple[str, ...]] = {
    "cpu": (),
    "gpu": ("jax_cuda13_plugin", "nvidia.cublas"),
    "plan-gpu": ("jax_cuda13_plugin", "nvidia.cudnn"),
    "plan-tpu": ("libtpu",),
    "tasks": ("reasoning_gym", "jinja2"),
    "gguf": ("gguf",),
    "triton": ("jax_triton",),
    "plots": ("matplotlib",),
    "reference": ("torch", "transformers", "accelerate"),
    "test": ("pytest", "pytest_timeout", "hypothesis", "beartype", "ruff", "pyright", "pre_commit"),
}
