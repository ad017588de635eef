# Two commands: `make run` trains the default experiment to its report, `make test` runs the tests of what is promised.
# Both set up .venv first, once; `make setup DEVICE=cuda` before them sets it up for GPUs. PYTHON names another Python 3.12, CONFIG
# another experiment.
SHELL := /bin/bash
PYTHON ?= python3.12
CONFIG ?=
DEVICE ?=
BUNDLE ?=
BIN := .venv/bin
SNAKEMAKE := $(BIN)/snakemake --profile profiles/local $(if $(CONFIG),--configfile '$(CONFIG)')

.PHONY: run test test-all test-fast test-gpu lint schema status reproduce setup FORCE

run: setup
	@$(SNAKEMAKE)

test: setup
	@$(BIN)/python tests/suite.py

test-all: setup
	@$(BIN)/python tests/suite.py fast walks rest

test-fast: setup
	@$(BIN)/pytest -q -n 2 --dist loadfile -m "not slow"

# On a machine with GPUs (SLURM too, where it is installed), after `make setup DEVICE=cuda`; or PYTHON=/path/to/python, one with
# Transformer Engine. Where SLURM checks the GPUs, nothing else may use them.
GPU_TESTS = $(if $(filter file,$(origin PYTHON)),$(BIN)/python,$(PYTHON)) -m pytest -v -ra
test-gpu:
	@$(GPU_TESTS) -n 4 --dist loadfile tests/e2e/gpus tests/bridge/test_parallel_reads.py
	@$(GPU_TESTS) tests/cluster/test_gpus.py tests/cluster/test_hosts_of_gpus.py tests/cluster/test_images_of_gpus.py

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/snakefmt --check Snakefile workflow/Snakefile workflow/rules
	$(BIN)/snakemake --lint
	$(BIN)/megaboa write-schema --check
	PYTHONPATH=workflow/scripts $(BIN)/lint-imports --no-logo --no-cache

status: setup
	@$(BIN)/megaboa status

# What a bundle (`snakemake bundle`) holds, made again: make reproduce BUNDLE=x.zip
reproduce: setup
	@$(if $(BUNDLE),,$(error say which bundle: make reproduce BUNDLE=x.zip))
	@$(BIN)/megaboa reproduce '$(BUNDLE)'

setup: .venv/.ready

.venv/.ready: $(wildcard envs/*.txt envs/*.sh) $(if $(filter-out $(file < .venv/.device),$(DEVICE)),FORCE)
	@PYTHON="$(PYTHON)" DEVICE="$(DEVICE)" envs/setup.sh

FORCE:
