"""Short spellings of actions and policies, for command lines and configs."""

import os
from pathlib import Path
from typing import Any

from hilore_jax import codecs
from hilore_jax.actions import Action, Compress, Offload, Policy, Recompute, Store

_WORDS = ("gc", "recompute", "store", "tainted_matmuls")
_PLAIN: dict[str, Action] = {"store": Store(), "recompute": Recompute()}


def parse_action(text: str) -> Action:
    """An action from its short spelling.

    Args:
        text: `store`, `recompute`, `offload`, or a codec with options, `int8:axis=1:tile=32`
            (`tile=all` is the whole axis, `tile=0` a direct cast).

    Example:
        >>> parse_action("fp8_e4m3:tile=0")
        Compress(codec='fp8_e4m3', axis=-1, tile=0)
    """
    head, *options = text.strip().split(":")
    if head in _PLAIN and not options:
        return _PLAIN[head]
    if head == "offload" and len(options) <= 1:
        return Offload(*options)
    if head not in codecs.BUILT_IN:
        raise ValueError(
            f"unknown action {text!r}; expected store, recompute, offload, or one of "
            f"{sorted(codecs.BUILT_IN)}, as in 'int8:axis=1:tile=32'."
        )
    fields: dict[str, Any] = {}
    for option in options:
        key, _, value = option.partition("=")
        if key not in ("axis", "tile") or not value or key in fields:
            raise ValueError(f"action {text!r}: bad option {option!r}; expected axis=N, tile=N.")
        try:
            fields[key] = None if (key, value) == ("tile", "all") else int(value)
        except ValueError:
            raise ValueError(f"action {text!r}: {key}={value!r} is not a whole number.") from None
    return Compress(head, **fields)


def parse_policy(text: str | os.PathLike[str] | Any) -> Policy:
    """A policy from a command line: `gc`, `store`, a JSON file, or `name=action` pairs.

    It reads what `str(policy)` writes. The words `gc` and `store` set what happens to the names
    that are not listed (`gc` unless said), and `tainted_matmuls` sets that flag.

    Args:
        text: e.g. `"mlp_gate=int8,mlp_up=fp8_e4m3:axis=1:tile=32,attn_out=store"`; a
            `pathlib.Path` is a JSON file.

    Raises:
        TypeError: neither text nor a path.
        ValueError: not one of these; names the part at fault.

    Example:
        >>> import hilore_jax as hl
        >>> hl.parse_policy("gc") == hl.Policy({})
        True
        >>> str(hl.parse_policy("mlp_gate=int8,attn_out=store"))
        'attn_out=store,mlp_gate=int8:axis=-1:tile=128'
    """
    if isinstance(text, os.PathLike):
        return _read(Path(text))
    if not isinstance(text, str):
        raise TypeError(
            f"parse_policy takes text or a path, found {text!r}, a {type(text).__name__}; expected "
            "'gc', 'store', a .json file, or pairs such as 'mlp_gate=int8,attn_out=store'."
        )
    text = text.strip()
    if text.endswith(".json"):
        return _read(Path(text))
    words, actions = set(), {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, is_pair, action = (piece.strip() for piece in part.partition("="))
        if not is_pair and name.lower() in _WORDS:
            words.add(name.lower())
        elif not is_pair or not name:
            raise ValueError(
                f"policy {text!r}: {part!r} is not name=action; expected 'gc', 'store', a .json "
                "file, or pairs such as 'mlp_gate=int8,attn_out=store'."
            )
        elif name in actions:
            raise ValueError(f"policy {text!r}: {name!r} is listed twice; keep one action.")
        else:
            actions[name] = parse_action(action)
    if not words and not actions:
        raise ValueError("empty policy; write 'gc' to recompute everything.")
    if "store" in words and words & {"gc", "recompute"}:
        raise ValueError(f"policy {text!r}: choose one of 'gc' and 'store'.")
    default = Store() if "store" in words else Recompute()
    return Policy(actions, default=default, tainted_matmuls="tainted_matmuls" in words)


def _read(path: Path) -> Policy:
    if not path.is_file():
        raise ValueError(f"policy file '{path}' does not exist.")
    try:
        return Policy.from_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"policy file '{path}': {error}") from error
