# Everything runs inside .venv, made on first use. Override the interpreter with PYTHON=python3.12:
# beside a .venv of another version, its folder is .venv-3.12.

PYTHON ?= python3
VENV := .venv
version_of = $(shell $(1) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)
ifneq ($(origin PYTHON),file)
ifneq ($(filter python3.%,$(PYTHON)),)
override PYTHON := $(shell scripts/find_python.sh $(PYTHON:python%=%))
endif
ifneq ($(wildcard .venv/bin/python),)
ifneq ($(call version_of,.venv/bin/python),$(call version_of,$(PYTHON)))
VENV := .venv-$(call version_of,$(PYTHON))
endif
endif
endif
BIN := $(VENV)/bin
WORKERS ?= 2
# The machine code of kernels is looked at with the JAX that GPU machines have; GATE_JAX=0.12.0.1 looks
# with that one, in a folder of its own.
GATE_PYTHON ?= $(shell scripts/find_python.sh 3.12)
GATE_JAX ?= 0.11.2

# A stamp says which extras .venv holds for the present pyproject.toml.
DEMO_STAMP := $(VENV)/.installed-demo
TEST_STAMP := $(VENV)/.installed-test

.DEFAULT_GOAL := help
.PHONY: help demo test test-fast test-all tests page-test lint style types format clean gpu-check kernel-gate compile-times

help: ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 20

demo: $(DEMO_STAMP) ## install, fetch a 135M instruct model, answer eight prompts in one batch
	@$(BIN)/python -m scripts.demo

test: lint ## install the test tools, then lint, type check and test what must hold at every change
	@$(MAKE) --no-print-directory tests

test-fast: $(TEST_STAMP) ## test what compiles nothing, in under two minutes
	@$(MAKE) --no-print-directory tests TIER="fast and not release"

test-all: lint ## run every test there is, sweeps and matrices too: before a release
	@$(MAKE) --no-print-directory tests TIER= ARGS="--hypothesis-profile=release $(ARGS)"

TIER := not release
tests: $(TEST_STAMP)
	@# A file stays in one worker, so that its fixtures are made once. A test that hangs fails after
	@# ten minutes and says where.
	$(BIN)/python -m pytest -m "$(TIER)" -n $(WORKERS) --dist loadfile --no-loadscope-reorder \
	    --timeout 600 --durations 15 $(ARGS)

page-test: $(TEST_STAMP) ## install a Chromium where that is possible, and test the page in it
	@if scripts/install_browser.sh $(BIN)/python; then \
	    JAXSERVE_NEEDS_BROWSER=1 $(BIN)/python -m pytest -q -m "" tests/server/test_page*.py; \
	else \
	    echo "page-test: there is no Chromium, and none can be installed; the page was not tested"; \
	fi

lint: style types ## formatting, lint and types, changing nothing

style: $(TEST_STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(TEST_STAMP)
	$(BIN)/pyrefly check --python-interpreter-path $(BIN)/python

format: $(TEST_STAMP) ## format the code and mend what lint can mend
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

gpu-check: ## test and time kernels and models on this machine's GPU, with PYTHON's own JAX
	@$(PYTHON) -m scripts.gpu_check $(ARGS)

GATE := .venv-gate-$(GATE_JAX)
# What `make kernel-gate` does, two at a time; each prints its report when it has ended.
CHECKS := gate-steps gate-tests gate-mosaic gate-rows
.PHONY: $(CHECKS)
# Where llvm-symbolizer is installed, every compilation would wait for it for seconds.
kernel-gate $(CHECKS): export LLVM_DISABLE_SYMBOLIZATION := 1
kernel-gate: ## compile the GPU kernels to machine code and interpret some, without a GPU (needs python3.12)
	@$(GATE_PYTHON) -c 'import sys' 2>/dev/null || { \
	    echo "kernel-gate: $(GATE_PYTHON) is not there; nothing was compiled (GATE_PYTHON=...)"; \
	    exit 0; }; \
	$(MAKE) --no-print-directory $(GATE)/.installed || { \
	    echo "kernel-gate: JAX $(GATE_JAX) and its CUDA plug-in cannot be installed here;" \
	         "nothing was compiled"; \
	    exit 0; }; \
	echo "kernel-gate: $(CHECKS), two at a time (some minutes)"; \
	$(MAKE) --no-print-directory --keep-going --jobs 2 --output-sync=target $(CHECKS)

gate-steps:
	@$(GATE)/bin/python -m scripts.kernel_gate $(ARGS)
gate-tests:
	@$(GATE)/bin/python -m pytest -q $(if $(findstring --subset,$(ARGS)),,-m "") \
	    tests/pallas_kernels/test_mosaic.py tests/pallas_kernels/test_ffi.py
gate-mosaic:
	@$(GATE)/bin/python -m scripts.mosaic_gate $(ARGS)
gate-rows:
	@$(GATE)/bin/python -m scripts.row_gate

compile-times: $(GATE)/.installed ## time the compilation of an 8B model for an H100, without a GPU (needs python3.12)
	@$(GATE)/bin/python -m scripts.compile_times $(ARGS)

$(GATE)/.installed: pyproject.toml
	@echo "Installing JAX $(GATE_JAX) and its CUDA plug-in into $(GATE) (once)"
	@$(GATE_PYTHON) -m venv $(GATE)
	@scripts/install.sh $(GATE)/bin/python --quiet jax==$(GATE_JAX) pytest hypothesis -e .
	@scripts/install.sh $(GATE)/bin/python --quiet --no-deps \
	    jax-cuda13-plugin==$(GATE_JAX) jax-cuda13-pjrt==$(GATE_JAX) nvidia-cuda-nvcc nvidia-nvvm
	@touch $@

clean: ## remove the environments and everything built (downloaded models stay)
	rm -rf .venv .venv-* build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "jaxserve needs Python 3.11 or newer, and $(PYTHON) is older or missing;" \
	         "name one, for example: make demo PYTHON=python3.11" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(DEMO_STAMP): pyproject.toml | $(BIN)/python
	@echo "Installing jaxserve into $(VENV) (once)"
	@scripts/install.sh $(BIN)/python -e '.[gguf]'
	@touch $@

$(TEST_STAMP): pyproject.toml | $(BIN)/python
	@echo "Installing jaxserve and its test tools into $(VENV) (once)"
	@scripts/install.sh $(BIN)/python -e '.[test]'
	@touch $@
