"""The menu of a block is found once: most tests here plan the same few blocks."""

import jax
import pytest

from hilore_jax.planning import solve
from hilore_jax.planning.menu import block_menu

FOUND = {}


def remembered(block_fn, *args, risks, codecs, **options):
    """`block_menu`, whose result is given again for equal arguments and equal risks."""
    shapes = jax.tree.map(lambda leaf: (leaf.shape, str(leaf.dtype)), args)
    known = FOUND.setdefault((block_fn, str(shapes), *codecs, str(options)), [])
    for asked, menu in known:
        if all(risks(*pair) == risk for pair, risk in asked.items()):
            return menu
    asked = {}
    noted = lambda *pair: asked.setdefault(pair, risks(*pair))  # noqa: E731
    menu = block_menu(block_fn, *args, risks=noted, codecs=codecs, **options)
    known.append((asked, menu))
    return menu


@pytest.fixture(autouse=True)
def menus_are_found_once(monkeypatch):
    monkeypatch.setattr(solve, "block_menu", remembered)
