"""Import of optional dependencies, with an error that names the extra."""

import importlib
import importlib.util
from types import ModuleType


def require(module: str, extra: str, why: str) -> ModuleType:
    """Imports an optional dependency at the moment it is needed.

    Args:
        module: The module's dotted name, such as `"reasoning_gym.factory"`.
        extra: The extra of this project that brings it, such as `"tasks"`.
        why: What needs it, to open the error's sentence, such as `"the task 'chain_sum'"`.

    Returns:
        The imported module.

    Raises:
        ImportError: If the module is not installed, or is installed but does not import; the
            message tells which, and the command that mends it.

    Example:
        >>> require("math", "tasks", "this example").sqrt(9.0)
        3.0
        >>> require("no_such_module", "tasks", "the task 'chain_sum'")
        Traceback (most recent call last):
        ...
        ImportError: the task 'chain_sum' needs the module 'no_such_module', which is not installed.
        Install the extra that brings it: pip install "hilore_jax[tasks]"
    """
    remedy = f'pip install "hilore_jax[{extra}]"'
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        raise ImportError(
            f"{why} needs the module {module!r}, which is not installed. "
            f"Install the extra that brings it: {remedy}",
            name=module,
        )
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"{why} needs the module {module!r}, which is installed but does not import: {error}. "
            f"Install the extra again, with what it depends on: {remedy}",
            name=module,
        ) from error
