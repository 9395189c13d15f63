# A fresh machine needs Python >= 3.11, make, and a package index that pip can reach. Nothing else.
#
#   make demo                 train a small transformer, plain and sharded, side by side
#   make test                 lint, types, tests
#   make test-all             the same with the tests marked `thorough`: more replicas, more optimizers, more programs
#   make mutations            break a copy of the code in one place after the other: the short suite must notice every one
#   make fuzz SECONDS=600     look for programs we get wrong; prints how many were tried, and the seeds
#   make docs                 the documentation as a site, warnings are errors
#   make screenshots          of the report, for the README (needs Chromium)
#   make bench                step time, memory, bytes on the wire against the alternatives; over half an hour
#   make bench-quick          the same for a few small workloads, under five minutes
#   make bench-check          which rows of benchmarks/results are older than the code they measure
#   make bench-torch          the same transformer in PyTorch and in shardstep, in several processes
#
# Another interpreter in another environment:  make test PYTHON=python3.12 VENV=.venv-312
# With the TPU compiler, and the tests that need it:  make test EXTRAS=test,tpu

PYTHON  ?= python3
VENV    ?= .venv
SELECT  ?= not thorough
WORKERS ?= 2
SECONDS  = 600
ARGS    ?=
EXTRAS  ?= test

BIN := $(VENV)/bin

.PHONY: demo test test-all lint types pytest mutations fuzz docs screenshots bench bench-quick bench-check bench-torch format clean

demo: $(VENV)/.installed-demo
	$(BIN)/shardstep demo $(ARGS)

test: lint types pytest

lint: $(VENV)/.installed-$(EXTRAS)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-$(EXTRAS)
	$(BIN)/mypy

# Tests that share a plain run are in one group (`xdist_group`), which one worker runs.
pytest: $(VENV)/.installed-$(EXTRAS)
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup -m "$(SELECT)" $(ARGS)

test-all: lint types $(VENV)/.installed-$(EXTRAS)
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup --hypothesis-profile=thorough $(ARGS)

mutations: $(VENV)/.installed-$(EXTRAS)
	$(BIN)/python tests/mutations.py $(ARGS)

# Whole steps and equations with fresh seeds, counted (tests/fuzz.py).
fuzz: $(VENV)/.installed-$(EXTRAS)
	$(BIN)/python tests/fuzz.py --seconds $(SECONDS) $(ARGS)

docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict  # (with --quiet it would count no warnings)

screenshots: $(VENV)/.installed-test $(VENV)/.installed-demo
	$(BIN)/python docs/screenshots.py

bench: $(VENV)/.installed-bench
	$(BIN)/python benchmarks/suite.py $(ARGS)

bench-quick: $(VENV)/.installed-bench
	$(BIN)/python benchmarks/suite.py --quick $(ARGS)

bench-check: $(BIN)/python
	$(BIN)/python benchmarks/bench_check.py

# PyTorch lives in an environment of its own, .venv-torch: the script makes it.
bench-torch: $(VENV)/.installed-bench
	$(BIN)/python benchmarks/against_torch.py --json benchmarks/results/torch.json $(ARGS)

format: $(VENV)/.installed-$(EXTRAS)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) site .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist

# One stamp for each set of extras. A stamp is written last: an interrupted install is simply done again.
$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	@touch $@

$(VENV)/.installed-%: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[$*]'
	@touch $@
