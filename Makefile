# make chat [PROMPT="..."]   a chat with the bundled demo model
# make test                  all tests
# make tools                 what tests and checks need, for running one test by hand
# make browser               the browser for the test of the report, where none is installed
# All set up .venv by themselves, once; any Python >= 3.11 will do: make PYTHON=python3.12 test

PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
SOURCES := $(shell find clover_local kernels quant calibration_data -type f -not -name '*.pyc')
# mypy finds the mapped folders only by their own names.
PACKAGES := clover_local clover_local.kernels clover_local.quant clover_local.calibration_data
export PYTHONSAFEPATH := 1

.PHONY: chat test tools browser lint clean

chat: .venv/installed
	@$(BIN)/clover-local chat $(if $(PROMPT),--prompt "$$PROMPT")

tools: .venv/tools

# Without a browser one test is skipped, and says so.
test: .venv/tools
	@$(BIN)/python recipes/get_browser.py .venv/browser --if-possible
	$(BIN)/python -m pytest

browser: .venv/tools
	@$(BIN)/python recipes/get_browser.py .venv/browser

lint: .venv/tools
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(PACKAGES:%=--package %)
	$(BIN)/mypy recipes
	$(BIN)/mypy --explicit-package-bases tests

clean:
	rm -rf .venv build *.egg-info

export PROMPT

.venv/python:
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed: set PYTHON=..." >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "$(PYTHON) is older than Python 3.11: set PYTHON=..." >&2; exit 1; }
	"$(PYTHON)" -m venv .venv
	touch $@

# The strict editable install is a tree of links: what runs and what mypy sees is the installed package.
.venv/installed: .venv/python pyproject.toml constraints.txt $(SOURCES)
	@test -e $@ || echo "installing PyTorch and the rest into .venv, which takes some minutes" >&2
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --config-settings editable_mode=strict --editable .
	touch $@

.venv/tools: .venv/installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --config-settings editable_mode=strict --editable ".[dev]"
	touch $@
