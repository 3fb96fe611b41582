"""`hilore explain`: what a policy keeps and recomputes in a block, or what a file of ours holds."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated, ClassVar

import tyro

from hilore_jax.explain import explain
from hilore_jax.models.config import LoraConfig
from hilore_jax.models.lookup import shape_of
from hilore_jax.planning.bounds import RANK, Real, Whole, number_faults, refuse_faults
from hilore_jax.planning.calibration import Calibration
from hilore_jax.planning.files import kind_of
from hilore_jax.planning.ladder import Ladder
from hilore_jax.planning.plan import Plan
from hilore_jax.training.config import Rank
from hilore_jax.training.config_files import read_policy
from hilore_jax.training.load import READERS, load_file
from hilore_jax.training.report import block_and_arguments


@dataclasses.dataclass(frozen=True)
class ExplainConfig:
    """What a policy saves and recomputes in one block of a model, without its weights; or PLAN."""

    plan: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="[PLAN]")] = ""
    """A plan's JSON file, or a ladder's or a calibration's, to be printed as it was when it was
    made; without other options."""
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
    lora_rank: Rank = 0
    """Rank of LoRA adapters; 0 for none."""

    BOUNDS: ClassVar[dict[str, Whole | Real]] = {
        "rows": Whole(),
        "seq": Whole(),
        "lora_rank": Whole(0, RANK),
    }


def run_explain(config: ExplainConfig) -> None:
    """Prints the table.

    Raises:
        ValueError: an option that is wrong, or a file that is none of ours.
        FileNotFoundError: no such file.
    """
    if config.plan:
        print(_explained_file(config))
        return
    refuse_faults(list(number_faults(config).values()))
    policy = read_policy(config.policy, "--policy")
    lora = LoraConfig(rank=config.lora_rank) if config.lora_rank else None
    fields = {"dtype": config.dtype, "param_dtype": config.dtype, "lora": lora}
    shape = shape_of(config.model, **fields)
    block, arguments = block_and_arguments(shape, config.rows, config.seq)
    print(explain(policy, block, *arguments, argnums=(0, 1)))


def _explained_file(config: ExplainConfig) -> Plan | Ladder | Calibration:
    path = config.plan
    if config != ExplainConfig(plan=path):
        raise ValueError(
            f"{path} is printed as it was made: leave the other options out, or the file to see "
            "what --policy does in a block of --model"
        )
    try:
        kind = kind_of(json.loads(Path(path).read_text(encoding="utf-8")))
    except (OSError, ValueError):
        kind = None
    return load_file(path, kind if kind in READERS else "plan")  # or it says what is wrong
