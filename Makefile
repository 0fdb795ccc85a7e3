# Every target makes what it needs, from a fresh clone with Python 3.11 and make.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
XLA := .venv-xla
NEWEST := .venv-newest
DOCS := .venv-docs
# Engines that want a build or pins of their own: each is tested in .venv-NAME, which plugins/NAME/environment installs.
ENGINES := $(patsubst plugins/%/environment/install.py,%,$(wildcard plugins/*/environment/install.py))
NEWEST_PYTHON ?= python3.13
# Core on the oldest torch that CI has: every contract, the loops, and real processes. What is left out (how processes
# start and fail, the command line, packaging) is the same code on any torch and takes most of the time.
CORE_ON_OLD_TORCH := $(patsubst %,core/tests/test_%.py,accelerators checkpoint_torch_file collectives \
	foreign_strategies hyperparameters precision precision_contexts precision_scaler \
	precision_training resolve resolve_accelerators resolve_clusters resolve_strategies results strategy_checkpoints \
	strategy_lifecycle strategy_models strategy_steps trainer_ckpt_path trainer_hooks trainer_lifecycle trainer_logging \
	trainer_memory trainer_modules trainer_numerics trainer_optimizers trainer_resume trainer_steps)
PLUGINS := $(patsubst %/pyproject.toml,%,$(wildcard plugins/*/pyproject.toml plugins/*/stub/pyproject.toml))

# Most of a test's time is waiting, for a grace or for another process: more workers than cores. What the first to be
# done finds left of the others' tests it takes over.
WORKERS := 4
WORKSTEAL = --numprocesses $(WORKERS) --dist worksteal
PYTEST = $(RUNNER) $(BIN)/python -m pytest $(WORKSTEAL)
PYTEST_XLA = $(RUNNER) $(XLA)/bin/python -m pytest --numprocesses 4 --dist loadfile

# The thousands of processes that the tests start read bytecode; without it, each compiles what it imports.
unexport PYTHONDONTWRITEBYTECODE

# The contracts of [tool.importlinter] in pyproject.toml: layers, no cycles, nothing private in a plugin.
IMPORTS = PYTHONWARNINGS=ignore $(BIN)/lint-imports --no-cache

.PHONY: help demo test test-all test-rest test-xla test-engines $(ENGINES:%=test-%) test-newest check lint bench docs conformance cluster-tools browser clean

help:  ## list the targets
	@sed -nE 's/^([a-z-]+):.*## (.*)/\1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

demo: $(VENV)/demo.stamp  ## train a small conv net with ddp on two CPU processes
	$(BIN)/python docs/tutorials/digits.py

test: check  ## in ten minutes: linters, types, and of every package and every way to train something
	$(PYTEST) -m "not slow"

test-all: test test-rest  ## everything but torch_xla, in thirty minutes

# These tests wait more than those of test, and begin with those that wait longest.
test-rest: WORKERS := 6
test-rest: $(VENV)/dev.stamp $(DOCS)/packages.stamp  ## what test leaves out
	$(PYTEST) -m slow

# Beside mypy one process compiles the tests, with pytest's assertions, which otherwise each worker of a fresh clone does.
check: $(VENV)/dev.stamp  ## linters, import contracts and types
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(IMPORTS)
	$(BIN)/python -m pytest --collect-only -qq >/dev/null 2>&1 & collecting=$$!; \
	trap 'kill $$collecting 2>/dev/null' EXIT; $(BIN)/mypy && { wait $$collecting || true; }  # the tests will say why not

test-xla: $(XLA)/packages.stamp  ## the XLA plugin, and core, on torch 2.9.1 in an environment of their own
	$(PYTEST_XLA) plugins/xla
	$(PYTEST_XLA) -rfE $(CORE_ON_OLD_TORCH)

test-engines: $(ENGINES:%=test-%)  ## engines that are built or pinned in an environment of their own each; one alone is test-horovod

$(ENGINES:%=test-%): test-%: .venv-%/packages.stamp
	$(RUNNER) .venv-$*/bin/python -m pytest --numprocesses 4 --dist loadfile plugins/$*

test-newest: $(NEWEST)/packages.stamp  ## the tests of `make test` on the newest torch that pip gives, and Python 3.13
	$(NEWEST)/bin/python -m pytest $(WORKSTEAL) -m "not slow"

cluster-tools:  ## Slurm, Open MPI, MPICH and iproute2, for tests/test_clusters.py, which skips without them (Debian, root)
	apt-get install --yes --quiet --no-install-recommends slurmctld slurmd slurm-client iproute2 openmpi-bin mpich

browser:  ## Chromium, for the tests that look at pages, which skip without it (Debian, root)
	apt-get install --yes --quiet --no-install-recommends chromium fonts-dejavu-core

SITE := build/site
docs: $(DOCS)/packages.stamp  ## the documentation site, in build/site; SITE=FOLDER adds this version to a folder of releases
	$(DOCS)/bin/python docs/site/build.py $(SITE)

lint: $(VENV)/dev.stamp  ## fix what the linters can, then check imports and types
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(IMPORTS)
	$(BIN)/mypy

REPORTS := $(CURDIR)/torchhal_runs/conformance
conformance: $(VENV)/dev.stamp $(XLA)/packages.stamp $(ENGINES:%=.venv-%/packages.stamp)  ## every part's report, and the page of reports
	TORCHHAL_CONFORMANCE_REPORTS=$(REPORTS) $(BIN)/python -m pytest plugins/conformance/tests/test_builtin.py plugins/*/tests/test_conformance.py
	TORCHHAL_CONFORMANCE_REPORTS=$(REPORTS) $(XLA)/bin/python -m pytest plugins/xla/tests/test_conformance.py
	for engine in $(ENGINES); do \
	TORCHHAL_CONFORMANCE_REPORTS=$(REPORTS) .venv-$$engine/bin/python -m pytest plugins/$$engine/tests/test_conformance.py || exit 1; done
	$(BIN)/python plugins/conformance/tests/results_page.py $(REPORTS)

bench: $(VENV)/dev.stamp $(ENGINES:%=.venv-%/packages.stamp)  ## ratios against raw PyTorch
	for script in benchmarks/*.py; do $(BIN)/python $$script || exit 1; done
	for engine in $(ENGINES); do .venv-$$engine/bin/python benchmarks/engines.py || exit 1; done
	.venv-lightning/bin/python benchmarks/lightning_step.py

$(BIN)/python:
	@echo "== a virtual environment in $(VENV) =="
	$(PYTHON) -m venv $(VENV) || python3 -m venv $(VENV)

# PyPI's torch for Linux brings CUDA, 3.6 GB; PyTorch's own index has a build for the CPU, of 200 MB.
ifeq ($(shell uname -s)$(wildcard /dev/nvidiactl /dev/kfd),Linux)
TORCH_INDEX := --extra-index-url https://download.pytorch.org/whl/cpu
endif

$(VENV)/torch.stamp: $(BIN)/python constraints.txt
	@echo "== torch$(if $(TORCH_INDEX), for the CPU (there is no GPU here)), into $(VENV): once, a minute or more =="
	$(BIN)/python -m pip install --no-deps --retries 1 --constraint constraints.txt $(TORCH_INDEX) torch
	touch $@

$(VENV)/demo.stamp: $(VENV)/torch.stamp core/pyproject.toml
	@echo "== torchhal, and scikit-learn for its digits =="
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ./core scikit-learn
	touch $@

$(VENV)/dev.stamp: $(VENV)/demo.stamp requirements-dev.txt $(PLUGINS:=/pyproject.toml)
	@echo "== what the tests need: the plugins, DeepSpeed, Ray, hivemind, linters; three minutes or more =="
	DS_BUILD_OPS=0 DS_ACCELERATOR=cpu \
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --requirement requirements-dev.txt $(PLUGINS:%=--editable ./%)
	@echo "== compiling the simulated accelerator =="
	for flavour in sim hpu; do $(BIN)/python -c "import torchhal_simulator as s; s.load('$$flavour')" || exit 1; done  # compiles, once
	touch $@

$(XLA)/torch.stamp: $(wildcard plugins/xla/environment/*.py) plugins/xla/environment/requirements.txt
	$(PYTHON) plugins/xla/environment/create.py $(XLA)
	touch $@

$(XLA)/packages.stamp: $(XLA)/torch.stamp core/pyproject.toml plugins/conformance/pyproject.toml plugins/parallel/pyproject.toml plugins/xla/pyproject.toml
	$(XLA)/bin/python -m pip install --quiet --no-deps --no-build-isolation $(patsubst %,--editable ./%,core plugins/conformance plugins/parallel plugins/xla)
	touch $@

.PRECIOUS: .venv-%/torch.stamp .venv-%/engine.stamp
.venv-%/torch.stamp: requirements-test.txt constraints.txt
	$(PYTHON) -m venv --clear .venv-$*
	.venv-$*/bin/python -m pip install --quiet --no-deps --constraint constraints.txt $(TORCH_INDEX) torch
	.venv-$*/bin/python -m pip install --quiet --constraint constraints.txt --requirement requirements-test.txt torch
	touch $@

.venv-%/engine.stamp: .venv-%/torch.stamp plugins/%/environment/install.py
	.venv-$*/bin/python plugins/$*/environment/install.py
	touch $@

OWN_PACKAGES = core plugins/conformance plugins/parallel plugins/simulator
.venv-%/packages.stamp: .venv-%/engine.stamp $(OWN_PACKAGES:=/pyproject.toml) plugins/%/pyproject.toml
	.venv-$*/bin/python -m pip install --quiet --no-deps --no-build-isolation $(OWN_PACKAGES:%=--editable ./%) --editable ./plugins/$*
	touch $@

# The newest torch is several gigabytes where pip's has CUDA. Where it is none that the simulator is for, the tests that
# run on it skip.
$(NEWEST)/packages.stamp: requirements-dev.txt core/pyproject.toml $(PLUGINS:=/pyproject.toml)
	$(NEWEST_PYTHON) -m venv $(NEWEST)
	DS_BUILD_OPS=0 DS_ACCELERATOR=cpu \
	$(NEWEST)/bin/python -m pip install --quiet --upgrade torch --requirement requirements-dev.txt --editable ./core
	$(NEWEST)/bin/python -m pip install --quiet --no-deps $(PLUGINS:%=--editable ./%)
	touch $@

$(DOCS)/packages.stamp: docs/site/requirements.txt
	$(PYTHON) -m venv --clear $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet --no-deps --requirement $<
	touch $@

clean:  ## remove the environments, the runs and the site
	rm -rf $(VENV) $(XLA) $(ENGINES:%=.venv-%) $(NEWEST) $(DOCS) torchhal_runs build
