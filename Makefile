# One command per purpose; `make help` lists them. Everything is set up on first use, in .venv.

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help check test lint docs bench clean

# A Python to build .venv with: `make PYTHON=python3.12 check` to choose one yourself.
PYTHONS := $(or $(PYTHON),python3 python3.13 python3.12 python3.11)
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
BASE := $(VENV)/.base
DEV := $(VENV)/.dev

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1

help: ## Show this list
	@echo "usage: make <target>    (ARGS='...' is handed on to check, test and bench)"
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  %-8s %s\n", $$1, $$2 }' Makefile

check: $(BASE) ## Hold our engine to the specification: `blockstep check`
	@$(BIN)/blockstep check $(ARGS)

test: $(DEV) ## Run the tests
	@$(BIN)/python -m pytest -n 2 $(ARGS)

lint: $(DEV) ## Check style, types and who imports whom
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-cache

docs: $(DEV) ## Build the documentation into docs/_build/html
	@$(BIN)/sphinx-build -q -W --keep-going -n -b html -d docs/_build/doctrees docs docs/_build/html
	@echo "docs: docs/_build/html/index.html"

bench: $(DEV) ## Run every benchmark
	@set -- $(filter-out benchmarks/_%,$(wildcard benchmarks/*.py)); \
	if [ $$# -eq 0 ]; then echo "make bench: no benchmark in benchmarks/" >&2; exit 1; fi; \
	for script do echo "== $$script"; $(BIN)/python "$$script" $(ARGS) || exit; done

clean: ## Remove .venv, caches and built files
	@rm -rf $(VENV) docs/_build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	@find spec impl kernels conformance tests benchmarks docs -type d -name __pycache__ \
		-prune -exec rm -rf {} + 2>/dev/null || true

# What `blockstep check` needs, and no more.
$(BASE): pyproject.toml
	@if ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
		found=; \
		for python in $(PYTHONS); do \
			if "$$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' \
				2>/dev/null; then found=$$python; break; fi; \
		done; \
		if [ -z "$$found" ]; then \
			echo "make: Blockstep needs Python 3.11, 3.12 or 3.13; tried: $(PYTHONS)." >&2; \
			echo "      Name one with: make PYTHON=/path/to/python3.12 <target>" >&2; \
			exit 1; \
		fi; \
		echo "setup: $(VENV) with $$("$$found" --version)"; \
		"$$found" -m venv $(VENV) || exit 1; \
	fi
	@echo "setup: blockstep"
	@$(BIN)/python -m pip install -qq -e .
	@touch $@

# Tools for tests, lints and docs. pip learnt dependency groups in 25.1; a fresh .venv may be older.
$(DEV): pyproject.toml | $(BASE)
	@echo "setup: tools for tests, lints and docs"
	@$(BIN)/python -m pip install -qq --upgrade 'pip>=25.1'
	@$(BIN)/python -m pip install -qq --group dev
	@touch $@
