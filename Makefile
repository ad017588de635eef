# `make` lists what can be made: the comments (##) of the targets below. All but help and test-gpu set up .venv first,
# once. PYTHON names another Python 3.12.
SHELL := /bin/bash
PYTHON ?= python3.12
CONFIG ?=
DEVICE ?=
BUNDLE ?=
BIN := .venv/bin
SNAKEMAKE := $(BIN)/snakemake --profile profiles/local $(if $(CONFIG),--configfile '$(CONFIG)')

.PHONY: help run test test-all test-fast test-gpu lint status reproduce setup has-config has-bundle FORCE

help: ## list these
	@sed -nE 's/^([a-z-]+):.*## (.*)/make \1\t\2/p' Makefile | expand -t 17

run: has-config setup ## train the default experiment to its report; another: make run CONFIG=my.yaml
	@$(if $(CONFIG),PYTHONPATH=workflow/scripts $(BIN)/python -m megaboa.config '$(CONFIG)')
	@$(SNAKEMAKE)

has-config:
	@[ -z '$(CONFIG)' ] || [ -e '$(CONFIG)' ] || { echo "there is no file '$(CONFIG)': check CONFIG=" >&2; exit 1; }

test: setup ## run the tests that take seconds, and every flow that the README and the tutorial promise
	@$(BIN)/python tests/suite.py

test-all: setup ## run all tests but those that need GPUs
	@$(BIN)/python tests/suite.py fast walks rest

test-fast: setup ## run only the tests that take seconds
	@$(BIN)/pytest -q -n 2 --dist loadfile -m "not slow"

# On a machine with GPUs (SLURM too, where it is installed), after `make setup DEVICE=cuda`; or PYTHON=/path/to/python, one with
# Transformer Engine. Where SLURM checks the GPUs, nothing else may use them.
GPU_TESTS = $(if $(filter file,$(origin PYTHON)),$(BIN)/python,$(PYTHON)) -m pytest -v -ra
test-gpu: ## run the tests that need GPUs
	@$(GPU_TESTS) -n 4 --dist loadfile tests/e2e/gpus tests/bridge/test_parallel_reads.py
	@$(GPU_TESTS) tests/cluster/test_gpus.py tests/cluster/test_hosts_of_gpus.py tests/cluster/test_images_of_gpus.py

lint: setup ## lint the code, and check that generated files are current
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/snakefmt --check Snakefile workflow/Snakefile workflow/rules
	$(BIN)/snakemake --lint
	$(BIN)/megaboa write-schema --check
	PYTHONPATH=workflow/scripts $(BIN)/lint-imports --no-logo --no-cache

status: setup ## show the progress of all experiments
	@$(BIN)/megaboa status

reproduce: has-bundle setup ## rebuild a bundle's figures and runs, and compare: make reproduce BUNDLE=x.zip
	@$(BIN)/megaboa reproduce '$(BUNDLE)'

has-bundle:
	@[ -e '$(BUNDLE)' ] || { echo "$(if $(BUNDLE),there is no '$(BUNDLE)',say which bundle): make reproduce BUNDLE=x.zip" >&2; \
	  exit 1; }

setup: .venv/.ready ## set up .venv (8 GB of disk); for GPUs: make setup DEVICE=cuda

.venv/.ready: $(wildcard envs/*.txt envs/*.sh) $(if $(filter-out $(file < .venv/.device),$(DEVICE)),FORCE)
	@PYTHON="$(PYTHON)" DEVICE="$(DEVICE)" envs/setup.sh

FORCE:
