# Everything a person or CI runs. `make` alone lists the targets.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help env demo test check format bench clean

help:  ## list the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## */  make \1\t/' | expand -t 16

env: $(STAMP)  ## make .venv with the tested versions; does nothing when up to date

$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Setting up $(VENV): PyTorch and what vitral needs (some GB the first time; a few minutes)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check 'pip>=25.1'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable . --group dev
	@touch $@

demo: env  ## train on the embedded digits and show what to do next
	@$(BIN)/vitral train digits --out runs/demo --overwrite

test: env  ## all tests, a process for each core
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto

check: env  ## lint, formatting and types
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

format: env  ## put the code in the house's format
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench: env  ## measure beside timm, transformers, torchvision and vit-pytorch
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --group peers
	@$(BIN)/python -m benchmarks

clean:  ## remove the environment, caches and runs/demo
	rm -rf $(VENV) runs/demo .pytest_cache .mypy_cache .ruff_cache
