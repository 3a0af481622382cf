# Every target sets up what it needs: a virtual environment in .venv, torch first (see constraints.txt).
# Another Python: make test PYTHON=python3.12 VENV=.venv312
PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
TORCH ?= $(shell grep '^torch==' constraints.txt)
EXTRAS ?= torch,jax,paper,trainers,tensorboard,private,plot
GROUP ?= dev
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS)
OUT ?= results

# What other versions of Python and of the dependencies could break, in a few minutes; PURE needs no torch.
PURE := tests/test_cli.py tests/test_import.py tests/test_plot.py tests/test_reference.py tests/test_surrogate.py \
	tests/test_learners.py tests/test_metrics.py tests/jax/test_sgdol_jax.py tests/jax/test_checkpoints.py tests/paper/test_results.py \
	tests/paper/test_report.py
QUICK := $(PURE) tests/test_site.py tests/torch/test_exact_vectors.py tests/torch/test_checkpoint.py tests/torch/test_old_states.py \
	tests/torch/test_log.py tests/trainers/test_lightning.py tests/trainers/test_huggingface.py tests/trainers/test_accelerate.py \
	tests/private

.DEFAULT_GOAL := help
.PHONY: help setup reproduce test test-slow test-browser test-quick test-lowest test-newest test-without-torch dist release-check docs lint bench bench-free bench-calls bench-scale bench-peers bench-peers-smoke bench-peers-tables bench-networks bench-networks-smoke bench-networks-tables bench-same-rate bench-batch-norm bench-weight-decay bench-private fuzz clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 28

setup: $(VENV)/.complete  ## create .venv with everything that development needs

$(VENV)/.complete: pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "sgdol needs Python 3.11 or newer; try make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) 'pip>=25.1'
	$(if $(TORCH),$(PIP) $(TORCH))
	$(PIP) -e '.[$(EXTRAS)]' --group $(GROUP)
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

test-quick: setup  ## a part of the tests, and of the paper: what other versions could break
	$(BIN)/python -m pytest -n 2 $(QUICK)
	$(BIN)/sgdol reproduce --quick --out $(VENV)/results

test-lowest:  ## test-quick with the lowest versions that pyproject.toml allows, in .venv-lowest
	mkdir -p build && $(PYTHON) scripts/lowest.py > build/lowest.txt
	$(MAKE) test-quick VENV=.venv-lowest CONSTRAINTS=build/lowest.txt GROUP=test

test-newest:  ## test-quick with the newest versions of all but torch, in .venv-newest
	rm -rf .venv-newest
	mkdir -p build && echo $(TORCH) > build/newest.txt
	$(MAKE) test-quick VENV=.venv-newest CONSTRAINTS=build/newest.txt GROUP=test

test-without-torch:  ## the part that needs no torch, where there is none for a Python: PYTHON=python3.13 VENV=.venv313
	$(MAKE) setup TORCH= EXTRAS=jax,paper,plot GROUP=test VENV=$(VENV)-without-torch
	$(VENV)-without-torch/bin/python -m pytest -n 2 $(PURE)
	$(VENV)-without-torch/bin/sgdol reproduce --quick --out $(VENV)-without-torch/results

dist: setup  ## the sdist and the wheel, into dist/
	rm -rf dist
	$(BIN)/python -m build --outdir dist

release-check: setup  ## build, and try the wheel with every extra and the sdist in new environments: minutes (DIST=folder)
	$(BIN)/python scripts/release_check.py $(if $(DIST),--dist $(DIST)) $(if $(TAG),--tag $(TAG))

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

bench-free: setup  ## cost of SGDOLFree against AdamW, and memory, on one thread; writes benchmarks/results/
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.free_cost

bench-calls: setup  ## how many functions and files one update enters, in both front ends
	$(BIN)/python -m benchmarks.calls
	$(BIN)/python -m benchmarks.calls_jax

bench-scale: setup  ## how the cost grows with parameters, microbatches and ranks; writes benchmarks/results/
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.scale

bench-peers: setup  ## quality against other optimizers, within the hour on two cores; continues if interrupted
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.quality measure --half both --jobs 2

bench-peers-smoke: setup  ## the same in two minutes, to see that it runs; writes results/quality-smoke/
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.quality measure --half both --jobs 2 --smoke

bench-peers-tables: setup  ## its tables and plot again, from the saved runs
	$(BIN)/python -m benchmarks.quality tables

bench-networks: setup  ## larger networks against tuned optimizers, about two hours on two cores; continues if interrupted
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.networks measure --half both --jobs 2

bench-networks-smoke: setup  ## the same in two minutes, to see that it runs; writes results/networks-smoke/
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.networks measure --half both --jobs 2 --smoke

bench-networks-tables: setup  ## its tables again, from the saved runs
	$(BIN)/python -m benchmarks.networks tables

bench-same-rate: setup  ## SGDOL beside SGD at the same learning rate, at a third and at three times it
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.same_rate

bench-batch-norm: setup  ## SGDOL beside SGD at the same learning rates, on CNNs with and without BatchNorm
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.batch_norm

bench-weight-decay: setup  ## SGDOLFree's weight decay beside AdamW's, on few samples
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.weight_decay

bench-private: setup  ## accuracy under differential privacy; continues if interrupted
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.private measure

fuzz: setup  ## random configurations, bad arguments and damaged results: minutes
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz.configurations --count 10000
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz.arguments
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz.results --count 300

clean:  ## remove what the targets made
	rm -rf .venv* results build dist docs/_build .pytest_cache .mypy_cache .ruff_cache .hypothesis
