# Two commands for a newcomer: `make quickstart` and `make test`. TORCH_INDEX, where set, is handed to pip as an extra index.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
TORCH ?= 2.13.0
INDEX := $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX),)
# Without a GPU a plain `torch` may pull gigabytes of CUDA libraries, so this pin is installed first.
HAS_GPU := $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1 && echo yes)
export PIP_DISABLE_PIP_VERSION_CHECK = 1
export GOMP_SPINCOUNT ?= 20000

.PHONY: quickstart test check format setup setup-dev clean

quickstart: $(VENV)/.base
	$(BIN)/oneloop quickstart

setup: $(VENV)/.base
setup-dev: $(VENV)/.dev

test: $(VENV)/.dev
	$(BIN)/python -m pytest -q

check: $(VENV)/.dev
	$(BIN)/ruff format --check . && $(BIN)/ruff check . && $(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/python -m pytest -q -m "not slow" -n 2

format: $(VENV)/.dev
	$(BIN)/ruff format . && $(BIN)/ruff check --fix .

$(VENV)/.torch: pyproject.toml
	@begin=$$(date +%s); \
	$(PYTHON) -m venv $(VENV) && \
	$(if $(HAS_GPU),true,$(BIN)/python -m pip install -q $(INDEX) torch==$(TORCH)) && \
	echo "set up Python and PyTorch in $$(( $$(date +%s) - begin )) s" && touch $@

$(VENV)/.base: $(VENV)/.torch
	@begin=$$(date +%s); $(BIN)/python -m pip install -q $(INDEX) -e . && \
	echo "set up oneloop in $$(( $$(date +%s) - begin )) s" && touch $@

$(VENV)/.dev: $(VENV)/.torch
	@begin=$$(date +%s); $(BIN)/python -m pip install -q $(INDEX) -e '.[dev]' && \
	echo "set up oneloop with its tests in $$(( $$(date +%s) - begin )) s" && touch $@ $(VENV)/.base

clean:
	rm -rf $(VENV)
