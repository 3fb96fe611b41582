"""What a plan's table says of blocks that could recompute less."""

import math

import pytest

import hilore_jax as hl
from hilore_jax.planning.menu import Entry
from hilore_jax.planning.plan import Blocks
from plans import bare_plan

GC, LOW = hl.Policy({}), hl.Policy({"up": hl.Compress("int8")})


def menu(risk):
    return Entry(GC, 0, 2.0, 1, 8, 0.0), Entry(LOW, 0, 1.0, 0, 0, risk)


@pytest.mark.parametrize(("paper", "said"), [(True, "would be 0.2000"), (False, "less than other")])
def test_risks_of_the_next_entry_add_as_the_plans_do(paper, said):
    made = bare_plan((LOW, GC), menu(0.1), risk_budget=0.15, paper=paper)
    assert f"[{LOW}]: " in made.explain() and said in made.explain()


def test_the_risk_of_the_next_entry_is_that_of_the_best_block_of_a_range():
    # The second block was not measured; the first may take the entry.
    risks = ((0.0, 0.1), (0.0, math.inf))
    made = bare_plan((GC, GC), menu(math.inf), block_risks=risks, exposure=1.0, risk_budget=0.15)
    assert "less than other blocks gain" in made.explain()
    tight = bare_plan((GC, GC), menu(math.inf), block_risks=risks, exposure=1.0, risk_budget=0.05)
    assert "0-1: " in tight.explain() and "the risk would be 0.1000" in tight.explain()


@pytest.mark.parametrize("wrong", [(5,), (-1,), (0, 2), ()])
def test_positions_that_the_block_does_not_have_are_refused(wrong):
    with pytest.raises(ValueError, match="positions among the block's 2 arguments"):
        Blocks(lambda w, x: x, (1.0, 2.0), 3, argnums=wrong)
