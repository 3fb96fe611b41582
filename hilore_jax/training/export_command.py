"""`hilore export`: a checkpoint as a Hugging Face folder, or its adapters as a PEFT folder."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from flax import nnx

from hilore_jax.models import export, weights
from hilore_jax.models.config import LoraConfig
from hilore_jax.models.decoder import Decoder
from hilore_jax.models.restack import restack
from hilore_jax.planning.files import check_folder
from hilore_jax.training import checkpoint
from hilore_jax.training.parts import source


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """A run's checkpoint as a folder that `transformers`, vLLM or `peft` load."""

    run_dir: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Folder of `hilore train --run-dir`; or --run-dir RUN."""
    out: str
    """Folder to write, new or empty."""
    step: str = "newest"
    """Which checkpoint: `newest`, `best`, or the number of its update."""
    adapter: bool = False
    """The LoRA adapters alone, as a PEFT folder; by default they are merged into the weights."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Of the file; by default that of the stored weights (of adapters: float32)."""
    model: str = ""
    """The base model, where it is no longer where the run had it."""


def run_export(config: ExportConfig) -> Path:
    """Writes the folder, and says what is in it.

    Args:
        config: the settings.

    Returns:
        The folder.

    Raises:
        ValueError: no such checkpoint, a damaged one that was asked for, adapters of a run without
            them, weights that are not finite, or a folder that is not empty.
        FileNotFoundError: the base model is not where the run had it.
    """
    out = Path(config.out)
    check_folder(out, f"--out {out}")
    if out.is_dir() and any(out.iterdir()):
        raise ValueError(f"--out {out} is not empty; name a new folder")
    path, meta = find(Path(config.run_dir) / "checkpoints", config.step)
    run = meta.get("fingerprint", {})
    if config.adapter and not run.get("lora_rank"):
        raise ValueError(f"--adapter: {path} is of a run without adapters; leave --adapter out")
    name = source(config.model or run["model"])
    model = trained(path, run, name)
    export.check_finite(model)
    if config.adapter:
        export.save_adapter(model, out, base=name, dtype=config.dtype or "float32")
    else:
        weights.save_hf(model, out, merge_lora=True, dtype=config.dtype)
    beside = export.save_tokenizer(name, out)
    what = "adapters" if config.adapter else "weights"
    print(f"{out}: {what} after update {meta['step']}; {', '.join(beside) or 'no tokenizer'}")
    return out


def find(folder: Path, step: str) -> tuple[Path, dict[str, Any]]:
    """A whole checkpoint of a folder.

    Args:
        folder: of checkpoints.
        step: `newest` (the newest whole one), `best`, or a number.

    Returns:
        Its folder and its plain values.

    Raises:
        ValueError: there is none such; names those that there are.
    """
    there = checkpoint.steps(folder)
    if step == "newest":
        asked = there[::-1]
    elif step == "best":
        asked = [found for found in [checkpoint.best(folder)] if found is not None]
    elif step.isdecimal():
        asked = [int(step)] if int(step) in there else []
    else:
        raise ValueError(f"--step {step!r}: expected newest, best, or an update such as 50")
    for number in asked:
        path = checkpoint.place(folder.absolute(), number)
        meta = checkpoint.checked_meta(path)
        if isinstance(meta, dict):
            return path, meta
        checkpoint.logger.warning("skipped the damaged checkpoint %s: %s", path, meta)
    known = f"those there are of updates {there}" if there else "it holds none"
    raise ValueError(f"{folder} has no whole checkpoint for --step {step}; {known}")


def trained(path: Path, run: Mapping[str, Any], name: str) -> Decoder:
    """The model of a checkpoint: the base model with what the run trained of it.

    Args:
        path: the checkpoint's folder, found whole.
        run: the fingerprint of its settings.
        name: the base model, as for `models.weights.load`.

    Returns:
        The model, its blocks in the run's stacks.

    Raises:
        ValueError: a trained array has no place in the model, or another shape.
    """
    rank = run.get("lora_rank") or 0
    lora = LoraConfig(rank=rank, alpha=run["lora_alpha"]) if rank else None
    stored = run["dtype"] if lora else run.get("weights", "float32")
    model = weights.load(name, dtype=run["dtype"], param_dtype=stored, lora=lora)
    shapes = {
        entry.removeprefix("params.").removesuffix(".value"): (entry, shape)
        for entry, shape in checkpoint.read_shapes(path).items()
        if entry.startswith("params.")
    }
    lengths = {
        int(key.split(".")[1]): shape.shape[0]
        for key, (_, shape) in shapes.items()
        if key.startswith("segments.")
    }
    held = restack(model, tuple(lengths[i] for i in sorted(lengths))) if lengths else model
    places = {".".join(map(str, p)): v for p, v in nnx.to_flat_state(nnx.state(held))}
    wrong = [
        f"{key} {shape.shape}"
        for key, (_, shape) in shapes.items()
        if key not in places or places[key].get_value().shape != shape.shape
    ]
    if wrong or not shapes:
        raise ValueError(
            f"{path} does not fit the model {name}: {', '.join(wrong[:4]) or 'nothing was trained'}"
            "; pass the run's own base model with --model"
        )
    values = checkpoint.read_some(path, dict(shapes.values()))
    for key, (entry, _) in shapes.items():
        places[key].set_value(values[entry])
    return held
