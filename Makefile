# One target a task, the same that CI runs. Each sets up what it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# The releases of DeepSpeed that ds_parity/config/versions.py speaks of, where results of them go, and where their
# operators are compiled: outside of the repository, and once for each release.
VERSIONS ?= 0.18.4 0.18.9 0.19.0 0.19.3 0.19.5 0.19.8
RESULTS ?= tools/versions/results
OPERATORS ?= $(HOME)/.cache/ds_parity/operators

# Their figures are in docs/how_it_works.md, three of them in the README too.
FAULTS := mean-of-micro-batches dp-mean-left-in gas-scaled-twice scheduler-per-pass boundary-off-by-one

# What the table of controls in docs/harness.md is of.
CONTROLS := zero0_fp32 zero1_fp32 zero2_fp32 zero3_fp32 zero2_bf16

# The table of DeepSpeed's faults by version in docs/deepspeed_faults.md.
FAULT_VERSIONS := 0.16.9 0.17.6 0.18.4 0.18.9 0.19.0 0.19.3 0.19.5 0.19.8

.PHONY: verify online matrix figures controls migrations pages docs pictures test test-slow test-hf test-hard lint package bench bench-check \
	test-versions test-older faults upstream clean

verify: $(READY)
	$(BIN)/ds-parity verify ds_configs/zero2_bf16.json

# A policy samples, is rewarded and trained on; ends with the curve of the run, online_out/curve.svg.
online: $(READY)
	rm -rf online_out
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/deepspeed --num_accelerators 2 tools/train_online.py

matrix: $(READY)
	$(BIN)/ds-parity verify --matrix
	$(BIN)/python -m tools.update_docs matrix ds_parity_out/matrix/matrix.md

figures: $(READY)
	$(BIN)/ds-parity controls ds_configs/zero2_fp32.json $(foreach fault,$(FAULTS),--only $(fault))
	$(BIN)/python -m tools.update_docs figures ds_parity_out/controls

controls: $(READY)
	mkdir -p ds_parity_out/controls_found
	for name in $(CONTROLS); do \
		$(BIN)/ds-parity controls ds_configs/$$name.json --json > ds_parity_out/controls_found/$$name.json || exit; \
	done
	$(BIN)/python -m tools.update_docs controls ds_parity_out/controls_found

# Other trainers' loops before and after; what they come to is kept, and their pages are made of it.
migrations: $(VENV)/.ready-hf
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/deepspeed --num_accelerators 2 tools/migrations/measure.py
	$(BIN)/python -m tools.update_docs pages

# The tables that need no run: keys, symptoms, DeepSpeed's faults, quotas, ratios.
pages: $(READY)
	$(BIN)/python -m tools.update_docs pages

# Every warning is an error, and nothing may be loaded from the network. Docstrings are read and not imported.
docs: $(VENV)-docs/.ready
	NO_MKDOCS_2_WARNING=1 $(VENV)-docs/bin/mkdocs build --strict
	$(VENV)-docs/bin/python tools/check_site.py site

pictures: $(READY)
	$(BIN)/python tools/draw_pictures.py
	$(BIN)/python tools/draw_report.py
	$(BIN)/python tools/draw_online.py
	$(BIN)/python tools/draw_results.py

test: $(READY)
	$(BIN)/python -m pytest

# What `make test` leaves out: starts of ranks in plenty, and waits until a time is up.
test-slow: $(READY)
	$(BIN)/python -m pytest -m slow

# accelerate, transformers' Trainer and TRL on two ranks.
test-hf: $(VENV)/.ready-hf
	$(BIN)/python -m pytest -m hf tests/frameworks

# What takes too long for every day: unforeseen uses, ranks out of sync, overflows, long runs, kills.
test-hard: $(READY)
	$(BIN)/python -m pytest -s tests/hard

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Wheel and source archive, and the wheel in an environment of its own.
package: $(VENV)-package/.ready
	$(VENV)-package/bin/python tools/check_package.py

bench: $(READY)
	$(BIN)/python -m pytest benchmarks --benchmark-only -s

# Ratios again, beside those in benchmarks/RESULTS.md: fails where one is worse than its quartiles. Not for CI, whose
# machines are shared. SECTIONS="by-hand recipe" measures others than the usual ones.
bench-check: $(READY)
	$(BIN)/python -m benchmarks.checking $(SECTIONS)

# What docs/versions.md shows; with QUICK=1 the quick part of the matrix alone.
test-versions: $(addprefix test-version-,$(VERSIONS)) $(READY)
	$(BIN)/python -m tools.update_docs pages

# An environment and compiled operators of its own for each release.
test-version-%:
	$(PYTHON) -m venv $(VENV)-$*
	sed 's/^deepspeed==.*/deepspeed==$*/' constraints.txt > $(VENV)-$*/constraints.txt
	$(VENV)-$*/bin/python -m pip install --quiet --constraint $(VENV)-$*/constraints.txt --editable '.[test]'
	PATH="$(CURDIR)/$(VENV)-$*/bin:$$PATH" TORCH_EXTENSIONS_DIR=$(OPERATORS)/$* \
		$(VENV)-$*/bin/python -m tools.versions.measure --into $(RESULTS) \
		$(if $(QUICK),--matrix quick,--matrix --tests tests/engine tests/distributed)

# Each in a folder of its own beside the torch that is installed, with operators of its own: about 3 minutes each, and
# as long again at the first time.
faults: $(READY) $(addprefix versions/,$(FAULT_VERSIONS))
	$(BIN)/python -m tools.fault_table --operators versions/operators $(addprefix versions/,$(FAULT_VERSIONS))
	$(BIN)/python -m tools.update_docs pages

# The harness beside the same versions, all of them; `make test` runs one where it is there.
test-older: $(READY) $(addprefix versions/,$(FAULT_VERSIONS))
	$(BIN)/python -m pytest -m "slow or not slow" tests/distributed/test_older_versions.py

versions/%:
	$(BIN)/python -m pip install --quiet --no-deps --target $@ deepspeed==$*

upstream: $(READY)
	$(BIN)/python tools/run_upstream_tests.py $(DEEPSPEED)

clean:
	rm -rf $(VENV) $(VENV)-* site

$(READY): setup.cfg constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

$(VENV)/.ready-hf: $(READY)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,hf,lightning]'
	touch $@

$(VENV)-docs/.ready: docs/requirements.txt constraints.txt
	$(PYTHON) -m venv $(VENV)-docs
	$(VENV)-docs/bin/python -m pip install --quiet --constraint constraints.txt --requirement docs/requirements.txt
	touch $@

$(VENV)-package/.ready: constraints.txt
	$(PYTHON) -m venv $(VENV)-package
	$(VENV)-package/bin/python -m pip install --quiet --constraint constraints.txt build twine
	touch $@
