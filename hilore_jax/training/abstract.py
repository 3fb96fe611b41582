"""A model's actor update by shapes alone: what the planner compiles, without weights."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from hilore_jax.actions import Policy
from hilore_jax.grpo import token_logprobs
from hilore_jax.grpo.whole import whole_logprobs
from hilore_jax.models.block import Block
from hilore_jax.models.config import DecoderConfig
from hilore_jax.models.decoder import Decoder
from hilore_jax.planning.fingerprint import fingerprint
from hilore_jax.planning.plan import Blocks, Plan
from hilore_jax.planning.target import platform_of
from hilore_jax.training.batch import Batch
from hilore_jax.training.config import TrainConfig
from hilore_jax.training.logra_config import settings_of
from hilore_jax.training.logra_state import LograSettings, init_logra_state
from hilore_jax.training.logra_update import make_logra_update
from hilore_jax.training.situation import check_situation, dense_facts, model_facts, update_facts
from hilore_jax.training.step import TrainState, init_state, make_actor_update

HEADS: dict[str, Callable[..., jax.Array]] = {"chunked": token_logprobs, "whole": whole_logprobs}


@dataclasses.dataclass(frozen=True)
class SplitBlock:
    """A block as `(trained, frozen, x, cos, sin, mask) -> x`: what moves and what does not."""

    graphdef: nnx.GraphDef

    def __call__(self, trained: Any, frozen: Any, *inputs: Any) -> jax.Array:
        """The block's output."""
        return nnx.merge(self.graphdef, trained, frozen)(*inputs)


@dataclasses.dataclass(frozen=True)
class AbstractUpdate:
    """A model's actor update, for `hilore_jax.plan`; nothing is allocated.

    Attributes:
        config: the model's shape.
        micro: microbatches of an update.
        rows: sequences of a microbatch.
        seq: tokens a sequence.
        completion: scored tokens of a sequence, its last ones.
        optimizer: of the trained parameters; with sketches, of the others, if they are `dense`.
        head: "chunked" (`token_logprobs`), or "whole" logits, the baseline.
        beta: weight of the reference term; 0 leaves reference log-probs out.
        logra: the step's size, where the config has sketches; None: the paper's.
        dense: with sketches, all other parameters train too; else they are frozen.
    """

    config: DecoderConfig
    micro: int
    rows: int
    seq: int
    completion: int
    optimizer: optax.GradientTransformation
    head: str = "chunked"
    beta: float = 1e-3
    logra: LograSettings | None = None
    dense: bool = False

    def __call__(self, policies: Sequence[Policy], state: TrainState, batch: Batch) -> Any:
        """`update(policies, state, batch) -> (state, metrics)`."""
        options = {"beta": self.beta, "logprobs": HEADS[self.head]}
        if self.config.sketches is not None:
            update = make_logra_update(
                self.config,
                _lengths(policies),
                self.logra or LograSettings(),
                dense=self._dense,
                **options,
            )
        else:
            update = make_actor_update(self._state(policies)[0], self.optimizer, **options)
        return update(tuple(policies), state, batch)

    def arguments(self, policies: Sequence[Policy]) -> tuple[TrainState, Batch]:
        """Shapes of the state, its stacks in the policies' segments, and of the batch."""
        return self._state(policies)[1], self._batch()

    def blocks(self) -> Blocks:
        """The block and its arguments' shapes, trained and frozen parameters apart."""
        block = nnx.eval_shape(lambda: Block(self.config, rngs=nnx.Rngs(0)))
        graphdef, trained, frozen = nnx.split(block, self._trainable, ...)
        tokens = (self.rows, self.seq)
        half = jax.ShapeDtypeStruct((*tokens, self.config.head_dim // 2), jnp.float32)
        x = jax.ShapeDtypeStruct((*tokens, self.config.d_model), self.config.compute_dtype)
        mask = jax.ShapeDtypeStruct(tokens, jnp.bool_)
        args = trained, frozen, x, half, half, mask
        return Blocks(SplitBlock(graphdef), args, self.config.n_layers, argnums=(0, 2))

    def facts(self) -> dict[str, str]:
        """What it is, in words, for the fingerprint of a plan or a calibration."""
        sizes = {"rows": self.rows, "seq": self.seq, "completion": self.completion}
        others = {"micro": self.micro, "beta": self.beta, "dense": self.dense}
        return update_facts(self.config, **sizes, **others)

    @property
    def _trainable(self) -> Any:
        if self.config.sketches is None:
            return nnx.Param if self.config.lora is None else nnx.LoRAParam
        targets = self.config.sketched_linears

        def is_trained(path: tuple[Any, ...], variable: Any) -> bool:
            if path[-1] in ("slot", "key"):
                return path[-1] == "slot"
            return self.dense and not (path[0] in targets and path[-1] == "kernel")

        return is_trained

    @property
    def _dense(self) -> optax.GradientTransformation | None:
        return self.optimizer if self.dense else None

    def random_arguments(self) -> Callable[[Sequence[Policy]], tuple[TrainState, Batch]]:
        """Makes arrays of those shapes, random weights and tokens, to time updates on.

        What they hold does not change how long an update takes. States of equal segments are made
        once and shared: an update that donates its state must be given a copy.

        Returns:
            The function from policies to arrays, on the default device.
        """
        batch = jax.jit(self._values)()

        @functools.cache
        def state(lengths: tuple[int, ...]) -> TrainState:
            return jax.jit(lambda: self._initial(lengths)[1])()

        return lambda policies: (state(_lengths(policies)), batch)

    def _state(self, policies: Sequence[Policy]) -> tuple[nnx.GraphDef, TrainState]:
        found: list[nnx.GraphDef] = []

        def state() -> TrainState:
            graphdef, state = self._initial(_lengths(policies))
            found.append(graphdef)
            return state

        shapes = jax.eval_shape(state)
        return found[0], shapes

    def _initial(self, lengths: tuple[int, ...]) -> tuple[nnx.GraphDef, TrainState]:
        plain = dataclasses.replace(self.config, sketches=None)
        model = Decoder(plain, segments=lengths, rngs=nnx.Rngs(0))
        key = jax.random.key(0)
        if self.config.sketches is not None:
            return init_logra_state(model, self.config, key, dense=self._dense)
        return init_state(model, self.optimizer, key)

    def _batch(self) -> Batch:
        return jax.eval_shape(self._values)

    def _values(self) -> Batch:
        """A batch whose every completion is scored, and whose advantages have both signs."""
        shape = self.micro, self.rows, self.seq
        tokens = jax.random.randint(jax.random.key(1), shape, 0, self.config.vocab_size)
        logp = jnp.full((*shape[:2], self.completion), -5.0, jnp.float32)
        signs = jnp.where(jnp.arange(self.rows) % 2 == 0, jnp.float32(1), jnp.float32(-1))
        return Batch(
            tokens=tokens,
            attention_mask=jnp.ones(shape, bool),
            completion_mask=jnp.ones(logp.shape, bool),
            logp_old=logp,
            logp_ref=logp if self.beta else None,
            advantages=jnp.broadcast_to(signs, shape[:2]),
        )


def _lengths(policies: Sequence[Policy]) -> tuple[int, ...]:
    """Of the runs of equal policies."""
    return tuple(len(list(run)) for _, run in itertools.groupby(policies))


def training_update(shape: DecoderConfig, config: TrainConfig) -> AbstractUpdate:
    """The update of a training run of a model of this shape."""
    return AbstractUpdate(
        shape,
        micro=config.rows // config.micro_rows // config.mini_batches,
        rows=config.micro_rows,
        seq=config.prompt_length + config.completion_length,
        completion=config.completion_length,
        optimizer=optax.adamw(config.learning_rate, weight_decay=config.weight_decay),
        beta=config.beta,
        logra=None if shape.sketches is None else settings_of(config),
        dense=config.dense == "adamw",
    )


def check_plan(made: Plan, update: AbstractUpdate) -> None:
    """Refuses a plan that was made for another model or batch.

    Where the plan is for another platform than the one at hand, or for a target file's, only the
    model is compared: kernels and arrays of the block differ there.

    Raises:
        ValueError: names each difference, and the options that agree with the plan.
    """
    blocks = update.blocks()
    planned, here = platform_of(made.target), jax.default_backend()
    if planned != {"gpu": "cuda"}.get(here, here):
        found = {"blocks": str(blocks.count), **model_facts(update.config)}
        found |= dense_facts(update.config, update.dense)
    else:
        args = update.arguments((Policy({}),) * blocks.count)
        facts = {"blocks": blocks.count, "argnums": blocks.argnums}
        found = fingerprint(blocks.fn, blocks.args, args, **facts) | update.facts()
    check_situation(made.fingerprint, found, "plan")
