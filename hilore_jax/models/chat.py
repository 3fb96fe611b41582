"""Chat templates: jinja in the sandbox that the templates are written for."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

from hilore_jax._extras import require


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    **variables: Any,
) -> str:
    """Renders a chat template as `transformers` does, in a sandbox.

    Args:
        template: jinja source.
        messages: ``{"role": ..., "content": ...}`` each.
        add_generation_prompt: end with the header of the assistant's turn.
        **variables: what else the template reads.

    Returns:
        The prompt.

    Raises:
        ImportError: jinja2 is missing.
        ValueError: the template is faulty or refuses the messages; its own words are given.

    Example:
        >>> render(
        ...     "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}",
        ...     [{"role": "user", "content": "2+2?"}],
        ... )
        '<user>2+2?'
    """
    jinja2 = require("jinja2", "tasks", "a chat template")
    sandbox = require("jinja2.sandbox", "tasks", "a chat template")
    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )

    def raise_exception(message: str) -> None:
        raise jinja2.exceptions.TemplateError(message)

    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    try:
        return environment.from_string(template).render(
            messages=[dict(message) for message in messages],
            add_generation_prompt=add_generation_prompt,
            **variables,
        )
    except jinja2.exceptions.TemplateError as error:
        raise ValueError(f"the chat template failed: {error}") from error


def _tojson(value: Any, indent: int | None = None) -> str:
    """Jinja's own filter escapes HTML, which no chat template means."""
    return json.dumps(value, ensure_ascii=False, indent=indent)
