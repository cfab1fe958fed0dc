# Draftgate: what a developer types. `make help` lists it.
#
# Everything is installed into .venv at the versions of constraints.txt. Nothing here installs system
# packages, and once `make setup` has run, no other target needs the network.

PYTHON ?= python3
ARGS ?=

# Which PyTorch: empty takes what pip finds by default (on Linux the CUDA build, gigabytes);
# `make setup TORCH_INDEX=cpu` takes the far smaller CPU wheels from PyTorch's own index. Any folder
# of that index works (cpu, cu126, ...).
TORCH_INDEX ?=
torch_flags = $(if $(TORCH_INDEX),--extra-index-url https://download.pytorch.org/whl/$(TORCH_INDEX))

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-done
pip_install = $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help setup serve test test-long check docs format clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo "  variables: PYTHON=python3.12      the interpreter for .venv (3.11 or newer)"
	@echo "             TORCH_INDEX=cpu        PyTorch's CPU wheels, for a machine without a GPU"
	@echo "             ARGS='...'             passed on to draftgate serve or pytest"

setup: $(STAMP) ## make .venv with everything in it (TORCH_INDEX=cpu without a GPU)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "Draftgate needs Python 3.11 or newer; '$(PYTHON)' is: $$($(PYTHON) --version 2>&1)." >&2; \
	  echo "Name another one: make setup PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "'$(PYTHON)' cannot make virtual environments (venv or ensurepip is missing)." >&2; \
	  echo "On Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@[ -n "$(TORCH_INDEX)" ] || command -v nvidia-smi >/dev/null 2>&1 || \
	  echo "No NVIDIA GPU found: 'make setup TORCH_INDEX=cpu' would take PyTorch's smaller CPU wheels."
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	$(pip_install) --quiet setuptools
	$(pip_install) --quiet $(torch_flags) --no-build-isolation -e '.[engine,dev]'
	@touch $@

serve: $(STAMP) ## serve the shipped model on port 8000 (state in memory)
	$(BIN)/draftgate serve --port 8000 $(ARGS)

test: $(STAMP) ## the quick tests
	$(BIN)/python -m pytest $(ARGS)

test-long: $(STAMP) ## every test, the long ones too
	$(BIN)/python -m pytest --long $(ARGS)

check: $(STAMP) ## style, types, import contracts, docstrings of tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/interrogate tests

docs: $(STAMP) ## write the pages that are made from declarations
	$(BIN)/python -m draftgate.gateway.cli.reference docs/reference

format: $(STAMP) ## put the code into form
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .

clean: ## remove .venv and every cache
	rm -rf $(VENV) build *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
