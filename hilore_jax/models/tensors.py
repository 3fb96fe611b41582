"""The one intermediate form of weights: Hugging Face names, ``[out, in]`` arrays, read on demand.

Every reader (safetensors, GGUF) ends in a `LazyTensors` and every writer begins with one, so names
and shapes are checked in one place, from headers, before a byte of data is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class LazyTensors:
    """Named arrays whose shapes are known and whose data is read one array at a time.

    It reads like a dict, and is none, so that nothing reads an array by looking at the items.

    Args:
        shapes: name -> shape, ``[out, in]`` for a linear map, as Hugging Face stores it.
        read: name -> array of that shape.
        source: what the arrays come from, for error messages.

    Example:
        >>> import numpy as np
        >>> tensors = LazyTensors({"a": (2,)}, lambda name: np.ones(2), "memory")
        >>> tensors["a"].shape, list(tensors)
        ((2,), ['a'])
    """

    shapes: Mapping[str, tuple[int, ...]]
    read: Callable[[str], np.ndarray]
    source: str

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray], source: str = "memory") -> LazyTensors:
        """Wraps arrays that are in memory already."""
        return cls({k: tuple(v.shape) for k, v in arrays.items()}, arrays.__getitem__, source)

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self.shapes:
            raise KeyError(name)
        return self.read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __contains__(self, name: str) -> bool:
        return name in self.shapes

    def __len__(self) -> int:
        return len(self.shapes)


def check_shapes(
    found: Mapping[str, tuple[int, ...]],
    expected: Mapping[str, tuple[int, ...]],
    source: str,
    *,
    ignored: Callable[[str], bool] = lambda name: False,
) -> None:
    """Raises unless the tensors found are exactly those expected, by name and by shape.

    Args:
        found: name -> shape, as the file's header says.
        expected: name -> shape, as the model's config says.
        source: the file or folder, for the message.
        ignored: names that may be there and are not read.

    Raises:
        ValueError: names each tensor that is missing, unexpected or of another shape.
    """
    wrong = [
        f"tensor {name}: found shape {tuple(found[name])}, expected {tuple(shape)}"
        for name, shape in expected.items()
        if name in found and tuple(found[name]) != tuple(shape)
    ]
    missing = [name for name in expected if name not in found]
    extra = [name for name in found if name not in expected and not ignored(name)]
    problems = wrong[:5] + (
        [f"... and {len(wrong) - 5} more of another shape"] if wrong[5:] else []
    )
    if missing:
        problems.append(f"missing {len(missing)} tensor(s): {_some(missing)}")
    if extra:
        problems.append(f"unexpected {len(extra)} tensor(s): {_some(extra)}")
    if problems:
        raise ValueError(
            f"{source} does not hold the weights its config describes:\n  "
            + "\n  ".join(problems)
            + "\nUse the config.json that belongs to these weights, or download them again."
        )


def _some(names: list[str], count: int = 5) -> str:
    shown = ", ".join(names[:count])
    return shown + (f", ... ({len(names) - count} more)" if len(names) > count else "")
