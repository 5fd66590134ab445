# Two commands do everything: `make demo` and `make test`. All targets share one virtual environment.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test check lint format pretrain clean

$(VENV)/.installed: pyproject.toml
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -e ".[dev]"
	touch $@

## The main job on the shipped checkpoint: locate, plan, splice, train, evaluate, export, into runs/quickstart/.
demo: $(VENV)/.installed
	$(BIN)/surgery run recipes/quickstart.yaml
	$(BIN)/python bench/compare_runs.py runs/quickstart checkpoints/quickstart

## All tests, on pico models, without a network.
test: $(VENV)/.installed
	$(BIN)/python -m pytest -n 2 tests

## What CI runs: format, lint, types, tests.
check: $(VENV)/.installed lint test

lint: $(VENV)/.installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(VENV)/.installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

## Makes checkpoints/pico-mamba2 again. Not part of any check.
pretrain: $(VENV)/.installed
	$(BIN)/surgery pretrain recipes/pretrain-pico.yaml --to checkpoints/pico-mamba2

clean:
	rm -rf runs $(VENV) .pytest_cache .ruff_cache .mypy_cache build *.egg-info
