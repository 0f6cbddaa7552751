# One command per purpose; `make help` lists them. Everything is set up on first use, in .venv.

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help check quick test soak lint docs bench screens gpu mutation coverage pairs tag vllm vllm-tests clean

# A Python to build .venv with: `make PYTHON=python3.12 check` to choose one yourself.
PYTHONS := $(or $(PYTHON),python3 python3.13 python3.12 python3.11)
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
BASE := $(VENV)/.base
DEV := $(VENV)/.dev
MEASURE := $(VENV)/.measure
SCREENS := $(VENV)/.screens

# The release of vLLM that `make vllm` runs: any since 0.11.0 (engines/adapters/vllm_releases.py).
VLLM ?= 0.19.1
VLLM_VENV := .venv-vllm-$(VLLM)
VLLM_BIN := $(VLLM_VENV)/bin
VLLM_DONE := $(VLLM_VENV)/.done
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1

help: ## Show this list
	@echo "usage: make <target>    (ARGS='...' is handed on to check, vllm, vllm-tests, test, bench, mutation, coverage, pairs)"
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-10s %s\n", $$1, $$2 }' Makefile

check: $(BASE) ## Hold our engine to the specification: `blockstep check`
	@$(BIN)/blockstep check $(ARGS)

test: $(DEV) ## Run the tests
	@$(BIN)/python -m pytest -n 2 $(ARGS)

quick: $(DEV) ## Run the tests that are quick, in three minutes on two cores
	@$(BIN)/python -m pytest -n 2 --quick $(ARGS)

soak: $(DEV) ## Run what takes longer than a test may: more seeds, and every sampled case (not in CI)
	@$(BIN)/python -m pytest -n 2 -m "soak or sampled" --whole $(ARGS)

lint: $(DEV) ## Check style, types, imports and English
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-cache
	@$(BIN)/python .ci/words.py

docs: $(DEV) ## Build the documentation into docs/_build/html
	@$(BIN)/sphinx-build -q -W --keep-going -n -b html -d docs/_build/doctrees docs docs/_build/html
	@echo "docs: docs/_build/html/index.html"

screens: $(SCREENS) ## Draw the pages in chromium and leave pictures in docs/_build/screens (apt install chromium)
	@$(BIN)/python -m pytest --whole -m "soak or not soak" tests/conformance/report/test_screens.py $(ARGS)

NEEDING_A_GPU := $(addprefix benchmarks/,attention.py engine.py kernels.py)
bench: $(DEV) ## Run every benchmark that needs no GPU (the others are parts of `make gpu`)
	@set -- $(filter-out benchmarks/_% $(NEEDING_A_GPU) benchmarks/commands.py,$(wildcard benchmarks/*.py)); \
	if [ $$# -eq 0 ]; then echo "make bench: no benchmark in benchmarks/" >&2; exit 1; fi; \
	for script do echo "== $$script"; $(BIN)/python "$$script" $(ARGS) || exit; done

# With the Python that has torch for this GPU, since .venv may hold torch for CPUs. SANITIZER names
# compute-sanitizer where it is not on the path, and SANITIZER= leaves it out. RESULTS names the folder
# of the results.
GPU_PYTHON ?= python3
SANITIZER ?= compute-sanitizer
export GPU_PYTHON SANITIZER
gpu: ## Run kernels, scheduler and engine on a GPU in parts, and print the aims (GPU_PYTHON=python3)
	@.ci/gpu $(ARGS)

mutation: $(DEV) ## Mutate spec, engines and checks: ARGS='spec --sample 100' (hours; see its page)
	@$(BIN)/python -m benchmarks.mutation $(ARGS)

pairs: $(DEV) ## What is legal together and what is drawn together (2 minutes; see its page)
	@$(BIN)/python -m benchmarks.pairs $(ARGS)

coverage: $(MEASURE) ## Branches of the specification that `blockstep check` reaches (3 minutes)
	@$(BIN)/python -m benchmarks.coverage $(ARGS)

commands: $(DEV) ## Every command on five engines (ARGS="--nano-vllm CHECKOUT --mini-sglang CHECKOUT")
	@$(BIN)/python -m benchmarks.commands $(ARGS)

tag: ## Tag this commit as the version of pyproject.toml (CHANGELOG.md and CITATION.cff must name it)
	@.ci/tag

# The seed of its hash chain is taken from PYTHONHASHSEED.
vllm: $(VLLM_DONE) ## Hold the scheduler of a vLLM release to it (VLLM=0.19.1; installs 3 GB)
	@PYTHONHASHSEED=0 VLLM_LOGGING_LEVEL=ERROR \
		$(VLLM_BIN)/blockstep check --engine vllm --profile vllm-$(VLLM) $(ARGS)

# `make test` skips these: its environment has no vLLM.
VLLM_TESTS := $(wildcard tests/conformance/engines/adapters/test_vllm*.py) \
	$(addprefix tests/,conformance/report/test_headlines.py conformance/search/test_standalone.py \
	$(addprefix impl/serving/test_,sockets.py wire.py))
vllm-tests: $(VLLM_DONE) ## Run the tests that need a vLLM release (VLLM=0.19.1; installs 3 GB)
	@PYTHONHASHSEED=0 VLLM_LOGGING_LEVEL=ERROR $(VLLM_BIN)/python -m pytest -n 2 $(VLLM_TESTS) $(ARGS)

clean: ## Remove .venv, those of vLLM, caches and built files
	@rm -rf $(VENV) .venv-vllm-* docs/_build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	@find spec impl kernels conformance tests benchmarks docs -type d -name __pycache__ \
		-prune -exec rm -rf {} + 2>/dev/null || true

# $(call create_venv,FOLDER): a virtual environment, unless one is there.
define create_venv
	if ! $(1)/bin/python -m pip --version >/dev/null 2>&1; then \
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
		echo "setup: $(1) with $$("$$found" --version)"; \
		"$$found" -m venv $(1) || exit 1; \
	fi
endef

# What `blockstep check` needs, and no more.
$(BASE): pyproject.toml
	@$(call create_venv,$(VENV))
	@echo "setup: blockstep"
	@$(BIN)/python -m pip install -qq -e .
	@touch $@

# Tools for tests, lints and docs. pip learnt dependency groups in 25.1; a fresh .venv may be older.
$(DEV): pyproject.toml | $(BASE)
	@echo "setup: tools for tests, lints and docs"
	@$(BIN)/python -m pip install -qq --upgrade 'pip>=25.1'
	@$(BIN)/python -m pip install -qq --group dev
	@touch $@

# The tool of `make coverage`.
$(MEASURE): pyproject.toml | $(DEV)
	@echo "setup: tools for measuring"
	@$(BIN)/python -m pip install -qq --group measure
	@touch $@

# What drives the browser of `make screens`.
$(SCREENS): pyproject.toml | $(DEV)
	@$(BIN)/python -m pip install -qq --group screens
	@touch $@

# A release that is too old for the adapter is refused before anything is downloaded. vLLM comes last
# and alone: its declared dependencies would bring CUDA libraries of its own choice, and whatever is
# installed after it makes pip list those that are not there as if something had gone wrong.
$(VLLM_DONE): pyproject.toml | $(BASE)
	@$(BIN)/python -c 'import sys; \
		from blockstep.conformance.engines.adapters.vllm_releases import get_release_problem; \
		sys.exit(get_release_problem("$(VLLM)"))'
	@$(call create_venv,$(VLLM_VENV))
	@echo "setup: torch, vllm $(VLLM) and what its scheduler imports, about 3 GB: this takes minutes"
	@$(BIN)/python -c 'from blockstep.conformance.engines.adapters.vllm_releases import get_release; \
		print(*get_release("$(VLLM)").packages, sep="\n")' > $(VLLM_VENV)/packages.txt
	@$(VLLM_BIN)/python -m pip install -q torch==2.13.0
	@$(VLLM_BIN)/python -m pip install -q -r $(VLLM_VENV)/packages.txt
	@$(VLLM_BIN)/python -m pip install -qq --upgrade 'pip>=25.1'
	@$(VLLM_BIN)/python -m pip install -qq -e . --group vllm-tests
	@$(VLLM_BIN)/python -m pip install -q --no-deps 'vllm==$(VLLM)'
	@touch $@
