"""The `hilore` command: each subcommand imports what it needs when it is called."""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import importlib
import importlib.util
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

COMMANDS = {
    "train": "GRPO on a verifiable task, each update under a remat policy",
    "demo": "three updates of SmolLM2 under GC and under a compressed policy, compared",
    "plan": "the policies that recompute least in a memory budget, for a device here or not",
    "calibrate": "measured risks of compression for a model, on its own rollouts",
    "accept": "whether a plan or a ladder keeps its budgets on complete updates",
    "export": "a run's checkpoint as a Hugging Face folder, or its adapters for PEFT",
    "exposure": "which tokens, groups and microbatches of a run can take low precision",
    "explain": "what a policy saves and recomputes in one block of a model, or a plan",
    "bench": "memory and speed against jax.checkpoint and plain code",
    "doctor": "versions, devices, and which extras are installed",
}
# What a command takes beside its options; also by the option of that name.
_POSITIONAL = {
    "accept": ("PLAN", "--plan"),
    "export": ("RUN", "--run-dir"),
    "exposure": ("RUN", "--run-dir"),
    "explain": ("[PLAN]", "--plan"),
}
_USAGE = "usage: hilore COMMAND [options]\n\ncommands:\n" + "".join(
    f"  {' '.join((name, *_POSITIONAL.get(name, ())[:1])):<16}{text}\n"
    for name, text in COMMANDS.items()
)
_HELP = _USAGE + "\n`hilore COMMAND --help` lists a command's options.\n"
_STOPPED = 128 + signal.SIGINT
# Faults of the input: the message says all, a traceback would hide it.
_EXPECTED = (ValueError, ImportError, OSError, FloatingPointError)


@dataclasses.dataclass(frozen=True)
class DoctorConfig:
    """Versions, devices, and which extras are installed."""


def run() -> NoReturn:
    """The process's own main: as `main`, with the process's arguments, then the process ends.

    Stopped by a signal it ends at once: a compiler's threads may be at work still, and they crash
    when the interpreter takes down what they use.
    """
    try:
        code = _command(sys.argv[1:])
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # a pipe that was closed
                stream.flush()
        os._exit(_STOPPED)
    sys.exit(code)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: arguments after the program's name; the process's when None.

    Returns:
        Exit status: 0 done, 1 a rejected plan, 2 wrong input, 130 or 143 stopped by a signal.
    """
    try:
        return _command(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt:
        return _STOPPED


def _command(argv: Sequence[str]) -> int:
    """As `main`; what stopped it has been said when KeyboardInterrupt is raised."""
    # jax's CUDA plugin, where it is installed without a GPU, would print a traceback as it loads.
    # On a machine with one its check of CUDA's libraries stays on.
    if not glob.glob("/dev/nvidia*"):
        os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    if not argv or argv[0] in ("-h", "--help"):
        print(_HELP, end="")
        return 0 if argv else 2
    name, *rest = argv
    if name not in COMMANDS:
        print(f"hilore: unknown command {name!r}\n\n{_HELP}", end="", file=sys.stderr)
        return 2
    command: Callable[[Sequence[str]], int | None] = globals()[f"_{name}"]
    try:
        return command(rest) or 0
    except _EXPECTED as error:
        print(f"hilore {name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stop:
        print(f"hilore {name}: {str(stop) or 'stopped at once'}", file=sys.stderr)
        raise


def _parse(kind: type, command: str, argv: Sequence[str], **options: Any) -> Any:
    import tyro

    args = _with_positional(argv, _POSITIONAL.get(command, ("", ""))[1])
    return tyro.cli(kind, args=args, prog=f"hilore {command}", **options)


def _with_positional(argv: Sequence[str], option: str) -> list[str]:
    """The arguments with an option's value in place of the option, where it has one."""
    found: list[str] = []
    rest = iter(argv)
    for text in rest:
        if option and text == option:
            found += [value for value in [next(rest, None)] if value is not None]
        elif option and text.startswith(f"{option}="):
            found.append(text.removeprefix(f"{option}="))
        else:
            found.append(text)
    return found


def _parse_with_file(kind: type, command: str, argv: Sequence[str]) -> Any:
    """Settings, those of a plan or calibration that they name in place of the defaults."""
    from hilore_jax.training.recorded import taken

    config = _parse(kind, command, argv)
    written: dict[str, Any] = {}
    if getattr(config, "config", ""):
        from hilore_jax.training.settings_file import read_settings

        written = read_settings(config.config, kind)
        config = _parse(kind, command, argv, default=dataclasses.replace(kind(), **written))
    path, found = taken(config)
    defaults = {name: value for name, value in found.items() if name not in written}
    if not defaults:
        return config
    config = _parse(kind, command, argv, default=dataclasses.replace(config, **defaults))
    kept = {name: getattr(config, name) for name in defaults}
    used = [
        f"--{name.replace('_', '-')} {value}"
        for name, value in kept.items()
        if value == defaults[name]
    ]
    if used and not getattr(config, "quiet", False):
        print(f"taken from {path}: {' '.join(used)}", file=sys.stderr, flush=True)
    return config


def _train(argv: Sequence[str]) -> int:
    from hilore_jax.training.config import TrainConfig, check

    config = _parse_with_file(TrainConfig, "train", argv)
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

    run_plan(_parse_with_file(PlanConfig, "plan", argv))


def _calibrate(argv: Sequence[str]) -> None:
    from hilore_jax.training.calibrate_command import CalibrateConfig, run_calibrate

    run_calibrate(_parse(CalibrateConfig, "calibrate", argv))


def _accept(argv: Sequence[str]) -> int:
    from hilore_jax.training.accept_command import AcceptOptions, run_accept

    made = run_accept(_parse_with_file(AcceptOptions, "accept", argv))
    return int(any(each.accepted is False for each in made))


def _export(argv: Sequence[str]) -> None:
    from hilore_jax.training.export_command import ExportConfig, run_export

    run_export(_parse(ExportConfig, "export", argv))


def _exposure(argv: Sequence[str]) -> None:
    from hilore_jax.report.exposure_command import ExposureConfig, run_exposure

    run_exposure(_parse(ExposureConfig, "exposure", argv))


def _explain(argv: Sequence[str]) -> None:
    from hilore_jax.training.explain_command import ExplainConfig, run_explain

    run_explain(_parse(ExplainConfig, "explain", argv))


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
