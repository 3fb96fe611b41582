"""A task and a tokenizer without downloads or extras, for small experiments and tests."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from hilore_jax.training.tasks import Item, Task

CHARACTERS = "\x00\x01 0123456789abcdefghijklmnopqrstuvwxyz+-*/=?.,:\n"


@dataclasses.dataclass(frozen=True)
class CharTokenizer:
    """One token a character; token 0 pads and token 1 ends a completion."""

    characters: str = CHARACTERS
    pad_id: int = 0
    eos_id: int = 1

    @property
    def vocab_size(self) -> int:
        """Number of tokens."""
        return len(self.characters)

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`; a character outside the alphabet is an error.

        Example:
            >>> CharTokenizer().decode(CharTokenizer().encode("copy 12"))
            'copy 12'
        """
        unknown = sorted(set(text) - set(self.characters))
        if unknown:
            raise ValueError(f"characters {unknown} are not among {self.characters!r}")
        return [self.characters.index(character) for character in text]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, without the pad and end tokens; ids past the alphabet are `?`."""
        special = (self.pad_id, self.eos_id)
        kept = [int(i) for i in ids if int(i) not in special]
        return "".join(self.characters[i] if i < self.vocab_size else "?" for i in kept)

    def apply_chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The messages' contents, one a line, and a final newline."""
        return "".join(f"{message['content']}\n" for message in messages)


def copy_task(*, digits: int = 1, seed: int = 0) -> Task:
    """Repeat a number: the question is `digits` digits, the answer is the same digits.

    Example:
        >>> task = copy_task(digits=2, seed=3)
        >>> task.draw(5) == task.draw(5), task.score(task.draw(5).answer, task.draw(5))
        (True, 1.0)
    """
    if digits < 1:
        raise ValueError(f"copy_task needs digits >= 1, found {digits}")

    def draw(index: int) -> Item:
        number = np.random.default_rng((seed, index)).integers(0, 10, digits)
        text = "".join(str(d) for d in number)
        return Item(index, text, text)

    return Task("copy", draw, lambda answer, item: float(answer == item.answer), instruction="")


def count_task(*, limit: int = 9, seed: int = 0) -> Task:
    """Count letters: the question is 1 to `limit` times `a`, the answer is how many.

    Example:
        >>> item = count_task(seed=1).draw(0)
        >>> str(len(item.question)) == item.answer
        True
    """
    if not 1 <= limit <= 9:
        raise ValueError(f"count_task needs 1 <= limit <= 9, found {limit}")

    def draw(index: int) -> Item:
        number = int(np.random.default_rng((seed, index)).integers(1, limit + 1))
        return Item(index, "a" * number, str(number))

    return Task("count", draw, lambda answer, item: float(answer == item.answer), instruction="")
