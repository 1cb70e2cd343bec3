# Everything a newcomer types. `make` alone lists the targets; PYTHON=/path/to/python3.11 chooses the interpreter.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help venv ready run test test-all lint format bench gpu-check clean

export PYTHON
PY := .venv/bin/python

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: ready ## build or update .venv from requirements/, then check the machine
	@.venv/bin/rlq doctor

ready:
	@bash .ci/venv

run: ready ## train the embedded example: local Ray, ray job submit, progress bar (ARGS="..." goes to launch/run.py)
	@$(PY) launch/run.py $(ARGS)

test: ready ## the fast tests
	@$(PY) -m pytest -m "not slow" $(ARGS)

test-all: ready ## every test that runs without a GPU
	@$(PY) -m pytest $(ARGS)

lint: ready ## format check, lint and types
	@.venv/bin/ruff format --check .
	@.venv/bin/ruff check .
	@.venv/bin/pyright

format: ready ## rewrite the code the way lint wants it
	@.venv/bin/ruff format .
	@.venv/bin/ruff check --fix .

bench: ready ## measure; docs/results.md holds the results
	@$(PY) benchmarks/run.py $(ARGS)

gpu-check: ## the checks that need an NVIDIA GPU, with the python3 of the machine that has one
	@python3 tests/gpu/check.py $(ARGS)

clean: ## remove build products and caches; .venv and runs stay
	@rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	@find . -path ./.venv -prune -o -path ./runs -prune -o -name __pycache__ -type d -exec rm -rf {} +
