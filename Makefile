# Every target does its own set-up: a virtual environment in .venv with exactly the versions of constraints.txt.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Three runs share the tests: the first one alone measures coverage, which costs as much again; the second is of folders whose
# tests mind nothing but their own process and those that they start; the third is of everything else, one test after the other:
# whole jobs, which need both cores and look at all processes of the machine, ports that are taken after they were found free, and
# tests that fork the process they run in.
COVERED := tests/core
TOGETHER := tests/diagnosis tests/observability tests/planning tests/replication tests/session tests/sim tests/wire

# The newest torch that is tested, beside the pinned one: some of it can do more.
TORCH_NEXT := 2.14.1
VENV_NEXT := .venv-next
READY_NEXT := $(VENV_NEXT)/.ready-$(TORCH_NEXT)

# Reverse look-ups that hang would otherwise stall torch's own stores in tests that compare with plain torch.
export RES_OPTIONS := timeout:1 attempts:1
export OMP_NUM_THREADS := 1

.PHONY: demo test test-torch-next check bench docs clean

demo: $(READY)
	$(BIN)/hotswap demo

test: check
	$(BIN)/python -m pytest $(COVERED) --cov=hotswap.core --cov-branch --cov-report=term-missing:skip-covered --cov-fail-under=100
	$(BIN)/python -m pytest $(TOGETHER) --numprocesses 2 --dist worksteal
	$(BIN)/python -m pytest $(addprefix --ignore=,$(COVERED) $(TOGETHER))

test-torch-next: $(READY_NEXT)
	$(VENV_NEXT)/bin/python -m pytest tests/comm tests/replication tests/integrations

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(READY)
	$(BIN)/python benchmarks/collective_cost.py
	$(BIN)/python benchmarks/transfer.py
	$(BIN)/python benchmarks/recovery.py
	$(BIN)/python benchmarks/overhead.py

docs: $(READY)
	$(BIN)/python -m hotswap.sim.protocol_docs
	$(BIN)/python -m hotswap.sim.model_tables
	$(BIN)/python -m hotswap.diagnosis.docs

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[demo,megatron,etcd,fast,test,dev,bench]'
	touch $(READY)

$(READY_NEXT): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV_NEXT)
	grep -v '^torch==' constraints.txt > $(VENV_NEXT)/constraints.txt
	$(VENV_NEXT)/bin/python -m pip install --quiet --constraint $(VENV_NEXT)/constraints.txt torch==$(TORCH_NEXT) --editable '.[demo,megatron,test]'
	touch $(READY_NEXT)

clean:
	rm -rf $(VENV) $(VENV_NEXT) build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
