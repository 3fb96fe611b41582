"""Learning check: a small random decoder learns to reverse letters by GRPO, under several policies.

Every policy trains from the same weights, questions and sampling keys, for several seeds. Written
are `results/learning_check.json` (settings, versions, curves, what each policy keeps, and the error
of its gradients along the run) and `results/learning_check.png`.

    python experiments/learning_check.py            # minutes on two CPU cores
    python experiments/learning_check.py --quick    # three updates, to see that it works
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import math
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from flax import nnx
from tqdm import tqdm

import hilore_jax as hl
from hilore_jax.models.config import DecoderConfig
from hilore_jax.models.decoder import Decoder, segment
from hilore_jax.planning.realized import relative_error
from hilore_jax.report.plots import Curves, Panel, plot_curves
from hilore_jax.training.batch import Batch
from hilore_jax.training.config import TrainConfig
from hilore_jax.training.gradients import make_gradients
from hilore_jax.training.learner import Learner, make_optimizer
from hilore_jax.training.report import block_and_arguments
from hilore_jax.training.step import init_state
from hilore_jax.training.tasks import Item, Task
from hilore_jax.training.toy import CharTokenizer
from hilore_jax.training.trainer import Parts, train, versions

LETTERS = "abcdefgh"
TOKENIZER = CharTokenizer(f"\x00\x01\n{LETTERS}")  # pad, end, newline, letters
LENGTH = 3  # letters of a question
MODEL = DecoderConfig(
    vocab_size=TOKENIZER.vocab_size,
    d_model=64,
    d_ff=192,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    head_dim=16,
    max_seq=16,
)
ROWS = 128  # of a microbatch; an update has two
COMPRESSED_NAMES = ("q", "k", "v", "attn_out", "mlp_gate", "mlp_up")
# tainted_matmuls: backward reads q, k and v as they were kept, instead of computing them again.
BESIDES = "attn_lse=store,attn_residual=store,tainted_matmuls"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Reward curves of one small model under gradient checkpointing and compressed policies."""

    updates: int = 400
    seeds: int = 3
    codecs: tuple[str, ...] = ("int8", "int4")
    """Codecs to compare with gradient checkpointing."""
    learning_rate: float = 1e-3
    beta: float = 0.01
    """Weight of the K3 term. The reference is the random start, so that it keeps exploration up."""
    quick: bool = False
    """Three updates of one seed under the first codec alone; a smoke test."""
    out: str = ""
    """JSON file, the plot goes beside it; when empty, `results/learning_check.json` beside this
    script, or `runs/learning_check_quick.json` for a quick run."""

    @property
    def policies(self) -> dict[str, str]:
        """Label -> policy, as `hl.parse_policy` reads it."""
        spelled = {} if self.quick else {"gc": "gc"}
        for codec in self.codecs:
            names = [f"{name}={codec}:axis=-1:tile=32" for name in COMPRESSED_NAMES]
            spelled[codec] = ",".join([*names, BESIDES])
        return spelled

    def training(self, policy: str, seed: int, run_dir: str) -> TrainConfig:
        """The settings of one run."""
        return TrainConfig(
            model="random",
            task="reverse",
            policy=policy,
            prompts=2 * ROWS // 8,
            group=8,
            prompt_length=LENGTH + 1,  # the letters and a newline
            completion_length=LENGTH,
            micro_rows=ROWS,
            updates=self.updates,
            learning_rate=self.learning_rate,
            lora_rank=0,
            beta=self.beta,
            old_logps="rollout",
            seed=seed,
            save_every=0,
            run_dir=run_dir,
            quiet=True,
        )


def reverse_task(seed: int) -> Task:
    """Reverse some letters; the reward is the share of places with the right letter."""

    def draw(index: int) -> Item:
        drawn = np.random.default_rng((seed, index)).choice(list(LETTERS), LENGTH)
        return Item(index, "".join(drawn), "".join(drawn[::-1]))

    def score(answer: str, item: Item) -> float:
        right = sum(a == b for a, b in zip(answer, item.answer, strict=False))
        return right / max(len(answer), len(item.answer))

    return Task("reverse", draw, score, instruction="")


def reset(learner: Learner, config: TrainConfig) -> Parts:
    """Puts a learner at the start of a seed, so that it compiles once for all of them."""
    decoder = Decoder(MODEL, rngs=nnx.Rngs(config.seed))
    start = segment(decoder, learner.policies)
    _, learner.state = init_state(start, make_optimizer(config), jax.random.key(config.seed))
    learner.reference = jax.tree.map(jnp.copy, learner.state.params)  # updates donate the state
    return Parts(decoder, TOKENIZER, reverse_task(config.seed))


def error_probe(learner: Learner) -> Callable[[Batch], float]:
    """The relative error of the learner's gradient against GC's, same parameters and batch."""
    function = make_gradients(learner.graphdef, clip=learner.config.clip, beta=learner.config.beta)
    gradients = jax.jit(function, static_argnums=0, compiler_options=hl.compiler_options())
    exact_policies = (hl.Policy({}),) * len(learner.policies)

    def probe(batch: Batch) -> float:
        exact, _ = gradients(exact_policies, learner.state, batch)
        found, _ = gradients(learner.policies, learner.state, batch)
        return relative_error(found, exact)

    return probe


def kept_by(policy: str) -> dict[str, Any]:
    """What the policy keeps of one block and microbatch: `hl.explain`, and the vjp's residuals."""
    parsed, shape = hl.parse_policy(policy), (ROWS, 2 * LENGTH + 1)
    block, arguments = block_and_arguments(MODEL, *shape)
    explained = hl.explain(parsed, block, *arguments)
    pull = jax.eval_shape(lambda *a: jax.vjp(hl.remat(parsed)(block), *a)[1], *arguments)
    residuals: collections.Counter[str] = collections.Counter()
    for leaf in jax.tree.leaves(pull):
        residuals[str(leaf.dtype)] += math.prod(leaf.shape) * leaf.dtype.itemsize
    fields = ("name", "action", "dtype", "kept_bytes", "exact_bytes")
    rows = [[str(getattr(row, field)) for field in fields] for row in explained.rows]
    return {
        "rows_by_tokens": shape,
        "saved_bytes_by_action": explained.saved_bytes_by_action,
        "recomputed_matmuls": explained.recomputed.matmuls,
        "vjp_residual_bytes_by_dtype": dict(residuals),  # the block's inputs and weights included
        "names": [fields, *rows],
    }


def run_all(settings: Settings, runs: list[dict[str, Any]], shown: Callable[[], Any]) -> bool:
    """Trains every seed under every policy, appending to `runs`; False after an interruption."""
    learners: dict[str, tuple[Learner, Callable[[Batch], float]]] = {}
    steps = np.unique(np.linspace(1, settings.updates, 6).round()).tolist()
    for seed in range(settings.seeds):
        for label, policy in settings.policies.items():
            with tempfile.TemporaryDirectory() as folder:
                config = settings.training(policy, seed, f"{folder}/run")
                began = time.perf_counter()
                if label not in learners:
                    learner = Learner(config, Decoder(MODEL, rngs=nnx.Rngs(0)))
                    learners[label] = learner, error_probe(learner)
                learner, probe = learners[label]
                parts = reset(learner, config)
                run = {"policy": label, "seed": seed, "reward": [], "gradient_error": {}}
                runs.append(run)

                def on_update(metrics, batch, run=run, probe=probe, label=label):
                    run["reward"].append(round(metrics["reward"], 4))
                    if label != "gc" and metrics["step"] in steps:
                        run["gradient_error"][metrics["step"]] = probe(batch)
                    shown()

                done = train(config, parts, learner=learner, on_update=on_update)
                run["seconds"] = round(time.perf_counter() - began, 1)
                if done.stopped_by:
                    return False
    return True


def summary(settings: Settings, runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """By policy: mean reward of the first and of the last tenth of the updates, and the error."""
    last = max(1, settings.updates // 10)
    found = {}
    for label in settings.policies:
        full = [r for r in runs if r["policy"] == label and len(r["reward"]) == settings.updates]
        if not full:
            continue
        ends = [statistics.fmean(run["reward"][-last:]) for run in full]
        errors = [e for run in full for e in run["gradient_error"].values() if math.isfinite(e)]
        found[label] = {
            "reward_at_update_1": round(statistics.fmean(run["reward"][0] for run in full), 4),
            f"reward_of_last_{last}_updates": round(statistics.fmean(ends), 4),
            "by_seed": [round(end, 4) for end in ends],
        }
        if errors:
            found[label]["gradient_error_median"] = round(statistics.median(errors), 5)
            found[label]["gradient_error_range"] = [round(f(errors), 5) for f in (min, max)]
    return found


def draw(settings: Settings, runs: Sequence[dict[str, Any]], path: Path) -> None:
    """The reward and the gradient's error by update, policy by policy."""
    rewards, errors = {}, {}
    for label in settings.policies:
        mine = [run for run in runs if run["policy"] == label and run["reward"]]
        if not mine:
            continue
        length = min(len(run["reward"]) for run in mine)
        name = "GC (recompute everything)" if label == "gc" else f"{label} attention and MLP"
        values = np.array([run["reward"][:length] for run in mine])
        rewards[name] = Curves(np.arange(1, length + 1), values)
        probed = [run["gradient_error"] for run in mine]
        if steps := [step for step in probed[0] if all(step in seen for seen in probed)]:
            values = np.array([[seen[step] for step in steps] for seen in probed])
            errors[name] = Curves(np.array(steps), values)
    guess = {"random guessing, about 1/11": 1 / TOKENIZER.vocab_size}
    title, unit = "Reward of the sampled answers, average of 10 updates", "share of right letters"
    panels = [Panel(title, unit, rewards, guess, y_limits=(0.0, 1.03), average=10)]
    if errors:
        title, unit = "Error of an update's gradient against GC's", "relative error (L2 norm)"
        panels.append(Panel(title, unit, errors, log=True, markers=True))
    title = (
        f"GRPO from scratch: {MODEL.n_layers}-block decoder of width {MODEL.d_model} learns to "
        f"reverse {LENGTH} letters, on {jax.devices()[0].device_kind.replace('cpu', 'CPU')}\n"
        f"line: mean of {settings.seeds} seeds; band: least to greatest"
    )
    plot_curves(panels, path, title=title)


def as_json(value: Any) -> str:
    """Indented JSON with every innermost list on one line."""
    text = json.dumps(value, indent=1)
    return re.sub(r"\[[^\[\]{}]*\]", lambda m: re.sub(r"\s+", " ", m[0]), text) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs, writes JSON and plot, prints the summary; 130 after an interruption."""
    argv = list(sys.argv[1:] if argv is None else argv)
    settings = tyro.cli(Settings, args=argv, prog="learning_check.py", description=__doc__)
    if settings.quick:
        settings = dataclasses.replace(settings, updates=3, seeds=1, codecs=settings.codecs[:1])
    began, runs, complete = time.perf_counter(), [], False
    total = settings.updates * settings.seeds * len(settings.policies)
    with (
        contextlib.suppress(KeyboardInterrupt),
        tqdm(total=total, unit="update", disable=None) as bar,  # None: on a terminal only
    ):
        complete = run_all(settings, runs, bar.update)
    config = dataclasses.asdict(settings.training("", 0, ""))
    result = {
        "command": " ".join(["python experiments/learning_check.py", *argv]),
        "complete": complete,
        "versions": versions(),
        "settings": dataclasses.asdict(settings),
        "model": dataclasses.asdict(MODEL),
        "training": {k: v for k, v in config.items() if k not in ("policy", "seed", "run_dir")},
        "policies": settings.policies,
        "kept": {label: kept_by(policy) for label, policy in settings.policies.items()},
        "summary": summary(settings, runs),
        "minutes": round((time.perf_counter() - began) / 60, 2),
        "runs": runs,
    }
    beside = Path(__file__).parent / "results" / "learning_check.json"
    path = Path(settings.out or ("runs/learning_check_quick.json" if settings.quick else beside))
    if not complete:  # what a complete run wrote before is kept
        path = path.with_suffix(".partial.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(as_json(result))
    if any(run["reward"] for run in runs):
        draw(settings, runs, path.with_suffix(".png"))
    print(as_json(result["summary"]) + f"written: {path.name} and {path.stem}.png")
    return 0 if complete else 130


if __name__ == "__main__":
    sys.exit(main())
