# Everything starts from a bare Python >= 3.11: the targets make their own environment, .venv,
# and make it again when pyproject.toml or constraints.txt changes.

PYTHON ?= python3
VENV   := .venv
PY     := $(VENV)/bin/python
PIP    := $(PY) -m pip --quiet --disable-pip-version-check

# One thread a worker: times are never asserted, and two workers then fill two cores. Each takes a
# run of neighbouring tests, which share imports and fixtures; who is done first takes over some.
WORKERS ?= auto
ARGS    ?=
PYTEST  := $(PY) -m pytest -n $(WORKERS) --maxprocesses 8 --dist worksteal

# Tests compile thousands of small JAX programs that run once. So XLA turns what it has planned into
# code the quickest way, which takes a quarter of its usual time; in `make sweep` it does as always.
QUICK := --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1 \
         --xla_backend_optimization_level=0

# Of `make gpu`: "tests", and benches (`python -m bench --help` names them); all unless told.
PART    ?= tests benches
BENCHES := $(filter-out tests,$(PART))

.DEFAULT_GOAL := help
.PHONY: help demo test lint bench sweep docs gpu clean

help:  ## list the targets
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 8

demo: $(VENV)/installed  ## train, cross-check with JAX, and write figures to functx-demo/
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(PY) -m functx demo $(ARGS)

test: $(VENV)/installed  ## the whole test suite
	OMP_NUM_THREADS=1 XLA_FLAGS='$(QUICK) $(XLA_FLAGS)' $(PYTEST) $(ARGS)

sweep: $(VENV)/privacy  ## the long sweeps, left out of `make test`
	OMP_NUM_THREADS=1 $(PYTEST) -m sweep $(ARGS)

bench: $(VENV)/privacy  ## run the demo and every bench, and write their figures into the pages
	$(PY) -m functx demo --out docs/demo
	$(PY) -m bench $(ARGS)

# A checker can't follow the mapping of compat/ to functx.compat, so it reads an installed wheel;
# its messages are turned back to the paths of this tree.
lint: $(VENV)/linters  ## ruff, formatting, layers, and types of the wheel that users install
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	rm -rf build
	$(PIP) wheel --no-deps --no-build-isolation --wheel-dir build/wheel .
	$(PIP) install --no-deps --target build/lint build/wheel/*.whl
	cd build/lint && PYTHONPATH=. ../../$(VENV)/bin/lint-imports ../../pyproject.toml
	cd build/lint && MYPYPATH=. ../../$(VENV)/bin/mypy --config-file ../../pyproject.toml \
	  --cache-dir ../../.mypy_cache --python-executable ../../$(PY) ../../tests/repo/signatures.py
	cd build/lint && MYPYPATH=. ../../$(VENV)/bin/mypy --config-file ../../pyproject.toml \
	  --cache-dir ../../.mypy_cache --python-executable ../../$(PY) -p functx \
	  | sed -e 's,^functx/compat/,compat/,'; exit $${PIPESTATUS[0]}

# API pages are made from the docstrings of a wheel's contents, which have functx.compat in its place.
docs: $(VENV)/docs  ## the documentation as a site, in build/site
	rm -rf build/docs build/lib
	$(PIP) install --no-deps --no-build-isolation --target build/docs .
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict --quiet --config-file .mkdocs.yml

gpu:  ## the tests and benches that need a CUDA device, with the Python at hand (no .venv)
	@if $(PYTHON) -c 'import sys, torch; sys.exit(torch.cuda.is_available())'; \
	then echo 'no CUDA device: nothing to test or measure'; exit; fi; \
	$(PYTHON) -m pip install --quiet --no-deps --no-build-isolation -e . || exit; failed=0; \
	if [ -n '$(filter tests,$(PART))' ]; \
	then $(PYTHON) -m pytest -m gpu -W default $(ARGS) tests/gpu || failed=1; fi; \
	if [ -n '$(BENCHES)' ]; \
	then $(PYTHON) -m bench --device cuda $(filter-out benches,$(BENCHES)) || failed=1; fi; \
	exit $$failed

clean:  ## remove the environment and everything built
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .fuzz .sweep

$(VENV)/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo 'functx needs Python >= 3.11: make PYTHON=/path/to/python3.11 ...' >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -c constraints.txt -e '.[test]'
	@# From the folder around a clone named functx, Python would take the clone for the package.
	@echo '$(CURDIR)' > "$$($(PY) -c 'import sysconfig as s; print(s.get_path("purelib"))')/functx-clone.pth"
	@touch $@

# What some benches and pages run next to functx.
$(VENV)/privacy: $(VENV)/installed
	$(PIP) install -c constraints.txt -e '.[test,privacy]'
	@touch $@

$(VENV)/linters: $(VENV)/installed
	$(PIP) install -c constraints.txt -e '.[dev]' 'setuptools>=77'
	@touch $@

$(VENV)/docs: $(VENV)/installed
	$(PIP) install -c constraints.txt -e '.[docs]' 'setuptools>=77'
	@touch $@

lint: SHELL := bash
