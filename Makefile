# make demo   from an empty machine to streamed text
# make build  the environment; compiles the native kernels where their source changed
# make test   every test; sets up what it needs
# make lint   ruff and mypy
# make check  lint and test

PYTHON ?= python3
TORCH  ?= torch==2.13.0
VENV   := .venv
BIN    := $(VENV)/bin

PLUGINS     := plugins/llama plugins/qwen3 plugins/quantized
MANIFESTS   := pyproject.toml $(PLUGINS:%=%/pyproject.toml)
NATIVE      := CMakeLists.txt $(wildcard fuel_core/kernels/native/src/*)
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo build test lint format check clean

demo: $(VENV)/.installed
	@$(BIN)/fuel pull smollm2
	$(BIN)/fuel generate smollm2 "What is gravity?" --chat --max-new-tokens 24 --stats

build: $(VENV)/.installed

test: $(VENV)/.dev
	$(BIN)/python -m pytest $(ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy -p fuel_core $(PLUGINS:plugins/%=-p fuel_plugin_%)

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

check: lint test

$(VENV)/.torch:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Fuel needs Python 3.10 or newer: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install $(TORCH)
	@touch $@

$(VENV)/.installed: $(VENV)/.torch $(MANIFESTS) $(NATIVE)
	$(BIN)/pip install --quiet --editable . $(PLUGINS:%=--editable %)
	@touch $@

$(VENV)/.dev: $(VENV)/.installed
	$(BIN)/pip install --quiet --group dev
	@touch $@

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis
