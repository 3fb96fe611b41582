"""Tokenizers: text to ids and back, chat prompts, left padding with its mask."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, SupportsIndex

import numpy as np
import tokenizers
from jaxtyping import Bool, Int

from hilore_jax.models.bundled import BUNDLED, bundled_file
from hilore_jax.models.chat import render
from hilore_jax.models.gguf import open_gguf
from hilore_jax.models.gguf_tokenizer import backend_from_gguf, control_token


@dataclass(frozen=True)
class Tokenizer:
    """A model's tokenizer and chat template.

    Args:
        backend: the `tokenizers.Tokenizer`.
        eos_id: ends a completion.
        pad_id: fills padding; may equal `eos_id`, so masks never come from token values.
        bos_id: begins a text, None for models without one.
        template: the model's jinja chat template, or None.
        template_tokens: ``bos_token``, ``eos_token``, ... as the template sees them.
    """

    backend: tokenizers.Tokenizer = field(repr=False)  # its repr is the whole vocabulary
    eos_id: int
    pad_id: int
    bos_id: int | None = None
    template: str | None = None
    template_tokens: Mapping[str, str] = field(default_factory=dict)

    @property
    def vocab_size(self) -> int:
        """Ids the tokenizer can give, added tokens included (a model may have more rows)."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, add_special: bool = False) -> list[int]:
        """Token ids of a text; special tokens written in it become their ids.

        Bytes that a vocabulary has no token for are dropped (SmolLM2: six control characters).

        Args:
            text: any string.
            add_special: add what the model puts around a plain text (a BOS, say). Leave it out for
                `apply_chat` prompts, which hold their special tokens already.

        Returns:
            The ids.
        """
        return self.backend.encode(text, add_special_tokens=add_special).ids

    def decode(self, ids: Iterable[SupportsIndex], *, skip_special: bool = True) -> str:
        """The text of token ids.

        Args:
            ids: token ids, a list or a one-dimensional array.
            skip_special: leave special tokens out.

        Returns:
            The text; ids that are no whole UTF-8 character become U+FFFD.
        """
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=skip_special)

    def apply_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The prompt of a conversation, by the model's own template.

        Args:
            messages: ``{"role": ..., "content": ...}`` each.
            add_generation_prompt: end with the header of the assistant's turn.
            **variables: further template variables, such as Qwen3's ``enable_thinking=False``.

        Returns:
            The prompt text, for `encode`.

        Raises:
            ValueError: the model has no chat template, or the template refuses the messages.
            ImportError: jinja2 is missing.
        """
        if self.template is None:
            raise ValueError(
                "this tokenizer has no chat template (a base model?); "
                "format the prompt yourself and encode it"
            )
        return render(
            self.template,
            messages,
            add_generation_prompt=add_generation_prompt,
            **self.template_tokens,
            **variables,
        )

    def pad_left(
        self, rows: Sequence[Sequence[int]], length: int | None = None
    ) -> tuple[Int[np.ndarray, "rows length"], Bool[np.ndarray, "rows length"]]:
        """Left-padded prompts and their mask, which alone says what is padding.

        Args:
            rows: token ids of each prompt, none empty.
            length: tokens a row; the longest prompt's where None.

        Returns:
            int32 ids and bool mask (True at prompt tokens), both ``[len(rows), length]``.

        Raises:
            ValueError: no rows, an empty row, or a row longer than `length`.
        """
        if not rows or not all(len(row) for row in rows):
            empty = [i for i, row in enumerate(rows) if not len(row)]
            raise ValueError(f"expected prompts of one token or more; empty rows: {empty or 'all'}")
        longest = max(map(len, rows))
        length = longest if length is None else length
        if longest > length:
            raise ValueError(
                f"prompt {[len(row) for row in rows].index(longest)} has {longest} tokens, more "
                f"than the length {length}; raise the length or drop the prompt"
            )
        ids = np.full((len(rows), length), self.pad_id, np.int32)
        mask = np.zeros(ids.shape, bool)
        for i, row in enumerate(rows):
            ids[i, length - len(row) :] = row
            mask[i, length - len(row) :] = True
        return ids, mask


def load(path_or_name: str | Path) -> Tokenizer:
    """Loads a tokenizer from a bundled model's name, a Hugging Face folder or a GGUF file.

    Args:
        path_or_name: as for `hilore_jax.models.weights.load`.

    Returns:
        The tokenizer.

    Raises:
        FileNotFoundError: an unknown name or path, or a folder without ``tokenizer.json``.
        ImportError: the package that a name needs is missing.
        ValueError: a GGUF tokenizer of a kind that is not covered, or no end-of-sequence token.
    """
    path = bundled_file(str(path_or_name)) if path_or_name in BUNDLED else Path(path_or_name)
    if path.is_dir():
        return _from_folder(path)
    if path.suffix == ".gguf":
        return _from_gguf(path)
    raise FileNotFoundError(
        f"no tokenizer {str(path_or_name)!r}: it is neither a Hugging Face folder, nor a .gguf "
        f"file, nor one of the names {', '.join(BUNDLED)}"
    )


def _from_gguf(path: Path) -> Tokenizer:
    metadata = open_gguf(path).metadata
    backend = backend_from_gguf(metadata, str(path))
    ids = {kind: control_token(metadata, kind) for kind in ("bos", "eos", "padding", "unknown")}
    if ids["eos"] is None:
        raise ValueError(f"{path}: key tokenizer.ggml.eos_token_id is missing; completions need it")
    names = {"bos": "bos_token", "eos": "eos_token", "padding": "pad_token", "unknown": "unk_token"}
    tokens = {names[k]: str(backend.id_to_token(i)) for k, i in ids.items() if i is not None}
    return Tokenizer(
        backend,
        eos_id=ids["eos"],
        pad_id=ids["eos"] if ids["padding"] is None else ids["padding"],
        bos_id=ids["bos"],
        template=metadata.get("tokenizer.chat_template"),
        template_tokens=tokens,
    )


def _from_folder(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"no tokenizer.json in {folder}; save one with transformers' "
            "AutoTokenizer.from_pretrained(...).save_pretrained(folder)"
        )
    backend = tokenizers.Tokenizer.from_file(str(path))
    config = _json(folder / "tokenizer_config.json")
    names = ("bos_token", "eos_token", "pad_token", "unk_token")
    tokens = {name: _text(config[name]) for name in names if config.get(name)}
    found = {name: backend.token_to_id(token) for name, token in tokens.items()}
    ids = {name: i for name, i in found.items() if i is not None}
    unknown = [f"{name} {tokens[name]!r}" for name in tokens if name not in ids]
    if unknown:
        raise ValueError(f"{folder}: tokenizer.json has no token for {', '.join(unknown)}")
    eos = ids["eos_token"] if "eos_token" in ids else _eos_of_model(folder)
    return Tokenizer(
        backend,
        eos_id=eos,
        pad_id=ids.get("pad_token", eos),
        bos_id=ids.get("bos_token"),
        template=_template(folder, config),
        template_tokens=tokens,
    )


def _eos_of_model(folder: Path) -> int:
    for name in ("generation_config.json", "config.json"):
        eos = _json(folder / name).get("eos_token_id")
        if eos is not None:
            return eos[0] if isinstance(eos, list) else eos
    raise ValueError(
        f"{folder}: no eos_token in tokenizer_config.json and no eos_token_id in "
        "generation_config.json or config.json; completions need one"
    )


def _template(folder: Path, config: Mapping[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text()
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {item["name"]: item["template"] for item in template}
        return named.get("default")
    return template


def _text(token: str | Mapping[str, Any]) -> str:
    """A special token is written as its text or as a dict that holds it."""
    return token if isinstance(token, str) else token["content"]


def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.is_file() else {}
