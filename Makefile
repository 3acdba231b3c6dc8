# make venv | demo | test | lint | bench | clean
#
# Everything lands in .venv, made from constraints.txt. On Debian and Ubuntu, as root, what is missing is installed.

PYTHON ?=
VENV := .venv
READY := $(VENV)/.ready

.PHONY: venv demo test lint bench clean

venv: $(READY)
	@:

$(READY): pyproject.toml constraints.txt
	@PYTHON="$(PYTHON)" sh .ci/venv $(VENV)
	@$(VENV)/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: venv
	@$(VENV)/bin/kata-resmgr demo

test: venv
	@$(VENV)/bin/python -m kata_resmgr.guest
	@$(VENV)/bin/python -m pytest

lint: venv
	@$(VENV)/bin/ruff check --quiet
	@$(VENV)/bin/ruff format --check --quiet
	@$(VENV)/bin/mypy --no-error-summary

bench: venv
	@$(VENV)/bin/python -m kata_resmgr.guest
	@$(VENV)/bin/python -m tests.bench

clean:
	@rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
