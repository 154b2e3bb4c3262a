# Needs python3 (3.11 or newer), make and git. Everything else goes into .venv, made on demand.

PYTHON ?= python3
PYTEST_ARGS ?= -n auto --maxprocesses 8

VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo docs test check lint types

help: ## show this list
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1|\2/p' Makefile | while IFS='|' read -r name text; do \
	  printf '%-14s %s\n' "$$name" "$$text"; done

demo: $(VENV)/.installed ## play one long task through legato, with no account anywhere
	@$(BIN)/legato demo

docs: $(VENV)/.installed ## make the parts of docs/ that come from the code
	@$(BIN)/python docs/generate.py

test: $(VENV)/.installed-dev ## run the tests
	@$(BIN)/python -m pytest $(PYTEST_ARGS)

check: lint types test ## lint, check types, run the tests

lint: $(VENV)/.installed-dev ## ruff: rules and format
	@echo "==> ruff"
	@$(BIN)/ruff check --quiet
	@$(BIN)/ruff format --check --quiet

types: $(VENV)/.installed-dev ## mypy
	@echo "==> mypy"
	@$(BIN)/mypy

$(BIN)/python:
	@command -v "$(PYTHON)" >/dev/null || { \
	  echo "$(PYTHON) not found: apt-get install python3 python3-venv" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "$(PYTHON) is too old, legato needs 3.11 or newer: make PYTHON=python3.11 ..." >&2; exit 1; }
	@echo "==> making $(VENV)"
	@"$(PYTHON)" -m venv --clear $(VENV) >/dev/null 2>&1 || { rm -rf $(VENV); \
	  echo "$(PYTHON) -m venv does not work here: apt-get install python3-venv" >&2; exit 1; }

# The stamps make a second run quick; a changed pyproject.toml installs anew.
$(VENV)/.installed: pyproject.toml | $(BIN)/python
	@echo "==> installing legato"
	@$(INSTALL) --editable .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml | $(BIN)/python
	@echo "==> installing legato and what its tests need"
	@$(INSTALL) --editable '.[dev]'
	@touch $@ $(VENV)/.installed
