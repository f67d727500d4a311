# make quickstart: from nothing to a trained model and its samples.   make test: everything that CI runs.
# make laws: the property tests on new examples.   make bench: the figures, beside the peers.
PYTHON ?= python3
BIN := .venv/bin
# One thread a process: the tests start several, and their sums must not depend on how many cores there are.
TEST_ENV := OMP_NUM_THREADS=1
# setuptools warns at length that an editable install follows the working tree, which is what it is for.
PIP := PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet
# The bench takes the machine as it is: a BLAS told to be some other core's would measure that one.
BENCH_ENV := env -u OPENBLAS_CORETYPE -u OPENBLAS_L2_SIZE

.PHONY: quickstart test lint laws bench install dev clean

quickstart: install
	$(BIN)/ironfn prepare pretrain/quickstart
	$(BIN)/ironfn pretrain pretrain/quickstart
	$(BIN)/ironfn generate runs/quickstart

test: dev lint
	$(TEST_ENV) $(BIN)/python -m pytest -q

lint: dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

# The property tests on new examples, again and again: what the fixed ones of `make test` never drew.
SEEDS ?= 1 2 3 4 5 6 7 8 9 10
laws: dev
	for seed in $(SEEDS); do $(TEST_ENV) $(BIN)/python -m pytest -q property_tests \
	  --hypothesis-profile=campaign --hypothesis-seed=$$seed || exit 1; done

bench: dev
	$(BENCH_ENV) $(BIN)/python -m bench pretrain

# Installed with what the commands need; the stamps make a second call quick.
install: .venv/installed
dev: .venv/installed-dev

.venv/bin/python:
	$(PYTHON) -m venv .venv
	$(PIP) --upgrade pip

.venv/installed: pyproject.toml constraints.txt | .venv/bin/python
	$(PIP) -c constraints.txt torch
	$(PIP) -c constraints.txt -e ".[parquet,clean,plots,tensorboard]"
	touch $@

.venv/installed-dev: pyproject.toml constraints.txt | .venv/bin/python
	$(PIP) -c constraints.txt torch
	$(PIP) -c constraints.txt -e ".[dev]"
	touch $@ .venv/installed

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .hypothesis .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
