# Every target does its own set-up. Needs Python 3.10 or newer, a C++ compiler, CMake and make.

PYTHON ?= python3
VENV := .venv
BUILD := build
JOBS ?= $(shell nproc 2>/dev/null || echo 2)
# Extra arguments for pip, such as an index with CPU builds of torch.
PIP_ARGS ?=
# More programs of llama.cpp for make build, such as "llama-mtmd-cli llama-tts".
TARGETS ?= $(ITQ3S_TARGETS)
PYTEST_ARGS ?=
# Processes that run the test files; each takes about a core and two GiB.
TEST_WORKERS ?= 2
EVAL_ARGS ?=
# The model of make real: a name that scripts/eval/real.py knows, a Hugging Face folder, or hf:organisation/name.
REAL_MODEL ?= qwen2.5-coder-1.5b
REAL_ARGS ?=
# Seconds of make fuzz in all, kills of each kind of make faults.
SECONDS ?= 600
ROUNDS ?= 60
BENCH_ARGS ?=
CUDA_CHECK_ARGS ?=
HIP_CHECK_ARGS ?=
# For make vulkan-check: --quick, --device.
VULKAN_CHECK_ARGS ?=

PY := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed
# CMake's own lines, but for those of the build of llama.cpp, are for whoever asks: cmake -S ggml-patch -B build/cmake.
CONFIGURE = ITQ3S_TARGETS="$(TARGETS)" cmake -S ggml-patch -B $(BUILD)/cmake -DCMAKE_BUILD_TYPE=Release \
	-DPython3_EXECUTABLE=$(CURDIR)/$(PY) --log-level=NOTICE > /dev/null
MAKEFLAGS += --no-print-directory
# Python keeps what it compiles: pip is told to leave it to the first use, because most is never used.
unexport PYTHONDONTWRITEBYTECODE
C_FILES := git ls-files '*.c' '*.h' '*.cpp' '*.cu' '*.cuh'

.DEFAULT_GOAL := help
.PHONY: help setup build demo test test-all test-unit eval real bench test-arm cuda-check hip-check vulkan-check releases mingw-check gpu-pack fuzz faults lint format clean distclean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

$(INSTALLED): pyproject.toml constraints.txt requirements-tools.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "error: $(PYTHON) is %d.%d; Python 3.10 or newer is needed, try make PYTHON=python3.12" % sys.version_info[:2])'
	@echo "setting up $(VENV)"
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@$(PY) -m pip install -qq --no-compile --disable-pip-version-check $(PIP_ARGS) --require-hashes -r requirements-tools.txt
	@$(PY) -m pip install -qq --no-compile --disable-pip-version-check $(PIP_ARGS) --no-build-isolation -c constraints.txt -e '.[dev]'
	@touch $@

setup: $(INSTALLED) ## create .venv and install the package

build: $(INSTALLED) ## fetch, patch and build llama.cpp into build/bin; TARGETS="..." adds programs
	@$(CONFIGURE)
	@CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) cmake --build $(BUILD)/cmake

demo: $(INSTALLED) ## convert models/demo-llama to ITQ3_S and let llama.cpp write with it
	@$(CONFIGURE)
	@CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) cmake --build $(BUILD)/cmake --target demo
	@$(PY) scripts/demo.py

test: build ## run the tests
	@$(PY) -m pytest --slow -n $(TEST_WORKERS) --dist loadfile --durations 15 $(PYTEST_ARGS)

test-all: test ## run the tests, then those that repeat them over more architectures, types and sizes
	@$(PY) -m pytest -m long -n $(TEST_WORKERS) --dist loadfile --durations 15 $(PYTEST_ARGS)

test-unit: $(INSTALLED) ## run the tests that need no build, but for the slow ones
	@$(PY) -m pytest tests/unit --durations 10 $(PYTEST_ARGS)

eval: build ## compare all types on the bundled model and its twins: KL divergence, perplexity, sizes
	$(PY) scripts/eval/bundled.py models/demo-llama $(EVAL_ARGS)

real: build ## compare types on a real model, REAL_MODEL; REAL_ARGS=--quick takes six rows
	$(PY) scripts/eval/real.py $(REAL_MODEL) $(REAL_ARGS)

bench: build ## measure the CPU kernels beside llama.cpp's types
	$(PY) scripts/bench/cpu.py $(BENCH_ARGS)

test-arm: $(INSTALLED) ## run the tests of the NEON kernels under qemu-user
	$(PY) scripts/check/arm.py

cuda-check: $(INSTALLED) ## compile the CUDA sources for sm_80, sm_90 and sm_120 and count instructions, without a GPU
	$(PY) scripts/check/cuda.py $(CUDA_CHECK_ARGS)

hip-check: $(INSTALLED) ## compile the CUDA sources as HIP for gfx90a and gfx1100, without a GPU
	$(PY) scripts/check/hip.py $(HIP_CHECK_ARGS)

vulkan-check: build ## build the Vulkan backend and run it on Mesa's software device, without a GPU
	$(PY) scripts/check/vulkan/check.py $(VULKAN_CHECK_ARGS)

releases: $(INSTALLED) ## try the patches on the newest releases of llama-cpp-python
	$(PY) scripts/check/releases.py

mingw-check: $(INSTALLED) ## compile the patched CPU backend for Windows, without Windows
	$(PY) scripts/check/mingw.py

gpu-pack: build ## pack what scripts/check/gpu.py needs on a machine with a GPU
	$(PY) scripts/check/gpu.py pack build/gpu-check

fuzz: build ## try damaged data for SECONDS on kernels, encoders, loader and commands, under the sanitizers
	$(PY) scripts/check/fuzz.py --seconds $(SECONDS)

faults: build ## kill conversions and calibrations ROUNDS times, fill disks, write twice
	$(PY) -m pytest tests/faults -m long --rounds $(ROUNDS)

lint: $(INSTALLED) ## check style and types
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports --no-cache > /dev/null || $(VENV)/bin/lint-imports --no-cache
	$(VENV)/bin/clang-format --dry-run --Werror $$($(C_FILES))

format: $(INSTALLED) ## put the Python, C, C++ and CUDA files into the checked format
	$(VENV)/bin/ruff check --fix --quiet . || true
	$(VENV)/bin/ruff format .
	$(VENV)/bin/clang-format -i $$($(C_FILES))

clean: ## remove what was built, keep .venv
	rm -rf $(BUILD) .pytest_cache .mypy_cache .ruff_cache .hypothesis

distclean: clean ## remove .venv too
	rm -rf $(VENV) *.egg-info
