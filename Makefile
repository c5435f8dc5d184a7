# make demo   SGLang serves a tiny DeepSeek-V3 through this backend, on CPU ranks
# make test   every quick test
#
# Both create what they need (.venv) on first use. PYTHON=/path/to/python3.11 chooses the interpreter.
# ARGS passes options on: make demo ARGS="--keep", make test ARGS="-k ring -x".

SHELL := /bin/bash
VENV ?= .venv
BIN := $(VENV)/bin
ARGS ?=
export VENV

.PHONY: help demo test test-engine test-all lint format bench docs env env-sglang clean

help:
	@sed -n 's/^# make/make/p' Makefile
	@echo "make test-engine / test-all   tests that start real servers / everything this machine can run"
	@echo "make lint / format            ruff, mypy --strict, import contracts / apply ruff's fixes"
	@echo "make bench                    measure beside gloo and MPI, write benchmarks/RESULTS.md"
	@echo "make docs                     regenerate the tables in the documentation"
	@echo "make env / env-sglang         only install: for development / with SGLang on CPU"
	@echo "make clean                    remove caches and build outputs, keep $(VENV)"

env:
	@scripts/install dev

env-sglang:
	@scripts/install sglang-cpu

demo: env-sglang
	@$(BIN)/uccl-ep demo $(ARGS)

# tests marked "engine" skip themselves, with the reason, where SGLang is not installed
test: env
	@$(BIN)/pytest -m "not slow" $(ARGS)

test-engine: env-sglang
	@$(BIN)/pytest -m engine $(ARGS)

test-all: env-sglang
	@$(BIN)/pytest $(ARGS)

lint: env
	@scripts/lint

# writes benchmarks/results/*.json and benchmarks/RESULTS.md; some minutes, on a machine with nothing else to do
bench: env
	@$(BIN)/python benchmarks/run.py $(ARGS)

docs: env
	@$(BIN)/python scripts/docs.py

format: env
	@$(BIN)/ruff check --fix --quiet .
	@$(BIN)/ruff format --quiet .

clean:
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
