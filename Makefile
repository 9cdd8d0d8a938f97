# Every target does its own set-up: a virtual environment in .venv with exactly the versions of constraints.txt.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# Reverse look-ups that hang would otherwise stall torch's own stores in tests that compare with plain torch.
export RES_OPTIONS := timeout:1 attempts:1
export OMP_NUM_THREADS := 1

.PHONY: demo test check bench docs clean

demo: $(READY)
	$(BIN)/hotswap demo

test: check
	$(BIN)/python -m pytest --cov=hotswap.core --cov-branch --cov-report=term-missing:skip-covered --cov-fail-under=100

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(READY)
	$(BIN)/python benchmarks/collective_cost.py
	$(BIN)/python benchmarks/transfer.py
	$(BIN)/python benchmarks/recovery.py

docs: $(READY)
	$(BIN)/python -m hotswap.sim.protocol_docs

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[demo,megatron,test,dev,bench]'
	touch $(READY)

clean:
	rm -rf $(VENV) build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
