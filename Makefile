# Every target sets up what it needs: a virtual environment in .venv, torch first (see constraints.txt).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
OUT ?= results

.DEFAULT_GOAL := help
.PHONY: help setup reproduce test test-slow test-browser docs lint bench bench-scale bench-peers bench-peers-smoke bench-peers-tables bench-same-rate bench-private fuzz clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 28

setup: $(VENV)/.complete  ## create .venv with everything that development needs

$(VENV)/.complete: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "sgdol needs Python 3.11 or newer; try make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) 'pip>=25.1'
	$(PIP) torch==2.13.0
	$(PIP) -e '.[torch,jax,paper,trainers,tensorboard,private,plot]' --group dev
	@touch $@

reproduce: setup  ## every figure and claim of the paper, into results/ (OUT=folder to change it)
	$(BIN)/sgdol reproduce --out $(OUT)

test: setup  ## the tests, in parallel
	$(BIN)/python -m pytest -n 2 --dist worksteal

test-slow: setup  ## the tests that take minutes
	$(BIN)/python -m pytest -m slow

test-browser: setup  ## the report in Chromium, with axe-core where npm has it
	npm install --silent --no-audit --no-fund --prefix $(VENV)/axe axe-core@4.14.0 || echo "no axe-core: its test is skipped"
	$(BIN)/python -m pytest -m browser

docs: setup  ## the site, into docs/_build/html; runs the gallery
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html

lint: setup  ## ruff, mypy, pyright and the import contract
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/basedpyright --level error
	$(BIN)/lint-imports

bench: setup  ## cost against torch.optim.SGD, on one thread; writes benchmarks/results/
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.cost

bench-scale: setup  ## how the cost grows with parameters, microbatches and ranks; writes benchmarks/results/
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.scale

bench-peers: setup  ## quality against other optimizers, within the hour on two cores; continues if interrupted
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.quality measure --half both --jobs 2

bench-peers-smoke: setup  ## the same in two minutes, to see that it runs; writes results/quality-smoke/
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.quality measure --half both --jobs 2 --smoke

bench-peers-tables: setup  ## its tables and plot again, from the saved runs
	$(BIN)/python -m benchmarks.quality tables

bench-same-rate: setup  ## SGDOL beside SGD at the same learning rate, at a third and at three times it
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.same_rate

bench-private: setup  ## accuracy under differential privacy; continues if interrupted
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.private measure

fuzz: setup  ## random configurations, bad arguments and damaged results: minutes
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz.configurations --count 10000
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz.arguments
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz.results --count 300

clean:  ## remove what the targets made
	rm -rf $(VENV) results docs/_build .pytest_cache .mypy_cache .ruff_cache .hypothesis
