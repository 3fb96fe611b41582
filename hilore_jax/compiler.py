"""Compiler options that rematerialization needs, by backend."""

import jax


def compiler_options(target: str | None = None) -> dict[str, str | bool]:
    """Options for `jax.jit(..., compiler_options=...)` and `lowered.compile(...)`.

    XLA's CPU pipeline has a pass, `cse_barrier_expander`, that deletes the barriers on which every
    rematerialization relies: common-subexpression elimination then undoes it (the root of jax
    issue 19822). On CPU the pass is switched off for the executable at hand; other backends need
    nothing.

    Args:
        target: `"cpu"`, `"gpu"`, `"tpu"`, or a target whose name starts with its platform, such as
            `"cuda:h200"`; `None` is the default backend.

    Returns:
        Options by name; empty where nothing is needed.

    Example:
        >>> import hilore_jax as hl
        >>> hl.compiler_options("cuda:h200")
        {}
        >>> sorted(hl.compiler_options("cpu"))
        ['xla_disable_hlo_passes']
    """
    platform = (target or jax.default_backend()).split(":")[0]
    known = ("cpu", "gpu", "cuda", "rocm", "tpu")
    if platform not in known:
        raise ValueError(f"unknown target {target!r}: expected a platform among {list(known)}.")
    if platform == "cpu":
        return {"xla_disable_hlo_passes": "cse_barrier_expander"}
    return {}
