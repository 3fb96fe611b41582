"""`python -m hilore_jax`: the `hilore` command."""

from hilore_jax.cli import run

run()
