"""The README's Python runs as it is written, and its commands are those of the command line."""

import re
from pathlib import Path

import jax
import pytest

import hilore_jax as hl
from hilore_jax import codecs
from hilore_jax.cli import COMMANDS
from hilore_jax.models.names import NAMES

README = (Path(__file__).parents[1] / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_python_blocks_run_one_after_another(capsys, tmp_path, monkeypatch):
    """In order and in one namespace, as a reader would paste them."""
    assert len(BLOCKS) >= 4
    monkeypatch.chdir(tmp_path)
    found = {}
    for i, code in enumerate(BLOCKS):
        exec(compile(code, f"README.md, python block {i}", "exec"), found)
    out = capsys.readouterr().out
    assert "backward recomputes" in out
    # Of the blocks: gradients that are finite, and advantages of which each group has both signs.
    for name in ("gradients", "stack_gradients"):
        assert all(bool(jax.numpy.isfinite(leaf).all()) for leaf in jax.tree.leaves(found[name]))
    assert found["advantages"].shape == (2, 2) and float(found["share"]) >= 0
    assert hl.parse_policy(tmp_path / "policy.json") == found["policy"]
    assert (found["follower"].update, found["remote"].update) == (1, 2)
    assert found["remote"].run == "mine"


@pytest.mark.parametrize("name", [*NAMES, *codecs.BUILT_IN, *(f"hilore {c}" for c in COMMANDS)])
def test_the_readme_names_activations_codecs_and_commands(name):
    assert f"`{name}" in README


@pytest.mark.parametrize("name", hl.__all__)
def test_the_readme_names_the_public_surface(name):
    assert f"hl.{name}" in README or name in ("Action", "Explanation")
