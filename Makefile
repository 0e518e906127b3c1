# Needs only Python 3.10 or newer, pip and make. Everything is installed into .venv and nothing outside this folder
# is touched. Use another interpreter with `make test PYTHON=python3.13`.

PYTHON ?= python3
JOBS ?= 3
VENV := .venv
CUDA_VENV := .venv-cuda
INTEGRATIONS_VENV := .venv-integrations
MATRIX := 2.1 2.6 2.15
REQUIREMENTS := requirements/test.txt
BIN := $(VENV)/bin

NEW_ENOUGH = $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || { \
	echo "make: '$(PYTHON)' is not a Python 3.10 or newer; name one: make PYTHON=/path/to/python3" >&2; exit 1; }
# The work is in one Python file, which machines without make run instead.
WORK = $(NEW_ENOUGH); VENV='$(VENV)' REQUIREMENTS='$(REQUIREMENTS)' JOBS='$(JOBS)' $(PYTHON) scripts/make.py
TESTS_ON_GPU = if [ -e /dev/nvidiactl ] || [ -e /dev/dxg ]; \
	then echo '$(BIN)/pytest -q --gpu tests/gpu'; $(BIN)/pytest -q --gpu tests/gpu; fi

# The tests start hundreds of processes that import transload, and each would compile it again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo test test-windows test-integrations test-cuda-build suite-with-cuda test-matrix suite-of-matrix bench docs dist format zipapp clean

help: ## Show this list
	@sed -n 's/^\([a-z-]*\):[^#]*## /\1\t/p' $(MAKEFILE_LIST) | while IFS="$$(printf '\t')" read -r name text; do \
		printf '  make %-15s %s\n' "$$name" "$$text"; done

demo: ## Load a checkpoint saved on a GPU, here: torch.load, transload.load, inspect, doctor
	@$(WORK) demo

test: ## Check style and types, and run every test
	@$(WORK) test

test-windows: ## Run the tests that make sense there with a Windows Python and torch, under Wine: 1 GB, in ~/.cache
	@$(NEW_ENOUGH); $(PYTHON) scripts/windows.py

test-integrations: ## Run the tests with Lightning, transformers and accelerate: 1 GB, in .venv-integrations
	@$(NEW_ENOUGH); VENV='$(INTEGRATIONS_VENV)' $(PYTHON) scripts/make.py test-integrations

test-cuda-build: ## Run every test with a torch built with CUDA, in .venv-cuda: several GB, no GPU
	$(MAKE) suite-with-cuda VENV=$(CUDA_VENV) REQUIREMENTS=requirements/cuda-build.txt

suite-with-cuda:
	@$(WORK) install test
	@$(BIN)/python -c 'import torch; raise SystemExit(torch.version.cuda is None and "make: pip took torch " + \
		torch.__version__ + ", which is not built with CUDA; its settings choose where torch comes from")'
	@$(TESTS_ON_GPU)
	$(BIN)/pytest -q -n $(JOBS)

# Each torch runs on Pythons it has wheels for; the first of them that is here is taken, also where pyenv keeps it.
PYTHONS_2.1 := 3.10 3.11
PYTHONS_2.6 := 3.12 3.11 3.13 3.10
PYTHONS_2.15 := 3.13 3.12 3.11 3.10
found = $(shell for python in $(foreach v,$(1),python$(v) $(wildcard $(HOME)/.pyenv/versions/$(v).*/bin/python)); do \
	$$python -c 'import sys; print(sys.executable)' 2>/dev/null && break; done)

test-matrix: $(MATRIX:%=matrix-%) ## Run every test with the oldest, a middle and the newest torch: 16 GB, in .venv-matrix-*

matrix-%:
	@$(if $(call found,$(PYTHONS_$*)),,echo "make: torch $* needs one of Python $(PYTHONS_$*), and none is here" >&2; exit 1)
	$(MAKE) suite-of-matrix PYTHON='$(call found,$(PYTHONS_$*))' VENV=.venv-matrix-$* REQUIREMENTS=requirements/matrix-$*.txt

suite-of-matrix:
	@$(WORK) install test
	@$(BIN)/python -c 'import sys, torch; print("torch", torch.__version__, "on Python", sys.version.split()[0])'
	$(BIN)/pytest -q -n $(JOBS)

bench: ## Measure against the other tools; bench/gpu/load.py does it on a GPU
	@$(WORK) install test bench
	$(BIN)/python bench/inspect.py
	$(BIN)/python bench/load.py --case large,small
	$(BIN)/python bench/save.py
	$(BIN)/python bench/retag.py
	$(BIN)/python bench/convert.py
	$(BIN)/python bench/verify.py
	$(BIN)/python bench/rescue.py
	$(BIN)/python bench/explain.py

docs: ## Build the manual as a site, in site/, and check every link in it
	@$(WORK) install docs
	$(BIN)/properdocs build --strict

dist: ## Build the wheel and the sdist, in dist/, and check them
	@$(WORK) install test dist
	rm -f dist/*.whl dist/*.tar.gz
	$(BIN)/python -m hatchling build -d dist
	$(BIN)/twine check --strict dist/*.whl dist/*.tar.gz
	$(BIN)/pytest -q tests/test_dist.py

format: ## Format the code
	@$(WORK) install suite
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

zipapp: ## Write dist/transload.pyz: one file, runs anywhere without an installation
	$(PYTHON) scripts/build_zipapp.py dist/transload.pyz

clean: ## Remove everything made here
	rm -rf $(VENV) $(CUDA_VENV) $(INTEGRATIONS_VENV) $(MATRIX:%=.venv-matrix-%) build dist site .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
