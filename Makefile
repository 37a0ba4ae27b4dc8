# Everything a person or CI runs. `make` alone lists the targets.
SHELL := bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEV := $(VENV)/.installed-dev
PIP := $(BIN)/python -m pip install --disable-pip-version-check
# Of pip's lines those of what takes long: large files, and the installation.
LONG := { grep --line-buffered -oE 'Downloading .*(GB|[0-9]{3}\.[0-9] MB)\)|Installing collected packages' || true; }

.DEFAULT_GOAL := help
.PHONY: help env dev train-digits test test-all check format bench docs clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## */  make \1\t/' | expand -t 20

env: $(STAMP)  ## make .venv with vitral in the tested versions; does nothing when up to date

$(STAMP): pyproject.toml constraints.txt
	@echo "Setting up $(VENV): PyTorch and what vitral needs (about 6 GB the first time; a few minutes)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) --quiet 'pip>=25.1'
	@set -o pipefail; $(PIP) --constraint constraints.txt --editable '.[serve,onnx,tune]' | $(LONG)
	@touch $@

dev: $(DEV)  ## add what the tests, the checks and the site need

$(DEV): $(STAMP)
	@echo "Adding the libraries of the tests to $(VENV) (about 2 GB the first time)"
	@set -o pipefail; $(PIP) --constraint constraints.txt --editable . --group dev | $(LONG)
	@touch $@

train-digits: env  ## train on the embedded digits and show what to do next
	@$(BIN)/vitral train digits --out runs/digits --overwrite

test: dev  ## the quick tests: every part and command, in minutes
	@$(BIN)/python tools/run_tests.py quick

test-all: dev  ## all tests: slow ones, a lesser CPU, servers, browser, ranks, killed processes too
	@$(BIN)/python tools/run_tests.py all

check: dev  ## lint, formatting, types and words
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/python tools/check_prose.py

format: dev  ## put the code in the house's format
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench: dev  ## measure beside timm, transformers, torchvision and vit-pytorch
	@$(BIN)/python -m benchmarks

docs: dev  ## build the site of the documentation in build/docs; a broken link fails
	@$(BIN)/python tools/build_site.py build/docs

clean:  ## remove the environment, caches, the site and runs/digits
	rm -rf $(VENV) build/docs runs/digits .pytest_cache .mypy_cache .ruff_cache
