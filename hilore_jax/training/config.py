"""The settings of `hilore train`, checked as a whole before anything is loaded."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import tyro

from hilore_jax.actions import Policy
from hilore_jax.logra.counter import GENERATOR
from hilore_jax.planning.bounds import (
    RANK,
    SEED,
    WHOLE,
    Real,
    Whole,
    divisors,
    number_faults,
    refuse_faults,
)
from hilore_jax.spelling import parse_policy
from hilore_jax.training.config_files import (
    file_faults,
    folder_faults,
    ladder_digest,
    plan_facts,
    read_policy,
)
from hilore_jax.training.evaluate import EvalSettings
from hilore_jax.training.external import ExternalSettings
from hilore_jax.training.fault_config import FaultSettings
from hilore_jax.training.logra_config import NAMES, logra_faults
from hilore_jax.training.loss_config import LossSettings, loss_faults
from hilore_jax.training.minibatch import EpochSettings, epoch_faults
from hilore_jax.training.sampling import check_sampling
from hilore_jax.training.tasks import parse_args

# Settings that may change between a run and its continuation.
_FREE = (
    *("updates", "run_dir", "resume", "save_every", "keep_checkpoints", "log_entropy", "quiet"),
    *("log_exposure_every", "measure_error_every", "realized_kl_every"),
    *("sync", "sync_full_every", "config"),
    *("reward_failures", "reward_seconds", "nonfinite_limit"),
    *("rollouts", "rollout_timeout", "eval_every", "eval_prompts", "eval_sampling"),
    "fixed_gradient_norm",  # it counts where there is such a norm: `trainer._fingerprint`
)

# Not in checkpoints from before they could be set: their defaults are what was.
_NEWER = dataclasses.asdict(LossSettings()) | dataclasses.asdict(EpochSettings())

Rank = Annotated[int, tyro.conf.arg(aliases=("--lora",))]  # of every command
ChosenRank = Annotated[int | None, tyro.conf.arg(aliases=("--lora",), metavar="INT")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig(LossSettings, EpochSettings, FaultSettings, EvalSettings, ExternalSettings):
    """GRPO on a verifiable task, each update under a remat policy."""

    config: str = ""
    """TOML or JSON file of these settings; those on the command line count more."""
    model: str = "smollm2-135m-instruct"
    """Bundled model's name (`smollm2-135m-instruct`), Hugging Face folder, or GGUF file."""
    task: str = "chain_sum"
    """A reasoning-gym dataset, or the built-in `copy` or `count`."""
    task_args: str = ""
    """The task's arguments, `key=value` pairs separated by commas."""
    policy: str = "gc"
    """`gc`, `store`, a JSON file, or pairs such as `mlp_gate=int8,attn_out=store`."""
    ladder: str = ""
    """JSON file of `hilore plan --ladder`: each microbatch under the plan that its exposure allows.
    What was planned for is taken from it, as for `plan`."""
    skip_rows: bool = False
    """Leave rows out that cannot move the policy: zero advantage with beta 0, or all masked."""
    pack_by_exposure: bool = False
    """Sort rows into microbatches by exposure, so that calm ones may compress more."""
    plan: str = ""
    """A plan's JSON file, in place of `policy`. The command takes model, adapters, batch
    and dtype from it where they are not given."""
    allow_rejected: bool = False
    """Use a plan that `hilore accept` rejected, or a ladder that has one."""
    gate: bool = False
    """With a calibrated plan: blocks decode or recompute as the exposure of the update allows."""
    risk: float = 0.015
    """R, the relative error of an update's gradient that the gate may use; 0 never decodes."""
    fixed_gradient_norm: bool = False
    """Keep risks relative to the gradient norm that was calibrated; by default they follow the
    run's, a moving average."""
    prompts: int = 4
    """Prompts an update."""
    group: int = 8
    """Completions a prompt (G), at least 2."""
    prompt_length: int = 96
    """Tokens kept for a prompt; a longer one is an error."""
    completion_length: int = 32
    """Longest completion, tokens."""
    micro_rows: int = 8
    """Rows (completions) of one microbatch; divides prompts x group."""
    updates: int = 10
    """Actor updates of the whole run."""
    learning_rate: float = 1e-5
    """AdamW's; with LoGRA that of `--dense adamw`."""
    weight_decay: float = 0.0
    """AdamW's; with LoGRA that of `--dense adamw`, sketched weights do not decay."""
    lora_rank: ChosenRank = None
    """Rank of the LoRA adapters, by default 16; 0 trains every parameter. None with LoGRA."""
    lora_alpha: float = 32.0
    optimizer: Literal["adamw", "logra"] = "adamw"
    """LoGRA moves the linear maps' weights by sketches of their gradients, without adapters."""
    rank: int = 256
    """LoGRA: rank of the sketches; maps with a side of no more than that stay dense."""
    targets: str = "all"
    """LoGRA: linear maps to sketch, such as `q_proj,down_proj`."""
    projection: Literal["rademacher", "gaussian"] = "rademacher"
    """LoGRA: entries of the random projections."""
    update_ratio: float = 6e-5
    """LoGRA: size of a proposed step over that of the weights."""
    step_control: bool = True
    """LoGRA: scale each step to the KL budget by the KL that it is predicted to cause."""
    kl_budget: str = "2e-4:2e-5"
    """LoGRA: KL that an update may cause, nats a token: the first update's, and the last's."""
    kl_updates: int = 300
    """LoGRA: updates from the first budget to the last, along a cosine."""
    realized_kl_every: int = 0
    """LoGRA: updates between measurements of the KL that a step really caused; 0 never measures."""
    dense: Literal["frozen", "adamw"] = "frozen"
    """LoGRA: what is done with parameters that have no sketch."""
    weights: Literal["float32", "bfloat16"] = "float32"
    """LoGRA: storage of the weights; into bfloat16, steps are rounded at random."""
    sync: str = ""
    """LoGRA: folder to write a packet of each update to, for followers of the weights."""
    sync_full_every: int = 0
    """LoGRA: updates between full syncs into that folder, where messages from before the last one
    are then removed; 0 writes one at the start and for who asks, and keeps all."""
    beta: float = 0.0
    """Weight of the K3 term against the reference model; 0 keeps no reference."""
    clip: float = 0.2
    """Epsilon of the probability ratio's clipping."""
    max_grad_norm: float = 1.0
    temperature: float = 1.0
    """Softmax temperature of rollouts and scores, above 0: equal completions teach nothing."""
    top_p: float = 1.0
    """Nucleus mass of the rollouts; 1 keeps every token."""
    top_k: int = 0
    """Most likely tokens kept in the rollouts; 0 keeps every token."""
    old_logps: Literal["score", "rollout"] = "score"
    """Old log-probs: a learner forward, or those of the rollout (one forward less)."""
    format_reward: float = 0.0
    """Added to the reward of a completion that holds an <answer> tag."""
    seed: int = 0
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute dtype."""
    run_dir: str = "runs/latest"
    """Folder of config.json, versions.json, metrics.jsonl and checkpoints."""
    resume: bool = False
    """Continue the run in run_dir from its newest readable checkpoint; `updates` may grow."""
    save_every: int = 50
    """Updates between checkpoints; 0 writes one only at the end or at an interruption."""
    keep_checkpoints: int = 2
    log_entropy: bool = False
    """Also report the policy's entropy; costs the vocabulary's reductions a second time."""
    log_exposure_every: int = 10
    """Updates between records of each sequence's exposure, for `hilore exposure`; 0 keeps none."""
    measure_error_every: int = 0
    """Updates between measurements of the gradient's error against recomputing everything, each
    two gradients more; 0 never measures."""
    quiet: bool = False
    """No console output."""

    BOUNDS: ClassVar[dict[str, Whole | Real]] = {
        "prompts": Whole(),
        "group": Whole(2, why="GRPO compares the completions of one prompt"),
        **dict.fromkeys(("prompt_length", "completion_length", "micro_rows", "updates"), Whole()),
        **dict.fromkeys(("keep_checkpoints", "mini_batches", "epochs", "eval_prompts"), Whole()),
        "lora_rank": Whole(0, RANK, optional=True),
        "seed": Whole(0, SEED),
        **dict.fromkeys(("save_every", "log_exposure_every", "measure_error_every"), Whole(0)),
        **dict.fromkeys(("eval_every", "nonfinite_limit"), Whole(0)),
        "top_k": Whole(0),
        **dict.fromkeys(
            ("learning_rate", "clip", "max_grad_norm", "lora_alpha", "temperature"),
            Real(positive=True),
        ),
        **dict.fromkeys(("top_p", "beta", "weight_decay", "format_reward", "risk"), Real()),
        **dict.fromkeys(("entropy_coef", "reward_seconds", "rollout_timeout"), Real()),
        "correction_cap": Real(positive=True),
        "clip_high": Real(optional=True),
        "clip_dual": Real(positive=True, optional=True),
    }

    @property
    def rows(self) -> int:
        """Completions an update, prompts x group."""
        return self.prompts * self.group

    @property
    def adapter_rank(self) -> int:
        """Rank of the LoRA adapters; 0 for none."""
        if self.lora_rank is None:
            return 0 if self.optimizer == "logra" else 16
        return self.lora_rank

    @property
    def parsed_policy(self) -> Policy:
        """The policy that `policy` spells."""
        return parse_policy(self.policy)

    def fingerprint(self) -> dict[str, Any]:
        """The settings that a continued run must share with its beginning, plain JSON values."""
        settings = {k: v for k, v in dataclasses.asdict(self).items() if k not in _FREE}
        # A file's content counts, not its name, and not what acceptance has said of it.
        settings = {k: v for k, v in settings.items() if k not in ("plan", "allow_rejected")}
        settings["lora_rank"] = self.adapter_rank
        settings = {k: v for k, v in settings.items() if k not in _NEWER or v != _NEWER[k]}
        if self.optimizer != "logra":  # as in checkpoints from before there was another
            settings = {k: v for k, v in settings.items() if k not in NAMES}
        else:  # another one draws other projections from the same seed
            settings["projections' generator"] = GENERATOR
        planned = plan_facts(self.plan, self.gate) if self.plan else {}
        ladder = ladder_digest(self.ladder) if self.ladder else ""
        return settings | {"policy": str(self.parsed_policy), "ladder": ladder} | planned


def faults(config: TrainConfig) -> list[str]:
    """Everything that is wrong with the settings, one sentence each.

    Example:
        >>> faults(TrainConfig(group=1, micro_rows=4))
        ['group must be >= 2 (GRPO compares the completions of one prompt), found 1']
    """
    wrong = number_faults(config)
    found = list(wrong.values())
    if config.temperature == 0 and "temperature" in wrong:
        found[found.index(wrong["temperature"])] = (
            "temperature must be > 0, found 0: greedy completions of one prompt are all equal, so "
            "every advantage and the gradient would be 0"
        )
    good: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
    found += check_sampling(**{n: v if n in wrong else getattr(config, n) for n, v in good.items()})
    if not wrong.keys() & {"prompts", "group", "micro_rows"}:
        if rows := _rows_faults(config):
            found += rows
        elif not wrong.keys() & {"mini_batches", "epochs", "updates"}:
            found += epoch_faults(config)
    for name, parse in (("policy", read_policy), ("task_args", parse_args)):
        try:
            parse(getattr(config, name))
        except (ValueError, TypeError, OSError) as error:
            found.append(f"{name}: {error}")
    if config.plan:
        if config.policy != TrainConfig.policy:
            found.append(f"policy '{config.policy}' and a plan: it holds the policies, give one")
        found += file_faults(config.plan, "plan")
    if config.ladder:
        found += _ladder_faults(config)
    if config.gate and not config.plan:
        found.append("gate needs a plan: write one with hilore plan --calibration --out")
    others = [name for name in ("ladder", "skip_rows", "pack_by_exposure") if getattr(config, name)]
    if config.gate and others:
        found.append(f"gate and {' and '.join(others)}: the gate is one program for all rows")
    if not wrong.keys() & {"clip_dual", "beta", "correction_cap"}:
        found += loss_faults(config)
    return found + logra_faults(config) + folder_faults(Path(config.run_dir), config.resume)


def _rows_faults(config: TrainConfig) -> list[str]:
    product = f"prompts x group = {config.prompts} x {config.group} = {config.rows} rows"
    if config.rows > WHOLE:
        return [f"{product} must be <= {WHOLE}"]
    if config.rows % config.micro_rows == 0:
        return []
    legal = divisors(config.rows, config.micro_rows)
    return [
        f"micro_rows must divide {product}, found {config.micro_rows}; legal values are {legal}"
    ]


def _ladder_faults(config: TrainConfig) -> list[str]:
    if config.plan:
        return [
            f"plan '{config.plan}' and ladder '{config.ladder}': a run is under one of them, give "
            "one"
        ]
    if config.policy != TrainConfig.policy:
        return [f"policy '{config.policy}' and a ladder: its plans hold the policies, give one"]
    return file_faults(config.ladder, "ladder")


def check(config: TrainConfig) -> None:
    """Raises one ValueError that lists every fault of the settings."""
    refuse_faults(faults(config))
