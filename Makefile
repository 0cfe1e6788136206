# outlast: two commands do all the set-up: `make demo` and `make test`. Both make .venv first (once).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.made
EXTRAS := dev,docs

.PHONY: env demo test lint bench docs clean
env: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@echo "outlast: making $(VENV): outlast itself (editable), torch 2.13.0 (CPU), and the tools in constraints.txt"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$(EXTRAS)]'
	@touch $(STAMP)

demo: $(STAMP)
	$(BIN)/outlast demo

test: $(STAMP)
	$(BIN)/python -m pytest

lint: $(STAMP)
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/ruff format --check src tests benchmarks
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(STAMP)
	$(BIN)/sphinx-build -W -b html docs docs/_build/html

bench: $(STAMP)
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) docs/_build
