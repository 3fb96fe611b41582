"""A missing extra is an error that names the extra and the command."""

import sys

import pytest

from hilore_jax._extras import require


def test_returns_the_module_asked_for():
    assert require("json.decoder", "tasks", "this test") is sys.modules["json.decoder"]


def test_missing_module_names_the_extra_and_the_command():
    with pytest.raises(ImportError, match="the Q4_1 weights") as caught:
        require("no_such_module.inner", "gguf", "reading the Q4_1 weights")
    message = str(caught.value)
    assert "'no_such_module.inner', which is not installed" in message
    assert 'pip install "hilore_jax[gguf]"' in message
    assert caught.value.name == "no_such_module.inner"


def test_broken_module_keeps_its_own_cause(tmp_path, monkeypatch):
    (tmp_path / "broken_plugin.py").write_text("import a_dependency_that_is_missing\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match="installed but does not import") as caught:
        require("broken_plugin", "triton", "the kernel")
    assert "a_dependency_that_is_missing" in str(caught.value)
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_missing_submodule_of_an_installed_package(tmp_path, monkeypatch):
    (tmp_path / "old_package.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match=r"old_package\.new_part"):
        require("old_package.new_part", "tasks", "the task")
