# One entry point for everything; each target does its own set-up in .venv. `make help` lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
# llama.cpp is built with what relayline uses: no multimodal library, no `common`, no tools. CMAKE_ARGS of the caller
# (-DGGML_CUDA=on, -DGGML_VULKAN=on, -DGGML_METAL=on ...) come on top.
LLAMA_CMAKE := -DLLAVA_BUILD=OFF -DCMAKE_PROJECT_llama_cpp_INCLUDE=$(CURDIR)/deploy/build/llama_minimal.cmake
# Files of tests side by side: they wait for processes much of the time. One test alone: .venv/bin/python -m pytest -k NAME
PYTEST := $(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist loadfile
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-quick test-store check proto bench clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

setup: $(STAMP) ## create .venv and install relayline with its development tools

$(STAMP): pyproject.toml stage/_capture.c $(wildcard wire/_*.c)
	@echo "[1/3] environment in $(VENV)"
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("relayline needs Python 3.11 or newer; name one with PYTHON=...")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --upgrade pip
	@echo "[2/3] llama.cpp (compiled once, a few minutes; the wheel is cached for next time)"
	@CMAKE_ARGS="$(LLAMA_CMAKE) $(CMAKE_ARGS)" $(PYTHON) deploy/build/with_progress.py \
		$(BIN)/python -m pip install --verbose $$($(BIN)/python deploy/build/pinned.py llama-cpp-python)
	@echo "[3/3] relayline and its other dependencies"
	@$(PYTHON) deploy/build/with_progress.py $(BIN)/python -m pip install --editable '.[dev]'
	@touch $(STAMP)

demo: setup ## three stages, six live streams, batch histograms; KEEP=1 keeps serving
	@$(BIN)/python -m deploy.demo_run $(if $(KEEP),--keep)

test: setup ## the whole test suite
	@$(PYTEST)

test-quick: setup ## without the slow tests
	@$(PYTEST) -m "not slow and not mlflow"

test-store: setup ## traces in MLflow, a store that nobody here wrote; installs it beside (850 MB)
	@$(BIN)/python -m pytest -m mlflow

check: setup ## style, types, generated stubs
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/python deploy/build/protos.py --check

proto: setup ## make the protobuf stubs anew
	@$(BIN)/python deploy/build/protos.py

bench: setup ## every benchmark at real size, about 10 minutes; QUICK=1 for a smoke run, FULL=1 for an hour
	@$(BIN)/python -m benches $(if $(QUICK),--quick,$(if $(FULL),--full))

clean: ## remove the environment and build products
	rm -rf $(VENV) build *.egg-info stage/*.so wire/*.so
