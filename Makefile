# Every target does its own set-up (scripts/setup): a fresh Debian with Python 3.11, make and gcc is enough.
# ARGS="…" is passed on: make up ARGS="--port 8080", make test ARGS="tests/common -x".
.DEFAULT_GOAL := help
SHELL := /bin/sh
BIN := .venv/bin
ARGS ?=
WORKERS ?= 2
export ENGINE TORCH_INDEX PYTHON

.PHONY: help setup up models test lint format soak explore gpu bench clean distclean

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## the environment in .venv (TORCH_INDEX=URL for CPU-only torch, ENGINE=gpu for CUDA)
	@scripts/setup

up: setup ## everything, ready on 127.0.0.1:8000; Ctrl-C stops it
	@exec $(BIN)/talaria up $(ARGS)

models: setup ## prepare the configured models and stop
	@exec $(BIN)/talaria up --models-only $(ARGS)

lint: setup ## ruff, formatting, types, import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy libs services
	$(BIN)/lint-imports

format: setup ## let ruff mend what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test: lint ## linters, then the suite, whole files at a time in WORKERS=2 processes (15 minutes at most on two cores)
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE \
	$(BIN)/python -m pytest -m "not soak and not gpu" -n $(WORKERS) --dist loadscope --no-loadscope-reorder $(ARGS)

soak: setup ## the long ones: thousands of switches, chaos, compose
	$(BIN)/python -m pytest -m soak --timeout 3600 $(ARGS)

explore: setup ## the property tests with other examples than in `make test`, and many more
	HYPOTHESIS_PROFILE=explore $(BIN)/python -m pytest -m "hypothesis and not soak and not gpu" -n $(WORKERS) $(ARGS)

gpu: setup ## what needs a CUDA device
	$(BIN)/python -m pytest -m gpu $(ARGS)

bench: setup ## the benchmarks, into bench/results/
	$(BIN)/python -m bench $(ARGS)

clean: ## caches and the state of `make up` (not the environment, not the models)
	rm -rf .talaria .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

distclean: clean ## clean, and the environment
	rm -rf .venv
