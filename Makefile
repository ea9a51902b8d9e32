# One target a task, the same that CI runs. Each sets up what it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: verify matrix test lint bench clean

verify: $(READY)
	$(BIN)/ds-parity verify ds_configs/zero2_bf16.json

matrix: $(READY)
	$(BIN)/ds-parity verify --matrix
	$(BIN)/python tools/update_readme_matrix.py ds_parity_out/matrix/matrix.md

test: $(READY)
	$(BIN)/python -m pytest

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(READY)
	$(BIN)/python -m pytest benchmarks --benchmark-only -s

clean:
	rm -rf $(VENV)

$(READY): setup.cfg constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@
