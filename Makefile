# One target a task, the same that CI runs. Each sets up what it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# The oldest DeepSpeed of setup.cfg's range, which is the newest that there is, too.
VERSIONS ?= 0.19.8

.PHONY: verify matrix test test-hard lint bench test-versions upstream clean

verify: $(READY)
	$(BIN)/ds-parity verify ds_configs/zero2_bf16.json

matrix: $(READY)
	$(BIN)/ds-parity verify --matrix
	$(BIN)/python tools/update_readme_matrix.py ds_parity_out/matrix/matrix.md

test: $(READY)
	$(BIN)/python -m pytest

test-hard: $(READY)
	$(BIN)/python -m pytest -m hard -s

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(READY)
	$(BIN)/python -m pytest benchmarks --benchmark-only -s

test-versions: $(addprefix test-version-,$(VERSIONS))

# An environment and compiled operators of its own for each version.
test-version-%:
	$(PYTHON) -m venv $(VENV)-$*
	sed 's/^deepspeed==.*/deepspeed==$*/' constraints.txt > $(VENV)-$*/constraints.txt
	$(VENV)-$*/bin/python -m pip install --quiet --constraint $(VENV)-$*/constraints.txt --editable '.[test]'
	TORCH_EXTENSIONS_DIR=$(CURDIR)/$(VENV)-$*/torch_extensions \
		$(VENV)-$*/bin/python -m pytest tests/engine tests/distributed

upstream: $(READY)
	$(BIN)/python tools/run_upstream_tests.py $(DEEPSPEED)

clean:
	rm -rf $(VENV) $(VENV)-*

$(READY): setup.cfg constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@
