# Every target makes what it needs, from a fresh clone with Python 3.11 and make.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test lint bench clean

demo: $(VENV)/demo.stamp  ## train a small conv net with ddp on two CPU processes
	$(BIN)/python docs/tutorials/digits.py

test: $(VENV)/dev.stamp  ## everything CI runs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/mypy

bench: $(VENV)/dev.stamp  ## ratios against raw PyTorch
	for script in benchmarks/*.py; do $(BIN)/python $$script || exit 1; done

$(BIN)/python:
	$(PYTHON) -m venv $(VENV) || python3 -m venv $(VENV)

$(VENV)/demo.stamp: $(BIN)/python constraints.txt core/pyproject.toml
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ./core scikit-learn
	touch $@

$(VENV)/dev.stamp: $(VENV)/demo.stamp requirements-dev.txt
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --requirement requirements-dev.txt
	touch $@

clean:
	rm -rf $(VENV) torchhal_runs
