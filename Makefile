# make demo   set up, fetch the default model, answer a prompt with speculation on
# make test   set up and run every default test;  make check: linter and type checker;  make unit: the fast tests
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
RUN := $(VENV)/bin

.PHONY: demo test unit check setup dev clean
demo: setup
	@$(RUN)/python scripts/demo.py

test: dev check
	@$(RUN)/outrider pull smollm2-135m
	@$(RUN)/python -m pytest -n auto --dist loadfile

unit: dev
	@$(RUN)/python -m pytest tests/unit tests/property tests/arch

check: dev
	@$(RUN)/ruff check . && $(RUN)/ruff format --check . && $(RUN)/mypy

setup: $(VENV)/.ready
dev: $(VENV)/.ready-dev

$(VENV)/.ready: pyproject.toml
	@echo "[1/3] creating $(VENV)"
	@test -x $(RUN)/python || $(PYTHON) -m venv $(VENV)
	@echo "[2/3] installing PyTorch (CPU); set TORCH to choose another build"
	@$(RUN)/python -c "import torch" 2>/dev/null || $(RUN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	@echo "[3/3] installing Outrider"
	@$(RUN)/python -m pip install --quiet --disable-pip-version-check -e ".[server,plots]"
	@touch $@

$(VENV)/.ready-dev: $(VENV)/.ready
	@echo "[dev] installing the test tools"
	@$(RUN)/python -m pip install --quiet --disable-pip-version-check -e ".[server,plots,dev]"
	@touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
