# Needs only Python 3.10 or newer, pip and make. Everything is installed into .venv and nothing outside this folder
# is touched. Use another interpreter with `make test PYTHON=python3.13`.

PYTHON ?= python3
JOBS ?= 3
VENV := .venv
CUDA_VENV := .venv-cuda
MATRIX := 2.1 2.6 2.15
REQUIREMENTS := requirements/test.txt
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input -q

# A stamp is named after a checksum of what its step was made from, so that neither the times a checkout gives to files
# nor a wrong clock can make a step look done, and a renamed folder or another Python changes it.
PYTHON_VERSION := $(shell $(PYTHON) -VV 2>&1)
checksum = $(shell { pwd; echo '$(PYTHON_VERSION)'; $(1); } 2>&1 | cksum | tr ' ' '-')
VENV_STAMP := $(VENV)/.stamp-venv-$(call checksum,:)
DEMO_STAMP := $(VENV)/.stamp-demo-$(call checksum,cat requirements/test.txt pyproject.toml src/transload/_version.py)
SUITE_STAMP := $(VENV)/.stamp-suite-$(call checksum,cat requirements/suite.txt pyproject.toml src/transload/_version.py)
TEST_STAMP := $(VENV)/.stamp-test-$(call checksum,cat requirements/suite.txt $(REQUIREMENTS) pyproject.toml src/transload/_version.py)
BENCH_STAMP := $(VENV)/.stamp-bench-$(call checksum,cat requirements/bench.txt)
DOCS_STAMP := $(VENV)/.stamp-docs-$(call checksum,cat requirements/docs.txt)

NEW_ENOUGH = $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || { \
	echo "make: '$(PYTHON)' is not a Python 3.10 or newer; name one: make PYTHON=/path/to/python3" >&2; exit 1; }
has_torch = $(1) -c 'import sys, importlib.util; sys.exit(not importlib.util.find_spec("torch"))'

# The tests start hundreds of processes that import transload, and each would compile it again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo test test-cuda-build suite-with-cuda test-matrix suite-of-matrix bench docs format zipapp clean

help: ## Show this list
	@sed -n 's/^\([a-z-]*\):[^#]*## /\1\t/p' $(MAKEFILE_LIST) | while IFS="$$(printf '\t')" read -r name text; do \
		printf '  make %-15s %s\n' "$$name" "$$text"; done

# A torch that $(PYTHON) has is used as it is, from the sources, and nothing is installed. Where none can be installed,
# the demo shows what works without it.
VENV_READY = { [ -e $(DEMO_STAMP) ] || [ -e $(TEST_STAMP) ]; }
demo: ## Load a checkpoint saved on a GPU, here: torch.load, transload.load, inspect, doctor
	@$(NEW_ENOUGH)
	@$(call has_torch,$(PYTHON)) || $(VENV_READY) || { \
		echo "$(PYTHON) has no torch: installing transload and a CPU build of torch (some 200 MB) into $(VENV) ..."; \
		$(MAKE) -s $(DEMO_STAMP) 2>&1 | grep -v -e '^make\[' -e '^WARNING'; \
		$(VENV_READY) || echo "That failed: the demo goes on without torch."; }
	@if ! $(call has_torch,$(PYTHON)) && $(VENV_READY); then $(BIN)/python examples/demo.py; \
		else $(PYTHON) examples/demo.py; fi

# Types are checked and lines counted while torch is installed and the tests run, and shown after them. Tests wait for
# one another and for what hangs, so there is one process more than two cores have use for. The first time, each of
# them would compile all tests, and hypothesis would look for constants in all sources: that is done once before, for
# one test.
TESTS_ON_GPU = if [ -e /dev/nvidiactl ] || [ -e /dev/dxg ]; \
	then echo '$(BIN)/pytest -q --gpu tests/gpu'; $(BIN)/pytest -q --gpu tests/gpu; fi
INSTALL_TESTS = echo '$(PIP) install --no-compile -r $(REQUIREMENTS)' && \
	$(PIP) install --no-compile -r $(REQUIREMENTS) && rm -f $(VENV)/.stamp-test-* && touch $(TEST_STAMP)
test: $(SUITE_STAMP) ## Check style and types, and run every test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@echo '$(BIN)/mypy --strict & $(BIN)/pytest -q -n $(JOBS)'; \
	( $(BIN)/mypy --strict >$(VENV)/types.txt 2>&1; types=$$?; \
		$(BIN)/python scripts/metrics.py >$(VENV)/metrics.txt; exit $$types ) & types=$$!; \
	[ -e $(TEST_STAMP) ] || { $(INSTALL_TESTS); } || { wait $$types; exit 1; }; \
	[ -e tests/__pycache__ ] || $(BIN)/pytest -q -k test_any_bytes_are_read_to_an_end >/dev/null 2>&1; \
	$(TESTS_ON_GPU); gpu=$$?; \
	$(BIN)/pytest -q -n $(JOBS); tests=$$?; \
	wait $$types; types=$$?; cat $(VENV)/types.txt $(VENV)/metrics.txt; \
	[ $$gpu -eq 0 ] && [ $$tests -eq 0 ] && [ $$types -eq 0 ]

test-cuda-build: ## Run every test with a torch built with CUDA, in .venv-cuda: several GB, no GPU
	$(MAKE) suite-with-cuda VENV=$(CUDA_VENV) REQUIREMENTS=requirements/cuda-build.txt

suite-with-cuda: $(TEST_STAMP)
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

suite-of-matrix: $(TEST_STAMP)
	@$(BIN)/python -c 'import sys, torch; print("torch", torch.__version__, "on Python", sys.version.split()[0])'
	$(BIN)/pytest -q -n $(JOBS)

bench: $(TEST_STAMP) $(BENCH_STAMP) ## Measure against the other tools; bench/gpu/load.py does it on a GPU
	$(BIN)/python bench/inspect.py
	$(BIN)/python bench/load.py --case large,small
	$(BIN)/python bench/save.py
	$(BIN)/python bench/retag.py
	$(BIN)/python bench/convert.py
	$(BIN)/python bench/verify.py
	$(BIN)/python bench/rescue.py
	$(BIN)/python bench/explain.py

docs: $(DOCS_STAMP) ## Build the manual as a site, in site/, and check every link in it
	$(BIN)/properdocs build --strict

format: $(TEST_STAMP) ## Format the code
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

zipapp: ## Write dist/transload.pyz: one file, runs anywhere without an installation
	$(PYTHON) scripts/build_zipapp.py dist/transload.pyz

clean: ## Remove everything made here
	rm -rf $(VENV) $(CUDA_VENV) $(MATRIX:%=.venv-matrix-%) build dist site .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# On Linux the torch of PyPI brings several GB of CUDA, so a CPU build is asked for by its version. One that is there
# stays: `make test` may have taken another build.
$(DEMO_STAMP): | $(VENV_STAMP)
	$(call has_torch,$(BIN)/python) || $(PIP) -q install --no-compile --retries 1 --timeout 15 \
		--extra-index-url https://download.pytorch.org/whl/cpu \
		"$$(sed -n '/^torch==/p' requirements/test.txt)$$([ "$$(uname -s)" != Linux ] || echo +cpu)"
	$(PIP) install -e .
	@rm -f $(VENV)/.stamp-demo-*
	@touch $@

# Of torch's thousands of modules the tests import some: these are compiled then.
$(SUITE_STAMP): | $(VENV_STAMP)
	$(PIP) install --no-compile -r requirements/suite.txt -e .
	@rm -f $(VENV)/.stamp-suite-*
	@touch $@

$(TEST_STAMP): | $(VENV_STAMP)
	$(PIP) install -e .
	@$(INSTALL_TESTS)

$(BENCH_STAMP): | $(VENV_STAMP)
	$(PIP) install -r requirements/bench.txt
	@rm -f $(VENV)/.stamp-bench-*
	@touch $@

$(DOCS_STAMP): | $(VENV_STAMP)
	$(PIP) install -r requirements/docs.txt
	@rm -f $(VENV)/.stamp-docs-*
	@touch $@

# Some systems ship Python without ensurepip; then the pip outside fills the environment.
$(VENV_STAMP):
	@$(NEW_ENOUGH)
	@if ls $(VENV)/.stamp-venv-* >/dev/null 2>&1; then rm -rf $(VENV); fi
	@$(PYTHON) -m venv $(VENV) >/dev/null 2>&1 || { \
		$(PYTHON) -m venv --without-pip $(VENV) && \
		$(PYTHON) -m pip --python $(BIN)/python install -q --disable-pip-version-check pip; \
	} || { \
		echo "make: '$(PYTHON)' cannot make a virtual environment. Debian and Ubuntu keep that part of Python in" >&2; \
		echo "the package python3-venv; or name another interpreter: make PYTHON=/path/to/python3" >&2; exit 1; }
	@touch $@
