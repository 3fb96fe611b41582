"""What backward reads of a named activation: stored, compressed, recomputed or offloaded.

A `Policy` is frozen data: it can be hashed (a static argument of `jax.jit`), compared by value and
written to JSON. It says nothing about how its actions are carried out; `remat.py` does that.
"""

import dataclasses
import functools
import json
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from hilore_jax import codecs

_SCHEMA = 1


@dataclasses.dataclass(frozen=True)
class Store:
    """Keep the activation exactly as forward computed it (HiLoRe's H)."""

    def __str__(self) -> str:
        return "store"


@dataclasses.dataclass(frozen=True)
class Recompute:
    """Keep nothing: backward recomputes the activation from what is kept (HiLoRe's R)."""

    def __str__(self) -> str:
        return "recompute"


@dataclasses.dataclass(frozen=True)
class Offload:
    """Keep the activation exactly, in pinned host memory, and fetch it in backward.

    Attributes:
        memory_kind: memory space that holds the residual, `"pinned_host"` or `"unpinned_host"`.
    """

    memory_kind: str = "pinned_host"

    def __post_init__(self) -> None:
        if self.memory_kind not in ("pinned_host", "unpinned_host"):
            raise ValueError(
                f"Offload(memory_kind={self.memory_kind!r}): expected 'pinned_host' or "
                "'unpinned_host' (jax accepts any string here and then offloads nothing)."
            )

    def __str__(self) -> str:
        return "offload" if self.memory_kind == "pinned_host" else f"offload:{self.memory_kind}"


@dataclasses.dataclass(frozen=True)
class Compress:
    """Keep the activation in low precision; only backward sees the decoded value (HiLoRe's L).

    Attributes:
        codec: `"int8"`, `"int4"`, `"fp8_e4m3"`, `"fp8_e5m2"`, or a `hilore_jax.codecs.Codec`.
        axis: axis along which a tile lies and shares one bfloat16 scale; -1 is the features of
            `[batch, seq, features]`, 1 its tokens.
        tile: values that share one scale; `None` is the whole axis, 0 a direct saturating cast
            without scales (fp8 only, the paper's form).

    Example:
        >>> import hilore_jax as hl
        >>> hl.Compress("int8", axis=1, tile=32)
        Compress(codec='int8', axis=1, tile=32)
    """

    codec: "str | codecs.Codec" = "int8"
    axis: int = -1
    tile: int | None = 128

    def __post_init__(self) -> None:
        codec = codecs.get_codec(self.codec)
        if isinstance(self.axis, bool) or not isinstance(self.axis, int):
            raise TypeError(f"Compress(axis={self.axis!r}): expected an int, -1 for features.")
        if self.tile is not None and (
            isinstance(self.tile, bool) or not isinstance(self.tile, int) or self.tile < 0
        ):
            raise ValueError(
                f"Compress(tile={self.tile!r}): expected a positive number of values, None for "
                "the whole axis, or 0 for a direct cast."
            )
        if self.tile == 0 and not codec.direct:
            raise ValueError(
                f"Compress({codec.name!r}, tile=0): a direct cast needs a floating-point codec; "
                "use 'fp8_e4m3' or 'fp8_e5m2', or give a tile."
            )

    def __str__(self) -> str:
        tile = "all" if self.tile is None else self.tile
        return f"{codecs.get_codec(self.codec).name}:axis={self.axis}:tile={tile}"


Action = Store | Recompute | Offload | Compress
_DEFAULTS = {"store": Store(), "recompute": Recompute()}


@dataclasses.dataclass(frozen=True, init=False)
class Policy:
    """What to do with every named activation of one block.

    Names that are not listed, and every value without a name, take the `default`. The default
    `Recompute()` makes `Policy({})` plain gradient checkpointing (GC). `Policy(default=Store())`
    is no rematerialization at all: autodiff keeps what it wants.

    Attributes:
        actions: sorted `(name, action)` pairs, so that equal policies hash equally.
        default: `Recompute()` or `Store()`.
        tainted_matmuls: let backward recompute matmuls from decoded values. Cheaper and less
            accurate: on a real model an error of 0.013 grew to 0.042.

    Example:
        >>> import hilore_jax as hl
        >>> policy = hl.Policy({"attn_out": hl.Store(), "mlp_gate": hl.Compress("int8")})
        >>> policy["mlp_up"], hl.Policy.from_json(policy.to_json()) == policy
        (Recompute(), True)
    """

    actions: tuple[tuple[str, Action], ...]
    default: Action
    tainted_matmuls: bool

    def __init__(
        self,
        actions: Mapping[str, Action] | None = None,
        *,
        default: Action = Recompute(),
        tainted_matmuls: bool = False,
    ) -> None:
        if actions is not None and not isinstance(actions, Mapping):
            raise TypeError(
                f"Policy takes a mapping of activation names to actions, found "
                f"{type(actions).__name__} {actions!r}. Write "
                'hl.Policy({"attn_out": hl.Store(), "mlp_gate": hl.Compress("int8")}).'
            )
        items = dict(actions or {})
        for name, action in items.items():
            if not isinstance(name, str) or not name:
                raise TypeError(f"Policy: activation names are non-empty strings, found {name!r}.")
            if not isinstance(action, Store | Recompute | Offload | Compress):
                hint = " (call it: the class itself was given)" if isinstance(action, type) else ""
                raise TypeError(
                    f"Policy[{name!r}] = {action!r}: expected hl.Store(), hl.Compress(...), "
                    f"hl.Recompute() or hl.Offload(){hint}."
                )
        if not isinstance(default, Store | Recompute):
            raise TypeError(f"Policy(default={default!r}): expected hl.Recompute() or hl.Store().")
        if not isinstance(tainted_matmuls, bool):
            raise TypeError(f"Policy(tainted_matmuls={tainted_matmuls!r}): expected a bool.")
        if isinstance(default, Store) and any(a != Store() for a in items.values()):
            raise ValueError(
                "Policy(default=Store()) keeps everything, so no name can be compressed, "
                f"offloaded or recomputed; found {sorted(items)}. List the names to keep and leave "
                "the default at Recompute()."
            )
        object.__setattr__(self, "actions", tuple(sorted(items.items(), key=lambda kv: kv[0])))
        object.__setattr__(self, "default", default)
        object.__setattr__(self, "tainted_matmuls", tainted_matmuls)

    def __getitem__(self, name: str) -> Action:
        return dict(self.actions).get(name, self.default)

    def __iter__(self) -> Iterator[str]:
        return iter(name for name, _ in self.actions)

    def __len__(self) -> int:
        return len(self.actions)

    def __str__(self) -> str:
        """The spelling that `hl.parse_policy` reads."""
        words = ["store"] if self.keeps_everything else [] if self.actions else ["gc"]
        words += [f"{name}={action}" for name, action in self.actions]
        return ",".join(words + ["tainted_matmuls"] * self.tainted_matmuls)

    @property
    def keeps_everything(self) -> bool:
        """True for `Policy(default=Store())`: the block is left to plain autodiff."""
        return isinstance(self.default, Store)

    def names(self, kind: type) -> tuple[str, ...]:
        """Names whose action is a `kind`, sorted."""
        return tuple(name for name, action in self.actions if isinstance(action, kind))

    def checkpoint_policy(self) -> Any:
        """The `jax.checkpoint_policies` object of the Store and Recompute part.

        Returns:
            A callable for `jax.checkpoint(..., policy=...)`; the same object for equal policies,
            since jax compares policies by identity or by value, never by what they do.

        Raises:
            ValueError: the policy has Compress actions, which `jax.checkpoint` cannot express.

        Example:
            >>> import jax, hilore_jax as hl
            >>> f = jax.checkpoint(lambda x: x, policy=hl.Policy({}).checkpoint_policy())
        """
        compressed = self.names(Compress)
        if compressed:
            raise ValueError(
                f"checkpoint_policy(): {list(compressed)} are compressed, which jax.checkpoint "
                "cannot do; use hl.remat(policy) on the block."
            )
        if self.keeps_everything:
            return jax.checkpoint_policies.everything_saveable
        offloads = tuple((n, a.memory_kind) for n, a in self.actions if isinstance(a, Offload))
        return _stock_policy(self.names(Store), offloads)

    def to_json(self) -> str:
        """JSON text of the policy, readable by `Policy.from_json` and by people."""
        body = {
            "schema": _SCHEMA,
            "default": str(self.default),
            "tainted_matmuls": self.tainted_matmuls,
            "actions": {name: _action_to_dict(action) for name, action in self.actions},
        }
        return json.dumps(body, indent=2)

    @classmethod
    def from_json(cls, text: str) -> "Policy":
        """The policy written by `to_json`.

        Raises:
            ValueError: not JSON, another schema, or an unknown field, action or codec.
        """
        try:
            body = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"not a policy: invalid JSON ({error}).") from error
        if not isinstance(body, dict) or body.get("schema") != _SCHEMA:
            found = body.get("schema") if isinstance(body, dict) else type(body).__name__
            raise ValueError(
                f"not a policy of schema {_SCHEMA}: found {found!r}. The least that is one: "
                '{"schema": 1, "actions": {"attn_out": "store", "mlp_gate": {"action": "compress", '
                '"codec": "int8"}}}.'
            )
        fields = {key: value for key, value in body.items() if key != "schema"}
        actions, default = fields.pop("actions", {}), fields.pop("default", "recompute")
        if (
            not isinstance(actions, dict)
            or not isinstance(default, str)
            or default not in _DEFAULTS
        ):
            raise ValueError(
                f"not a policy: expected 'actions' by name and a 'default' among "
                f"{sorted(_DEFAULTS)}, found {actions!r} and {default!r}."
            )
        actions = {name: _action_from_dict(name, action) for name, action in actions.items()}
        try:
            return cls(actions, default=_DEFAULTS[default], **fields)
        except TypeError as error:
            raise ValueError(f"not a policy: {error}") from error


@functools.cache
def _stock_policy(stored: tuple[str, ...], offloads: tuple[tuple[str, str], ...]) -> Any:
    # jax's offload policy is a fresh closure at each call, unequal to the last one: cached here,
    # so that equal policies do not retrace.
    if not offloads:
        return jax.checkpoint_policies.save_only_these_names(*stored)
    kinds = {kind for _, kind in offloads}
    if len(kinds) > 1:
        raise ValueError(f"one policy offloads to one memory kind, found {sorted(kinds)}.")
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=list(stored),
        names_which_can_be_offloaded=[name for name, _ in offloads],
        offload_src="device",
        offload_dst=kinds.pop(),
    )


def _action_to_dict(action: Action) -> dict[str, Any]:
    if isinstance(action, Compress):
        if not isinstance(action.codec, str):
            raise ValueError(
                f"a policy with the user codec {action.codec!r} cannot be written to JSON; only "
                f"the built-in codecs {sorted(codecs.BUILT_IN)} have names there."
            )
        return {"action": "compress", **dataclasses.asdict(action)}
    return {"action": type(action).__name__.lower(), **dataclasses.asdict(action)}


def _action_from_dict(name: str, body: Any) -> Action:
    kinds = {"store": Store, "recompute": Recompute, "offload": Offload, "compress": Compress}
    fields = dict(body) if isinstance(body, dict) else {"action": body}
    kind = fields.pop("action", None)
    if not isinstance(kind, str) or kind not in kinds:
        raise ValueError(f"policy[{name!r}]: unknown action {kind!r}; expected {sorted(kinds)}.")
    try:
        return kinds[kind](**fields)
    except (TypeError, ValueError) as error:
        found = f"policy[{name!r}]: bad fields for {kind!r}: {error}; its fields are "
        raise ValueError(f"{found}{[f.name for f in dataclasses.fields(kinds[kind])]}.") from error
