# Everything a fresh machine needs: Python 3.11 or newer, make and git.
#
#   make demo       environment, install, and the main job: methods compared on a real language model
#   make test       the same environment with the development tools, then the whole test suite
#   make test-fast  only the quick tests
#   make test-exhaustive  the cases that the whole suite only samples; takes long
#   make test-real  what needs the real language model, which it fetches
#   make test-hosts  runs over several hosts, in network namespaces; needs root and iproute2
#   make lint       ruff and the layers of imports          make types  mypy
#   make docs       the documentation as a site, build/site/index.html; a warning is an error
#   make support    runs every combination of parts and writes docs/support.md
#
# All targets are safe to repeat; what is installed already is not installed again.
# Choose another interpreter with `make demo PYTHON=python3.12`, another place with `VENV=dir`.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
MAKEFLAGS += --no-print-directory
.DEFAULT_GOAL := help

VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
PYTEST_ARGS ?=
# Test processes; each computes with one thread.
TEST_JOBS ?= 2

# One folder per revision of the code, so that a second `make demo` shows the results it has; with
# uncommitted changes every run gets a folder of its own.
REVISION := $(shell git describe --always --dirty --match '' 2>/dev/null || echo unknown-dirty)
ifndef DEMO_DIR
DEMO_DIR := $(if $(findstring dirty,$(REVISION)),outputs/demo/$(shell date +%Y%m%d-%H%M%S),outputs/demo/$(REVISION))
endif
export DEMO_DIR
DEMO_METHODS ?= ar,suffix,prompt_lookup,eagle3,adaptive,hf_generate,hf_prompt_lookup
DEMO_STRATEGIES ?= ar,speculative,specinfer,best_first,staged,prompt_lookup,hf_generate,hf_assisted

TORCH_VERSION := $(shell sed -n 's/^torch==//p' constraints.txt)
TORCH_INDEX ?=

.PHONY: help demo demo-real demo-toy test test-fast test-exhaustive test-real test-hosts support docs lint types format install install-dev clean

help:  ## this text
	@sed -n 's/^# \{0,1\}//p; /^$$/q' Makefile

# Not $(MAKE) itself: a recipe that names it is run by `make --dry-run` too, downloads included.
AGAIN := $(MAKE)

demo: install  ## methods compared on a real language model; without network on the bundled pair
	@if $(BIN)/specdec models install smollm2; then $(AGAIN) demo-real; else $(AGAIN) demo-toy; fi
	@echo "== table:  $(DEMO_DIR)/comparison.md    plot: $(DEMO_DIR)/comparison.png"
	@echo "== figures: $(DEMO_DIR)/comparison.json  every token: $(DEMO_DIR)/requests.jsonl"
	@echo "== next: . $(BIN)/activate    then: specdec list    specdec compare --help"

demo-real:
	@echo "== demo: SmolLM2-135M-Instruct answers; text of passes that accepted drafts is green"
	@$(BIN)/python docs/examples/watch.py
	@echo "== demo: $(DEMO_METHODS) on chat questions, on this machine's CPU"
	@$(BIN)/specdec compare "strategies=[$(DEMO_METHODS)]" model=smollm2 data=jsonl \
	  data.path=docs/examples/questions.jsonl data.field=question data.limit=4 max_new_tokens=96 \
	  output_dir=$(DEMO_DIR)

demo-toy:
	@echo "== demo WITHOUT A REAL MODEL, whose package could not be fetched: $(DEMO_STRATEGIES)"
	@echo "== on prompts from Python's standard library, with the bundled models, on this machine's CPU"
	@$(BIN)/specdec compare "strategies=[$(DEMO_STRATEGIES)]" data=stdlib data.limit=4 \
	  max_new_tokens=96 sampling=no_repeat4 repeats=2 threads=1 model.backend=auto output_dir=$(DEMO_DIR)

test: install-dev  ## the whole test suite
	@echo "== test: the whole suite, $(TEST_JOBS) at a time (make test-fast runs the quick part)"
	@$(BIN)/python -m pytest -n $(TEST_JOBS) --dist loadgroup $(PYTEST_ARGS)

test-fast: install-dev
	@echo "== test-fast: tests that are not marked slow, distributed or gpu"
	@$(BIN)/python -m pytest -m fast -n $(TEST_JOBS) --dist loadgroup $(PYTEST_ARGS)

test-exhaustive: install-dev
	@echo "== test-exhaustive: what make test runs a fixed sample of"
	@$(BIN)/python -m pytest -m exhaustive -n $(TEST_JOBS) --dist loadgroup $(PYTEST_ARGS)

test-real: install-dev
	@echo "== test-real: what decodes with a real language model"
	@$(BIN)/specdec models install smollm2
	@$(BIN)/python -m pytest -m real $(PYTEST_ARGS)

test-hosts: install-dev
	@echo "== test-hosts: runs over hosts in network namespaces (root; apt-get install iproute2)"
	@$(BIN)/python -m pytest -m hosts $(PYTEST_ARGS) tests/hosts

support: install-dev
	@echo "== support: every cell of the composition matrix, then docs/support.md"
	@$(BIN)/python -m tests.matrix.support

docs: $(VENV)/.installed-docs
	@echo "== docs: build/site"
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet

lint: install-dev
	@echo "== lint: ruff rules and formatting, import-linter"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/lint-imports --no-cache

format: install-dev
	@$(BIN)/ruff check --fix-only .
	@$(BIN)/ruff format .

types: install-dev
	@echo "== types: mypy"
	@$(BIN)/mypy

install: $(VENV)/.installed
install-dev: $(VENV)/.installed-dev

$(VENV)/.python:
	@python="$(PYTHON)"; \
	for candidate in python3 python3.11 python3.12 python3.13 python; do \
	  if [ -z "$$python" ] && $$candidate -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' \
	    >/dev/null 2>&1; then python=$$candidate; fi; \
	done; \
	if [ -z "$$python" ]; then \
	  echo "No Python 3.11 or newer with venv found; install one or name it: make PYTHON=/path/to/python"; exit 2; \
	fi; \
	echo "== environment: $(VENV) with $$($$python --version)"; \
	$$python -m venv $(VENV)
	@touch $@

# PyPI's torch for Linux brings CUDA libraries, which are gigabytes. A machine without a GPU does not
# need them: TORCH_INDEX=URL names the index of CPU wheels that PyTorch's install page gives.
$(VENV)/.torch: $(VENV)/.python constraints.txt
	@echo "== install: torch $(TORCH_VERSION) (the largest download)"
	@$(PIP) install --no-deps $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) \
	  -c constraints.txt torch==$(TORCH_VERSION)
	@touch $@

$(VENV)/.installed: $(VENV)/.torch pyproject.toml constraints.txt
	@echo "== install: specdec and what it needs (pinned in constraints.txt)"
	@$(PIP) install --progress-bar off -c constraints.txt -e . | sed "/already satisfied/d"
	@$(PIP) install --progress-bar off -c constraints.txt -e ".[onnx]" | sed "/already satisfied/d" || \
	  echo "== ONNX Runtime cannot be installed here: model.backend=auto runs passes in PyTorch"
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed pyproject.toml constraints.txt
	@echo "== install: development tools"
	@$(PIP) install --progress-bar off -c constraints.txt -e ".[dev]" | sed "/already satisfied/d"
	@touch $@

$(VENV)/.installed-docs: $(VENV)/.installed pyproject.toml constraints.txt
	@echo "== install: documentation tools"
	@$(PIP) install --progress-bar off -c constraints.txt -e ".[docs]" | sed "/already satisfied/d"
	@touch $@

clean:  ## removes the environment and caches, not the results under outputs/
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache
