# One entry point for everything; each target does its own set-up in .venv. `make help` lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
# The folders as a type checker sees them: links below the package that they are installed as.
TYPED := build/typed/relayline
ROOMS := wire stage coordinator deploy
# llama.cpp is built with what relayline uses: its encoder of images (libmtmd), but no `common` and no tools. CMAKE_ARGS
# of the caller (-DGGML_CUDA=on, -DGGML_VULKAN=on, -DGGML_METAL=on ...) come on top.
LLAMA_CMAKE := -DLLAVA_BUILD=ON -DCMAKE_PROJECT_llama_cpp_INCLUDE=$(CURDIR)/deploy/build/llama_minimal.cmake
# The caller's part of the last build. Without CMAKE_ARGS it stays, so that `make test` after a build for a GPU is no
# build for the CPU; an empty CMAKE_ARGS goes back. The recipe gets it through its environment, whatever its quotes.
BUILT_WITH := $(VENV)/.cmake-args
LAST_ARGS := $(strip $(shell cat $(BUILT_WITH) 2>/dev/null))
LLAMA_ARGS := $(if $(filter undefined,$(origin CMAKE_ARGS)),$(LAST_ARGS),$(strip $(CMAKE_ARGS)))
# RELAYLINE_KERNELS=off leaves relayline's kernels out, =on takes them back; like the rest it stays until it is said anew.
ifdef RELAYLINE_KERNELS
LLAMA_ARGS := $(strip $(filter-out -DRELAYLINE_KERNELS=%,$(LLAMA_ARGS)) $(if $(filter-out on ON On,$(RELAYLINE_KERNELS)),-DRELAYLINE_KERNELS=$(RELAYLINE_KERNELS)))
endif
export LLAMA_ARGS
ifneq ($(LLAMA_ARGS),$(LAST_ARGS))
FLAGS_MOVED := yes
endif
REBUILD := $(if $(FLAGS_MOVED)$(filter rebuild,$(MAKECMDGOALS)),anew)
# pip's cache knows a wheel by its version alone: what was built with other flags must neither be taken from it nor left
# in it. What is installed has the version asked for as well, and goes only by force. `make rebuild` is for what is wrong
# with the wheel itself, as by a compiler with a fault: the cached one goes too.
PIP_FRESH := $(if $(LLAMA_ARGS)$(FLAGS_MOVED),--no-cache-dir) $(if $(REBUILD),--force-reinstall --no-deps)
INSTALL_LLAMA = CMAKE_ARGS="$(LLAMA_CMAKE) $$LLAMA_ARGS" $(PYTHON) deploy/build/with_progress.py \
	$(BIN)/python -m pip install --verbose $$($(BIN)/python deploy/build/pinned.py llama-cpp-python)
# The versions that were tried; LATEST=1 takes the newest instead.
CONSTRAINTS := deploy/build/constraints.txt
CONSTRAINED := $(if $(LATEST),--upgrade,--constraint $(CONSTRAINTS))
# Files of tests side by side, one more than there are cores, as they wait for processes at times, and 4 at most. They
# start in the order of tests/conftest.py, the longest first. One test alone: .venv/bin/python -m pytest -k NAME
WORKERS ?= $(shell n=$$(getconf _NPROCESSORS_ONLN); echo $$((n < 4 ? n + 1 : 4)))
PYTEST_ARGS := -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder
PYTEST := $(BIN)/python $(PYTEST_ARGS)
# An environment whose llama.cpp has none of relayline's kernels, as prebuilt wheels have it, and the tests that run llama.cpp.
PLAIN := build/plain
NATIVE_TESTS := tests/stage tests/end_to_end tests/deploy/kernels tests/deploy/doctor
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Containers like to set it. Then every process compiles all of relayline anew, a second and more at each start.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup rebuild anew demo test test-quick test-nightly test-plain test-kernels-off test-store simulate check conformance check-native proto reference docs lock bench wheel clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

setup: $(STAMP) ## create .venv and install relayline with its development tools; LATEST=1 for the newest versions

$(STAMP): pyproject.toml setup.py $(CONSTRAINTS) stage/engine/_capture.c $(wildcard wire/*/_*.c wire/*/_*.h deploy/build/headers/*.h deploy/build/*.cmake $(addprefix deploy/kernels/*.,cmake cpp h patch) $(BUILT_WITH)) $(REBUILD)
	@echo "[1/3] environment in $(VENV)"
	@command -v $(firstword $(PYTHON)) > /dev/null || { echo "relayline needs Python 3.11 or newer, and there is no $(firstword $(PYTHON)) in PATH; name one with PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("relayline needs Python 3.11 or newer; name one with PYTHON=...")'
	@$(PYTHON) deploy/build/needs.py $(VENV)
	@$(BIN)/python -m pip --version > /dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --upgrade pip
	@echo "[2/3] llama.cpp (compiled once, a few minutes$(if $(LLAMA_ARGS),,; the wheel is cached for next time))"
	@$(if $(filter rebuild,$(MAKECMDGOALS)),$(BIN)/python -m pip cache remove --quiet llama_cpp_python || true)
	@$(if $(LLAMA_ARGS),$(PYTHON) deploy/build/gpu_needs.py "$$LLAMA_ARGS")
	@$(INSTALL_LLAMA) $(PIP_FRESH)
	@$(BIN)/python deploy/build/built_with.py "$$LLAMA_ARGS" || { \
		echo "      compiling anew"; \
		$(BIN)/python -m pip cache remove --quiet llama_cpp_python || true; \
		$(INSTALL_LLAMA) --force-reinstall --no-deps $(if $(LLAMA_ARGS),--no-cache-dir); }
	@printf '%s\n' "$$LLAMA_ARGS" > $(BUILT_WITH)
	@echo "[3/3] relayline and its other dependencies"
	@$(PYTHON) deploy/build/with_progress.py $(BIN)/python -m pip install $(CONSTRAINED) --editable '.[dev,docs]'
	@mkdir -p $(TYPED) && for room in $(ROOMS); do ln -sfn ../../../$$room $(TYPED)/$$room; done
	@touch $(STAMP)

rebuild: setup ## compile llama.cpp anew and drop pip's cached wheel of it; with the last CMAKE_ARGS if none are given

demo: setup ## three stages, six live streams, batch histograms; KEEP=1 keeps serving
	@$(BIN)/python -m relayline.deploy.cli demo $(if $(KEEP),--keep)

test: setup ## the whole test suite
	@$(PYTEST)

test-quick: setup ## without the slow tests
	@$(PYTEST) -m "not slow and not mlflow and not bench and not nightly"

test-nightly: setup ## the cases of large grids, and the drawn examples, that the other targets leave out
	@RELAYLINE_EXAMPLES=all $(PYTEST) -m "nightly or hypothesis"

test-plain: ## what runs llama.cpp, against one without relayline's kernels, which it compiles in build/plain
	@$(MAKE) --no-print-directory VENV=$(PLAIN) RELAYLINE_KERNELS=off setup
	@$(PLAIN)/bin/python $(PYTEST_ARGS) $(NATIVE_TESTS)

test-kernels-off: setup ## a part of what runs llama.cpp again, with relayline's kernels left unused
	@RELAYLINE_KERNELS=off $(PYTEST) -m "kernels and not nightly" $(NATIVE_TESTS) tests/coordinator

test-store: setup ## traces stored in MLflow and read back; installs MLflow (850 MB)
	@$(BIN)/python -m pytest -m mlflow

conformance: setup ## third-party test suites, each in its own environment; ONLY=NAME runs one; needs a package registry
	@$(BIN)/python -m tests.conformance.run $(if $(ONLY),--only $(ONLY))

simulate: setup ## a whole cluster with losses on virtual time; N=10000 histories, SEED=S replays one
	@$(if $(SEED),RELAYLINE_CLUSTER_SEED=$(SEED)) $(BIN)/python -m relayline.deploy.testing.cluster.run --n $(or $(N),10000)

check: setup ## style, types (on macOS too), generated stubs, pages and tables
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/mypy --platform darwin --no-warn-unreachable --cache-dir .mypy_cache/darwin $(TYPED)
	@$(BIN)/python deploy/build/protos.py --check
	@$(BIN)/python -m relayline.deploy.cli.reference --check
	@$(BIN)/python -m benches.tables --check
	@$(BIN)/python -m relayline.deploy.manifest.pages --check

check-native: setup ## the C extensions under AddressSanitizer and UBSan: table tests and a seeded fuzz; SEED=N repeats one
	@$(BIN)/python deploy/build/check_native.py $(if $(SEED),--seed $(SEED)) $(if $(FUZZ_SECONDS),--seconds $(FUZZ_SECONDS))

proto: setup ## make the protobuf stubs anew, and what follows from them: the layout of envelopes in C and in docs/
	@$(BIN)/python deploy/build/protos.py

reference: setup ## make the pages of docs/reference/ that come from code anew, and the manifest's schema
	@$(BIN)/python -m relayline.deploy.cli.reference
	@$(BIN)/python -m relayline.deploy.manifest.pages

docs: setup ## build the site of docs/ into build/site; fails at a broken link
	@$(BIN)/mkdocs build --strict

lock: ## install the newest version of every dependency and write them down; run the tests behind it
	@$(MAKE) --no-print-directory --always-make LATEST=1 $(STAMP)
	@$(BIN)/python deploy/build/lock.py

bench: setup ## every benchmark at real size, 8 to 15 minutes; QUICK=1 for a smoke run, FULL=1 for hours
	@$(BIN)/python -m benches $(if $(QUICK),--quick,$(if $(FULL),--full))
	@$(if $(QUICK),$(PYTEST) -m bench,true)

# What an earlier build left in build/lib would go into the wheel as well.
wheel: setup ## a wheel for this CPython in build/wheels, with the C extensions compiled; llama.cpp is not in it
	@rm -rf build/lib* build/bdist* build/wheels
	@$(PYTHON) deploy/build/with_progress.py $(BIN)/python -m pip wheel --no-deps --wheel-dir build/wheels .
	@echo "made $$(ls build/wheels/*.whl); install it anywhere with: pip install FILE"

clean: ## remove the environment and build products
	rm -rf $(VENV) build *.egg-info stage/engine/*.so wire/envelopes/*.so
