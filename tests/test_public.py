"""Promises about the package as a whole: documented, light to import, tidy inside."""

import ast
import inspect
import subprocess
import sys
import typing
from pathlib import Path

import jax
import jaxtyping
import pytest

import hilore_jax as hl

PACKAGE = Path(hl.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))

# What must not be loaded by `import hilore_jax`: every optional dependency, and the slow ones that
# only some commands need.
LAZY = (
    "accelerate",
    "gguf",
    "jax_triton",
    "matplotlib",
    "orbax.checkpoint",
    "reasoning_gym",
    "torch",
    "transformers",
    "triton",
    "tyro",
)

# design: a room imports only from its own floor or from lower ones.
FLOORS = {
    "__main__": 5,
    "_extras": 1,
    "arguments": 2,
    "actions": 1,
    "codecs": 1,
    "compiler": 1,
    "spelling": 1,
    "swap": 1,
    "tracing": 1,
    "work": 1,
    "kernels": 1,
    "modules": 2,
    "remat": 2,
    "replay": 2,
    "segments": 2,
    "explain": 2,
    "gate": 2,
    "gate_rule": 2,
    "gated_scan": 2,
    "intervene": 2,
    "grpo": 2,
    "logra": 2,
    "models": 3,
    "planning": 3,
    "training": 4,
    "report": 4,
    "bench": 5,
    "cli": 5,
}


def public_names() -> list[str]:
    """`__all__`, or what `import hilore_jax` offers without an underscore."""

    def ours(value: object) -> bool:
        return not inspect.ismodule(value) or value.__name__.startswith("hilore_jax.")

    names = getattr(hl, "__all__", None)
    return list(names or sorted(n for n, v in vars(hl).items() if n[0] != "_" and ours(v)))


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_modules(path: Path) -> set[str]:
    """Absolute names of all modules that a file imports, at any depth."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}:{node.lineno}: imports are absolute"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_the_surface_is_there():
    assert {"Compress", "Policy", "Recompute", "Store", "remat"} <= set(public_names())
    imported = {n for n, v in vars(hl).items() if n[0] != "_" and not inspect.ismodule(v)}
    # A room's name, such as `remat`, may be a function here: modules are listed by hand.
    assert imported <= set(hl.__all__) == {n for n in hl.__all__ if hasattr(hl, n)}
    assert hl.__all__ == sorted(hl.__all__)


@pytest.mark.parametrize("name", public_names())
def test_public_name_is_documented(name):
    public = getattr(hl, name)
    if not (inspect.ismodule(public) or inspect.isclass(public) or callable(public)):
        assert typing.get_origin(public) is not None, f"{name} is a bare value"
        return  # a type alias: its docstring would be that of the union
    doc = public.__doc__ or ""
    generated = f"{name}("  # what dataclass writes when there is none
    assert doc.strip(), f"hilore_jax.{name} has no docstring"
    assert not doc.startswith(generated), f"hilore_jax.{name} has only the generated docstring"


@pytest.mark.newest
def test_import_is_light():
    code = f"import sys, hilore_jax; print(*sorted(set({LAZY!r}) & set(sys.modules)))"
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == []


@pytest.mark.newest
def test_the_suite_has_two_devices_and_checks_annotations():
    assert jax.device_count() == 2
    with pytest.raises(jaxtyping.TypeCheckError):
        hl.compiler_options(3)  # pyright: ignore[reportArgumentType]


@pytest.mark.gpu_target
def test_compiles_for_a_gpu_that_is_not_there(h200):
    matrix = jax.ShapeDtypeStruct((256, 512), jax.numpy.bfloat16, sharding=h200)
    compiled = jax.jit(lambda a: (a @ a.T).sum()).lower(matrix).compile()
    memory, text = compiled.memory_analysis(), compiled.as_text()
    assert memory is not None and memory.argument_size_in_bytes == 256 * 512 * 2
    assert text is not None and ("cublas" in text or "triton" in text)
    assert jax.default_backend() == "cpu"


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_source_file(path):
    lines = path.read_text().splitlines()
    assert len(lines) <= 300, "one concept per file: split it"
    assert not lines or lines[0].startswith(('"""', 'r"""')), "no module docstring"
    modules = imported_modules(path)
    if room(path) != "tracing":
        private = sorted(m for m in modules if m.startswith("jax._src"))
        assert private == [], "only tracing.py may read private modules of jax"
    floor = FLOORS.get(room(path))
    if path.name == "__init__.py" and path.parent == PACKAGE:
        return
    assert floor is not None, f"{room(path)!r} is on no floor: add it to FLOORS"
    for module in modules:
        if module.startswith("hilore_jax."):
            other = module.split(".")[1]
            assert FLOORS.get(other, 99) <= floor, f"{room(path)} (floor {floor}) imports {other}"
