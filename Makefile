# Each habit is one target, and each sets up what it needs: `make demo` and `make test` work on a fresh machine.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
PYTEST_ARGS ?=
# Whole files go to one worker: they share captures, and a multi-process test waits more than it computes.
WORKERS ?= 2

# One thread a process: the suite and the demo start several, and more threads than cores only slow each other down.
export OMP_NUM_THREADS ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: demo test check lint types imports unit format bench clean setup

demo: $(READY)
	$(BIN)/python examples/train_llama.py

test: check unit

check: lint types imports

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

imports: $(READY)
	$(BIN)/lint-imports

unit: $(READY)
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile $(PYTEST_ARGS)

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)
	$(BIN)/python benchmarks/search_speed.py
	$(BIN)/python benchmarks/rewrite_overhead.py
	$(BIN)/python benchmarks/calibrated_layouts.py
	$(BIN)/python benchmarks/engine_overhead.py
	$(BIN)/python benchmarks/peak_memory.py
	$(BIN)/python benchmarks/soak.py

setup: $(READY)

# The stamp is written last, so an interrupted set-up starts over.
$(READY): pyproject.toml
	@echo "setting up $(VENV) (once)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --editable '.[hf,dev]'
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
