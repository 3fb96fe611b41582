"""The options by target, and that they do what they are for."""

import jax
import jax.numpy as jnp
import pytest

import hilore_jax as hl

BARRIERS = {"xla_disable_hlo_passes": "cse_barrier_expander"}


@pytest.mark.newest
def test_options_by_target():
    for target in ("gpu", "cuda", "rocm", "tpu", "cuda:h200", "tpu:v5e"):
        assert hl.compiler_options(target) == {}
    for target in ("cpu", "cpu:0"):
        assert hl.compiler_options(target) == BARRIERS
    assert hl.compiler_options() == hl.compiler_options(jax.default_backend())


@pytest.mark.parametrize("target", ["h200", "gpus", ":cpu", "metal"])
def test_unknown_targets(target):
    with pytest.raises(ValueError, match=rf"unknown target '{target}'.*'cpu', 'gpu'"):
        hl.compiler_options(target)


def test_each_call_gives_its_own_options():
    hl.compiler_options("cpu")["xla_other"] = "1"
    assert hl.compiler_options("cpu") == BARRIERS


@pytest.mark.newest
def test_on_cpu_they_keep_the_rematerialization():
    """Backward recomputes the matmuls that forward also runs, whatever XLA would undo."""

    def loss(x):
        for _ in range(4):
            x = jnp.sin(x @ x)
        return jnp.sum(x)

    lowered = jax.jit(jax.value_and_grad(jax.checkpoint(loss))).lower(jnp.ones((8, 8)))

    def matmuls(options: dict[str, str | bool]) -> int:
        text = lowered.compile(compiler_options=options).as_text() or ""
        return sum(text.count(f" {op}(") for op in ("dot", "custom-call"))

    kept, undone = matmuls(hl.compiler_options("cpu")), matmuls({})
    assert kept == 4 + 4 + 8  # forward, recomputed, backward
    if jax.__version_info__ < (0, 11):  # later compilers keep the barriers by themselves
        assert undone == 4 + 8
