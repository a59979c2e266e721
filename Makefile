# Each target works alone on a fresh machine with Python 3.11 or later. pip takes its own settings from the
# environment as usual (PIP_INDEX_URL, PIP_FIND_LINKS, ...).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --constraint constraints.txt
INPUTS := pyproject.toml constraints.txt
# Half as many again as cores, at least three, one file each, in the order that tests/conftest.py gives: a good part of the
# tests' time is spent waiting for ranks, deadlines and slow links.
WORKERS ?= $(shell $(PYTHON) -c 'import os; print(max(3, (os.cpu_count() or 1) * 3 // 2))')
# At most ten tests that fail run once more, alone; CONTRIBUTING.md says why.
# Compiled first, also where PYTHONDONTWRITEBYTECODE is set (as in many images): hundreds of processes that the tests start
# would compile each module anew.
PYTEST = $(BIN)/python -m compileall -q src tests && $(BIN)/python tests/twice.py '--numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder'

NEWEST := .venv-newest-torch

.PHONY: demo test test-long test-all test-third-party test-newest-torch lint lint-rules lint-form lint-types lint-arrows format clean

demo: $(VENV)/.installed-demo
	$(BIN)/hocket train edsr -n 2

test: $(VENV)/.installed-dev
	$(PYTEST) -m 'not long and not third_party' $(PYTEST_ARGS)

# What takes more than some seconds of a core: whole matrices of plans, several hosts, torch's own suite of tests. CI runs it too.
test-long: $(VENV)/.installed-dev
	$(PYTEST) -m long $(PYTEST_ARGS)

# Both in one run, for CI: each worker collects the tests and loads what ranks need once, and what waits has more beside it.
test-all: $(VENV)/.installed-dev
	$(PYTEST) -m 'not third_party' $(PYTEST_ARGS)

# Accelerate, Transformers, ignite, Lightning, torchmetrics, Keras and Ray on the backend, against Gloo; they are installed for it.
test-third-party: $(VENV)/.installed-dev
	$(PIP) --group third-party
	$(BIN)/python tests/twice.py '--numprocesses $(WORKERS)' -m third_party $(PYTEST_ARGS)

# The backend and a sample of the rest on the newest torch of PyPI, in an environment of its own (6 GB): CI has 2.13.
NEWEST_TESTS := tests/comm tests/e2e tests/workload tests/parallel/data tests/parallel/partition/tensor \
	tests/parallel/compose/test_trainer.py tests/keras/test_history.py
test-newest-torch:
	$(PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/python -m pip install --quiet 'pip>=25.1'
	$(NEWEST)/bin/python -m pip install --quiet --upgrade torch
	$(NEWEST)/bin/python -m pip install --quiet --editable '.[workloads,bench,fabric]' --group dev
	$(NEWEST)/bin/python tests/twice.py '--numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder' \
		-m 'not long and not third_party' $(NEWEST_TESTS) $(PYTEST_ARGS)
	$(NEWEST)/bin/python -m pytest -q -m long tests/torch_suite

lint: lint-rules lint-form lint-types lint-arrows

lint-rules: $(VENV)/.installed-dev
	$(BIN)/python -m ruff check

lint-form: $(VENV)/.installed-dev
	$(BIN)/python -m ruff format --check

lint-types: $(VENV)/.installed-dev
	$(BIN)/python -m mypy

lint-arrows: $(VENV)/.installed-dev
	$(BIN)/python -c 'from importlinter.cli import lint_imports_command as lint; lint()'

format: $(VENV)/.installed-dev
	$(BIN)/python -m ruff check --fix
	$(BIN)/python -m ruff format

clean:
	rm -rf $(VENV) $(NEWEST) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "hocket needs Python 3.11 or later; say which with: make PYTHON=python3.12 ..." >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet 'pip>=25.1'  # the first pip that reads dependency groups

# A stamp is newer than what was installed from, so that a second run installs nothing.
$(VENV)/.installed-demo: $(INPUTS) | $(VENV)/bin/python
	$(PIP) --editable '.[workloads]'
	@touch $@

$(VENV)/.installed-dev: $(INPUTS) | $(VENV)/bin/python
	$(PIP) --editable '.[workloads,bench,fabric]' --group dev
	@touch $@ $(VENV)/.installed-demo
