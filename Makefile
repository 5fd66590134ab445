# Two commands do everything: `make demo` and `make test`. All targets share one virtual environment.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test check lint format pretrain rounding compat newest fuzz kills mutants upstream real-shape gpu bench evidence docs clean

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
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile tests

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
	$(BIN)/surgery pretrain recipes/pretrain-pico.yaml --to checkpoints/pico-mamba2 --overwrite

## The unit tests as they would round on another processor (tests/support/rounding.py), with other kernels, and with two threads.
## Twenty minutes on 2 cores.
rounding: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile -p tests.support.rounding tests/unit
	for capability in default avx2 avx512; do \
		ATEN_CPU_CAPABILITY=$$capability OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile tests/unit || exit 1; done
	OMP_NUM_THREADS=2 $(BIN)/python -m pytest tests/unit

## The classes, the locating and the battery over all families, on the oldest transformers that is supported.
compat: $(VENV)/.installed
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --upgrade --target .compat "transformers==5.21.*"
	OMP_NUM_THREADS=1 PYTHONPATH=$(CURDIR)/.compat $(BIN)/python -m pytest -n 2 tests/unit/hybrid tests/unit/models \
		tests/unit/locate tests/unit/interventions/test_hooks.py tests/unit/interventions/test_alterations.py tests/unit/splice/test_graft.py tests/integration/test_famil*.py

## The hybrids, what is read and written of them, and exports, on the newest torch that PyPI serves: 4 GB, in .newest.
newest: $(VENV)/.installed
	test -x .newest/bin/python || $(BIN)/python -m venv .newest
	.newest/bin/pip install --quiet --disable-pip-version-check --upgrade torch
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" > $$(echo .newest/lib/python3*/site-packages)/zz_rest.pth
	OMP_NUM_THREADS=1 PYTHONPATH=$(CURDIR) .newest/bin/python -m pytest -n 2 tests/unit/hybrid tests/unit/models \
		tests/unit/test_*.py tests/unit/train tests/integration/test_export.py tests/integration/test_famil*.py

## Mutated inputs for every command, 2,000 cases in five minutes on one core; options in FUZZ='...', such as
## FUZZ='--seed 3 --only exports --cases 200', or FUZZ='--seed 3 --case 1234' to see one again. docs/RELIABILITY.md.
fuzz: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz $(FUZZ)

## Every stage of a run interrupted in every way at five moments, then resumed: half an hour on one core. Root mounts a
## small disk to fill. KILLS='--folder runs/kills' goes on after an interruption. docs/RELIABILITY.md.
kills: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.kills $(KILLS)

## Mutation testing of attention, losses, sweep, plan and run folder: an hour on one core; continues after an interruption.
## Options in MUTANTS='--only plan --sample 60 --seed 3'. docs/RELIABILITY.md.
mutants: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.mutants $(MUTANTS)

## transformers' own common model tests, from its source distribution, over every family: plain beside hybrid. Five minutes
## on one core; options in UPSTREAM='--families mamba2 --checkout ../transformers'.
upstream: $(VENV)/.installed
	$(BIN)/python -m bench.upstream $(UPSTREAM)

## recipes/mamba2-130m.yaml, unchanged, on a planted checkpoint of that shape and format, into runs/real-shape/.
real-shape: $(VENV)/.installed
	OMP_NUM_THREADS=2 $(BIN)/python -m bench.speed.real_shape runs/real-shape

## The GPU bench, under 9 minutes, with or without a virtual environment; options in GPU='...'. See docs/BENCHMARKS.md.
gpu:
	$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) bench/gpu $(GPU)

## Ratios, in one run each: locating against the paper's notebook (twenty minutes on one core), a hybrid's training step
## against its base's (a minute).
bench: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m bench.speed.locate $(BENCH)
	OMP_NUM_THREADS=1 $(BIN)/python -m bench.speed.train $(BENCH)

## Which way of choosing a site wins: every arm, hours on one core; goes on after an interruption. docs/EVIDENCE.md.
evidence: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m bench.studies.site_selection $(EVIDENCE)

## The documentation as a site, in site/: open site/index.html. Fails on a broken link or anchor.
docs: $(VENV)/.installed
	NO_MKDOCS_2_WARNING=true $(BIN)/mkdocs build --strict

clean:
	rm -rf runs site $(VENV) .compat .newest .upstream .pytest_cache .ruff_cache .mypy_cache build *.egg-info
