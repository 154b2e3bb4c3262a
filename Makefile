# Needs python3 (3.11 or newer), make and git. Everything else goes into .venv, made on demand.

PYTHON ?= python3
PYTEST_ARGS ?= -n auto --maxprocesses 8

VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check

BENCH := build/bench
BENCH_ARGS ?=
GATEWAYS := $(BENCH)/gateways

CLIENTS := build/clients
NODE_CLIENTS := tests/clients/node
NODE_MODULES := $(NODE_CLIENTS)/node_modules/.package-lock.json

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo docs test check lint types clients bench bench-gateways

help: ## show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' Makefile | while IFS='|' read -r name text; do \
	  printf '%-22s %s\n' "$$name" "$$text"; done

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

clients: $(NODE_MODULES) $(CLIENTS)/.installed ## install other clients (Node, Databricks), so that no test skips them

bench: $(VENV)/.installed $(BENCH)/upstream $(BENCH)/load ## measure what legato costs, beside nginx and the usual loop
	@$(BIN)/python benchmarks/run.py $(BENCH_ARGS)

bench-gateways: $(VENV)/.installed $(BENCH)/upstream $(BENCH)/load $(GATEWAYS)/.installed ## the same beside LiteLLM
	@$(BIN)/python benchmarks/run.py --gateways $(BENCH_ARGS)

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

$(BENCH)/%: benchmarks/%.c benchmarks/bench.h
	@command -v gcc >/dev/null || { echo "gcc not found: apt-get install build-essential" >&2; exit 1; }
	@mkdir -p $(BENCH)
	@gcc -O2 -Wall -Wextra -o $@ $<

# A gateway brings some hundred packages, so it lives apart from everything else.
$(GATEWAYS)/.installed: benchmarks/gateways.txt | $(BIN)/python
	@echo "==> installing LiteLLM into $(GATEWAYS)"
	@$(BIN)/python -m venv --clear $(GATEWAYS)
	@$(GATEWAYS)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@

# npm writes this file last.
$(NODE_MODULES): $(NODE_CLIENTS)/package.json $(NODE_CLIENTS)/package-lock.json
	@command -v npm >/dev/null || { echo "npm not found: install Node 20 or newer" >&2; exit 1; }
	@echo "==> installing clients into $(NODE_CLIENTS)"
	@cd $(NODE_CLIENTS) && npm ci --silent
	@touch $@

# databricks-openai wants an older OpenAI SDK than the tests, so it lives apart.
$(CLIENTS)/.installed: tests/clients/python/requirements.txt | $(BIN)/python
	@echo "==> installing clients into $(CLIENTS)"
	@$(BIN)/python -m venv --clear $(CLIENTS)
	@$(CLIENTS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r $<
	@touch $@
