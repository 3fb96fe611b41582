"""The byte-level BPE tokenizer that a GGUF file holds, rebuilt exactly.

A GGUF file stores vocabulary, merges and the *name* of the pre-tokenizer; its rules are in
llama.cpp's source and in each model's ``tokenizer.json``, and are written out here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4


def _split(digits: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS % digits), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _smollm() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )


SUPPORTED: tuple[str, ...] = ("smollm", "qwen2", "llama-bpe")
"""Values of ``tokenizer.ggml.pre`` that are rebuilt."""


def control_token(metadata: Mapping[str, Any], kind: str) -> int | None:
    """The id under ``tokenizer.ggml.{kind}_token_id``, or None.

    Example:
        >>> control_token({"tokenizer.ggml.eos_token_id": 2}, "eos")
        2
    """
    value = metadata.get(f"tokenizer.ggml.{kind}_token_id")
    return None if value is None else int(value)


def backend_from_gguf(metadata: Mapping[str, Any], source: str) -> tokenizers.Tokenizer:
    """Builds the tokenizer of a GGUF file's metadata.

    Args:
        metadata: of `hilore_jax.models.gguf.open_gguf`.
        source: the file, for error messages.

    Returns:
        The tokenizer, with its control tokens special.

    Raises:
        ValueError: a tokenizer model other than gpt2, or a pre-tokenizer not in `SUPPORTED`.
    """

    def key(name: str, default: Any = None) -> Any:
        return metadata.get(f"tokenizer.ggml.{name}", default)

    model, pre = key("model"), key("pre")
    if model != "gpt2" or pre not in SUPPORTED:
        raise ValueError(
            f"{source}: tokenizer model {model!r} with pre-tokenizer {pre!r}; supported are model "
            f"'gpt2' with {', '.join(SUPPORTED)}. Load the tokenizer from the model's Hugging Face "
            "folder (tokenizer.json) instead."
        )
    tokens, merges = key("tokens"), [tuple(merge.split(" ")) for merge in key("merges")]
    types = key("token_type", [_NORMAL] * len(tokens))
    vocab = {token: i for i, token in enumerate(tokens)}
    # Llama 3 takes a word that is a token as it is, even where its merges would not lead there.
    bpe = models.BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe")
    backend = tokenizers.Tokenizer(bpe)
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = {
        "smollm": _smollm,
        "qwen2": lambda: _split(r"\p{N}"),
        "llama-bpe": lambda: _split(r"\p{N}{1,3}"),
    }[pre]()
    backend.decoder = decoders.ByteLevel()
    for kind in (_CONTROL, _USER_DEFINED):
        added = [
            AddedToken(token, special=kind == _CONTROL, normalized=False)
            for token, found in zip(tokens, types, strict=True)
            if found == kind
        ]
        (backend.add_special_tokens if kind == _CONTROL else backend.add_tokens)(added)
    bos = control_token(metadata, "bos")
    if key("add_bos_token", pre == "llama-bpe") and bos is not None:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{tokens[bos]} $A", special_tokens=[(tokens[bos], bos)]
        )
    return backend
