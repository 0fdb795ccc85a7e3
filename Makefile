# Every target makes what it needs, from a fresh clone with Python 3.11 and make.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
XLA := .venv-xla
# Core on the oldest torch that CI has: every contract, the loops, and real processes. What is left out (how processes
# start and fail, the command line, packaging) is the same code on any torch and takes most of the time.
CORE_ON_OLD_TORCH := $(patsubst %,core/tests/test_%.py,accelerators precision resolve checkpoint_torch_file strategies \
	foreign_strategies collectives trainer_numerics trainer_hooks trainer_resume results)
PLUGINS := $(patsubst %/pyproject.toml,%,$(wildcard plugins/*/pyproject.toml plugins/*/stub/pyproject.toml))

.PHONY: demo test test-xla lint bench conformance clean

demo: $(VENV)/demo.stamp  ## train a small conv net with ddp on two CPU processes
	$(BIN)/python docs/tutorials/digits.py

test: $(VENV)/dev.stamp  ## everything CI runs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -n 2 --dist loadfile

test-xla: $(XLA)/packages.stamp  ## the XLA plugin, and core, on torch 2.9.1 in an environment of their own
	$(XLA)/bin/python -m pytest -n 2 --dist loadfile plugins/xla
	$(XLA)/bin/python -m pytest -n 2 --dist loadfile -rfE $(CORE_ON_OLD_TORCH)

cluster-tools:  ## Slurm, Open MPI, MPICH and iproute2, for tests/test_clusters.py, which skips without them (Debian, root)
	apt-get install --yes --quiet --no-install-recommends slurmctld slurmd slurm-client iproute2 openmpi-bin mpich

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/mypy

REPORTS := $(CURDIR)/torchhal_runs/conformance
conformance: $(VENV)/dev.stamp $(XLA)/packages.stamp  ## every part's report, and the page with their results
	TORCHHAL_CONFORMANCE_REPORTS=$(REPORTS) $(BIN)/python -m pytest core/tests/conformance/test_builtin.py plugins/*/tests/test_conformance.py
	TORCHHAL_CONFORMANCE_REPORTS=$(REPORTS) $(XLA)/bin/python -m pytest plugins/xla/tests/test_conformance.py
	$(BIN)/python core/tests/conformance/results_page.py $(REPORTS)

bench: $(VENV)/dev.stamp  ## ratios against raw PyTorch
	for script in benchmarks/*.py; do $(BIN)/python $$script || exit 1; done

$(BIN)/python:
	$(PYTHON) -m venv $(VENV) || python3 -m venv $(VENV)

$(VENV)/demo.stamp: $(BIN)/python constraints.txt core/pyproject.toml
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ./core scikit-learn
	touch $@

$(VENV)/dev.stamp: $(VENV)/demo.stamp requirements-dev.txt $(PLUGINS:=/pyproject.toml)
	DS_BUILD_OPS=0 DS_ACCELERATOR=cpu \
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --requirement requirements-dev.txt $(PLUGINS:%=--editable ./%)
	for flavour in sim hpu; do $(BIN)/python -c "import torchhal_simulator as s; s.load('$$flavour')" || exit 1; done  # compiles, once
	touch $@

$(XLA)/torch.stamp: $(wildcard plugins/xla/environment/*.py) plugins/xla/environment/requirements.txt
	$(PYTHON) plugins/xla/environment/create.py $(XLA)
	touch $@

$(XLA)/packages.stamp: $(XLA)/torch.stamp core/pyproject.toml plugins/parallel/pyproject.toml plugins/xla/pyproject.toml
	$(XLA)/bin/python -m pip install --quiet --no-deps --no-build-isolation --editable ./core --editable ./plugins/parallel --editable ./plugins/xla
	touch $@

clean:
	rm -rf $(VENV) $(XLA) torchhal_runs
