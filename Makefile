# Everything starts from a bare Python >= 3.11: the targets make their own environment, .venv,
# and make it again when pyproject.toml or constraints.txt changes.

PYTHON   ?= python3
# The versions of torch and JAX: "pinned" in constraints.txt, "oldest" that functx supports, "newest"
# that installs, or a version of torch. Each has an environment of its own.
VERSIONS ?= pinned
VENV     := .venv$(filter-out -pinned,-$(VERSIONS))
PY       := $(VENV)/bin/python
PIP      := $(PY) -m pip --quiet --disable-pip-version-check
INSTALL  := $(PIP) install -c $(VENV)/constraints.txt

# One thread a worker: times are never asserted, and two workers then fill two cores. Each takes a
# run of neighbouring tests, which share imports and fixtures; who is done first takes over some.
WORKERS ?= auto
ARGS    ?=
PYTEST  := $(PY) -m pytest -n $(WORKERS) --maxprocesses 8 --dist worksteal

# Tests compile thousands of small JAX programs that run once. So XLA turns what it has planned into
# code the quickest way, which takes a quarter of its usual time; in `make sweep` it does as always.
# A JAX that does not know one of these flags ends the process, so the newest one gets none.
QUICK := $(if $(filter newest,$(VERSIONS)),,--xla_cpu_use_fusion_emitters=false \
         --xla_cpu_parallel_codegen_split_count=1 --xla_backend_optimization_level=0)

# Of `make gpu`: "tests", and benches (`python -m bench --help` names them); all unless told.
PART    ?= tests benches
BENCHES := $(filter-out tests,$(PART))

.DEFAULT_GOAL := help
.PHONY: help demo test matrix lint forms bench sweep docs wheels smoke gpu clean

help:  ## list the targets
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 8

demo: $(VENV)/installed  ## train, cross-check with JAX, and write figures to functx-demo/
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(PY) -m functx demo $(ARGS)

test: $(VENV)/installed  ## the whole test suite
	OMP_NUM_THREADS=1 XLA_FLAGS='$(QUICK) $(XLA_FLAGS)' $(PYTEST) $(ARGS)

# One environment of the table in docs/compatibility.md. It is recorded when tests fail, too.
matrix: $(VENV)/installed  ## the tests, with their outcome recorded for docs/compatibility.md
	mkdir -p build
	OMP_NUM_THREADS=1 XLA_FLAGS='$(QUICK) $(XLA_FLAGS)' $(PYTEST) $(ARGS) --junitxml=build/junit.xml; \
	status=$$?; $(PY) -m tools.compatibility record build/junit.xml && exit $$status

sweep: $(VENV)/privacy  ## the long sweeps, left out of `make test`
	OMP_NUM_THREADS=1 $(PYTEST) -m sweep $(ARGS)

bench: $(VENV)/privacy  ## run the demo and every bench, and write their figures into the pages
	$(PY) -m functx demo --out docs/demo
	$(PY) -m bench $(ARGS)

# A checker can't follow the mapping of compat/ to functx.compat, so it reads an installed wheel;
# its messages are turned back to the paths of this tree.
lint: $(VENV)/linters forms  ## ruff, formatting, layers, and types of the wheel that users install
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	rm -rf build/lib build/wheel build/lint
	$(PIP) wheel --no-deps --no-build-isolation --wheel-dir build/wheel .
	$(PIP) install --no-deps --target build/lint build/wheel/*.whl
	cd build/lint && PYTHONPATH=. ../../$(VENV)/bin/lint-imports ../../pyproject.toml
	cd build/lint && MYPYPATH=. ../../$(VENV)/bin/mypy --config-file ../../pyproject.toml \
	  --cache-dir ../../.mypy_cache --python-executable ../../$(PY) ../../tests/repo/signatures.py
	cd build/lint && MYPYPATH=. ../../$(VENV)/bin/mypy --config-file ../../pyproject.toml \
	  --cache-dir ../../.mypy_cache --python-executable ../../$(PY) -p functx \
	  | sed -e 's,^functx/compat/,compat/,'; exit $${PIPESTATUS[0]}

# What GitHub reads: it reports a mistake there only after a push, and some never.
FORMS := $(filter-out %/config.yml,$(wildcard .github/ISSUE_TEMPLATE/*.yml))
CHECK := $(VENV)/bin/check-jsonschema --quiet --builtin-schema
forms: $(VENV)/linters  ## workflows, issue forms and CITATION.cff, by their schemas
	$(CHECK) vendor.github-workflows .github/workflows/*.yml
	$(CHECK) custom.github-workflows-require-timeout .github/workflows/*.yml
	$(CHECK) vendor.github-issue-forms $(FORMS)
	$(CHECK) vendor.github-issue-config .github/ISSUE_TEMPLATE/config.yml
	$(CHECK) vendor.dependabot .github/dependabot.yml
	$(CHECK) vendor.citation-file-format --default-filetype yaml CITATION.cff
	$(VENV)/bin/zizmor --quiet --offline --strict-collection .github

# API pages are made from the docstrings of a wheel's contents, which have functx.compat in its place.
docs: $(VENV)/docs  ## the documentation as a site, in build/site
	rm -rf build/docs build/lib
	$(PIP) install --no-deps --no-build-isolation --target build/docs .
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict --quiet --config-file .mkdocs.yml

# Two environments of their own, so that nothing of this tree is in the way: one builds, the other is
# what a user has. The smoke test runs in build/, out of reach of functx/.
wheels:  ## sdist and wheel, in dist/
	rm -rf dist build/builder
	$(PYTHON) -m venv build/builder
	build/builder/bin/python -m pip install --quiet build twine
	build/builder/bin/python -m build
	build/builder/bin/twine check --strict dist/*

# EXTRA is one of pyproject.toml's, or empty; DIST is whl or tar.gz.
EXTRA ?=
DIST  ?= whl
smoke:  ## install what `make wheels` built, with one EXTRA, in a fresh environment, and try it
	rm -rf build/smoke
	$(PYTHON) -m venv build/smoke
	build/smoke/bin/python -m pip install --quiet "$$(echo dist/*.$(DIST))$(if $(EXTRA),[$(EXTRA)])"
	cd build && smoke/bin/python -I ../tools/smoke.py $(EXTRA)

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
	rm -rf .venv .venv-* build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .fuzz .sweep

$(VENV)/installed: pyproject.toml constraints.txt tools/constraints.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo 'functx needs Python >= 3.11: make PYTHON=/path/to/python3.11 ...' >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PYTHON) tools/constraints.py $(VERSIONS) > $(VENV)/constraints.txt
	$(INSTALL) -e '.[test,models]'
	@# From the folder around a clone named functx, Python would take the clone for the package.
	@echo '$(CURDIR)' > "$$($(PY) -c 'import sysconfig as s; print(s.get_path("purelib"))')/functx-clone.pth"
	@touch $@

# What some benches and pages run next to functx.
$(VENV)/privacy: $(VENV)/installed
	$(INSTALL) -e '.[test,models,privacy]'
	@touch $@

$(VENV)/linters: $(VENV)/installed
	$(INSTALL) -e '.[dev]' 'setuptools>=77'
	@touch $@

$(VENV)/docs: $(VENV)/installed
	$(INSTALL) -e '.[docs]' 'setuptools>=77'
	@touch $@

lint: SHELL := bash
