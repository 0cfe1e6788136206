# outlast: two commands do all the set-up: `make demo` and `make test`. Both make .venv first (once).
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do command -v $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
EXTRAS := dev,docs
DEMO_ARGS ?=
TEST_ARGS ?=
PROVE_MINUTES ?= 7.5
PROVE_KEPT ?= prove
STRIKES_ARGS ?= --fleets 100 --strikes 1000 --resume strikes.jsonl
# For two cores: fleets wait for a part of their time, and what computes has one thread.
TEST_WORKERS ?= 3
CAMPAIGN_WORKERS ?= 2
# What CI runs of the tests marked campaign, but for those marked soak; campaign-long runs all the others.
CAMPAIGN := tests/runtime tests/engines tests/observe tests/prove/test_faults.py tests/prove/test_strikes.py tests/tensors/test_rules_training.py
# Carries axe-core for the tests of the page. They need that one file of it, and not the 48 MB of Playwright that it asks for.
AXE := axe-playwright-python
# Named by what it depends on, not dated: a fresh checkout or a switch of branches makes nothing again.
STAMP := $(VENV)/.made-$(shell cat pyproject.toml constraints.txt | cksum | tr -d ' ')

.PHONY: help env demo test campaign campaign-long campaign-hosts prove strikes lint docs bench names numbers reference release browser-env trainers-env cluster-env clean
help:
	@echo "make demo    train, kill things, and compare the bits with an undisturbed run (DEMO_ARGS=...)"
	@echo "make test    all tests but the long searches (TEST_ARGS=...)"
	@echo "make campaign  the fleets of processes that CI runs"
	@echo "make campaign-long  all other tests marked campaign or soak: hours"
	@echo "make campaign-hosts  300 faults of hosts in network namespaces, as root: an hour (HOST_FAULTS=, HOST_SEED=)"
	@echo "make prove   a quarter of an hour of faults on two scripts, replicas of one process and of two, with a seed of its own;"
	@echo "              goes on where it was stopped (PROVE_MINUTES=..., of each; PROVE_KEPT=: begins anew and keeps nothing)"
	@echo "make strikes  1,000 strikes from outside at 100 fleets: hours; goes on where it was stopped (STRIKES_ARGS=...)"
	@echo "make lint    ruff, mypy --strict, import contracts"
	@echo "make docs    the documentation, into docs/_build/html"
	@echo "make bench   the measurements"
	@echo "make release  build wheel and sdist, install the wheel into a fresh environment, run the demo from an empty folder"
	@echo "              (RELEASE_PYTHONS='python3.11 python3.12 python3.13': with each of them)"
	@echo "make trainers-env  Hugging Face's trainer, Lightning, and libraries of data, for the tests that otherwise skip (a minute, 220 MB)"
	@echo "make browser-env  Chromium and Prometheus for the tests that otherwise skip (Debian, as root)"
	@echo "make cluster-env  etcd, Slurm (Debian, as root), Ray, Kubernetes' schemas, for the tests that otherwise skip; no service is left"
	@echo "make names   write the list of public names that the tests hold the code to"
	@echo "make reference  write what the reference pages take from the source: settings, errors, events, commands"
	@echo "make numbers  write the page of numbers beside peers from benchmarks/RESULTS.md"
	@echo "make env     .venv alone; make clean removes it"

env: $(STAMP)

$(STAMP):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "outlast needs Python 3.11 or newer, this is " + sys.version.split()[0] + "; name another: make PYTHON=python3.12")'
	@echo "outlast: making $(VENV) with $$($(PYTHON) --version): outlast itself (editable), torch 2.13.0, and the tools"
	@echo "outlast: in constraints.txt. This downloads about 400 MB, once; later it needs no network."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[$(EXTRAS)]'
	$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt --no-deps $(AXE)
	@rm -f $(VENV)/.made-*
	@touch $@

demo: $(STAMP)
	$(BIN)/outlast demo $(DEMO_ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest -n $(TEST_WORKERS) --dist worksteal -m "not campaign" $(TEST_ARGS)

# A fleet's limit is a guard against a hang: on a machine that others use, processes alone take long to start.
campaign: $(STAMP)
	$(BIN)/python -m pytest -n $(CAMPAIGN_WORKERS) --dist worksteal --timeout=300 $(CAMPAIGN) -m "campaign and not soak" $(TEST_ARGS)

campaign-long: $(STAMP)
	$(BIN)/python -m pytest -n $(CAMPAIGN_WORKERS) --dist worksteal tests $(addprefix --ignore=,$(CAMPAIGN)) -m "campaign and not soak" $(TEST_ARGS)
	$(BIN)/python -m pytest -n $(CAMPAIGN_WORKERS) --dist worksteal tests -m "campaign and soak" $(TEST_ARGS)

# One fleet at a time: each has up to four hosts.
HOST_FAULTS ?= 300
HOST_SEED ?= 1
campaign-hosts: $(STAMP)
	OUTLAST_HOST_FAULTS=$(HOST_FAULTS) OUTLAST_HOST_SEED=$(HOST_SEED) $(BIN)/python -m pytest tests/runtime/test_host_faults.py $(TEST_ARGS)

# The seed is drawn when the file that it resumes is begun, and printed; a failure prints the command that strikes the same way again.
PROVE := $(BIN)/outlast prove run --runs 100000 --minutes $(PROVE_MINUTES)
prove: $(STAMP)
	$(PROVE) $(if $(PROVE_KEPT),--resume $(PROVE_KEPT)-replicas.jsonl) tests/prove/scripts/nanogpt.py --max-iters 300
	$(PROVE) $(if $(PROVE_KEPT),--resume $(PROVE_KEPT)-ranks.jsonl) --ranks 2 -m outlast.examples.fsdp_gpt --steps 150

strikes: $(STAMP)
	$(BIN)/outlast prove strikes $(STRIKES_ARGS)

lint: $(STAMP)
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/ruff format --check src tests benchmarks
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(STAMP)
	$(BIN)/sphinx-build -W --keep-going -b html docs docs/_build/html

bench: $(STAMP)
	$(BIN)/python -m benchmarks all

# The wheel alone must do: built, installed where nothing else is, tried from an empty folder, with each Python that is named.
RELEASE := $(CURDIR)/build/release
RELEASE_PYTHONS ?= $(PYTHON)
release: $(STAMP)
	rm -rf $(RELEASE) && mkdir -p $(RELEASE)/empty
	$(BIN)/python -m build --no-isolation --outdir $(RELEASE)/dist .
	@set -e; for python in $(RELEASE_PYTHONS); do \
	  echo "outlast: the wheel with $$($$python --version)"; rm -rf $(RELEASE)/venv; $$python -m venv $(RELEASE)/venv; \
	  $(RELEASE)/venv/bin/python -m pip install -qq --disable-pip-version-check -c constraints.txt "$$(ls $(RELEASE)/dist/*.whl)[train,serve]"; \
	  (cd $(RELEASE)/empty && ../venv/bin/outlast --version && ../venv/bin/outlast doctor --quick && ../venv/bin/outlast demo $(DEMO_ARGS) && \
	  ../venv/bin/python -c "from importlib import resources as r; import outlast; assert r.files('outlast').joinpath('py.typed').is_file() and r.files('outlast.observe.web').joinpath('page/app.js').is_file()"); \
	done
	@echo "outlast: $(RELEASE)/dist is ready"

BROWSER_PACKAGES := chromium chromium-driver prometheus
browser-env:
	@if command -v apt-get >/dev/null; then \
	  apt-get install -qq -y --no-install-recommends $(BROWSER_PACKAGES) >/dev/null || { apt-get update -qq && apt-get install -qq -y --no-install-recommends $(BROWSER_PACKAGES) >/dev/null; }; \
	  if [ -d /run/systemd/system ]; then systemctl disable --now prometheus 2>/dev/null || true; fi; \
	else echo "browser-env: no apt-get here; install chromium, chromedriver and prometheus yourself"; fi

trainers-env: $(STAMP)
	$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[trainers,sources]'

# The daemons are started by the tests that need them, and by nobody else.
CLUSTER_PACKAGES := etcd-server etcd-client slurmctld slurmd slurm-client munge
cluster-env: $(STAMP)
	$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[cluster]'
	@if command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ]; then \
	  apt-get install -qq -y --no-install-recommends $(CLUSTER_PACKAGES) >/dev/null || { apt-get update -qq && apt-get install -qq -y --no-install-recommends $(CLUSTER_PACKAGES) >/dev/null; }; \
	  for name in etcd slurmctld slurmd munge; do if [ -d /run/systemd/system ]; then systemctl disable --now $$name 2>/dev/null || true; fi; done; \
	else echo "cluster-env: no apt-get as root here; install $(CLUSTER_PACKAGES) yourself"; fi

numbers:
	$(PYTHON) -m benchmarks._numbers_page

reference: $(STAMP)
	PYTHONPATH=src $(BIN)/python docs/_ext/outlast_reference.py

names:
	$(PYTHON) tests/house/public_names.py > tests/house/public_names.txt
	$(PYTHON) tests/house/matrix.py > docs/reference/matrix.md

clean:
	rm -rf $(VENV) docs/_build
