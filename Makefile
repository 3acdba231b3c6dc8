# make venv | demo | test | test-system | lint | bench | fleet | soak | fuzz | faults | install | clean
#
# Everything lands in .venv, made from constraints.txt. On Debian and Ubuntu, as root, what is missing is installed.
# `make install` puts the program, its units and a sample configuration below $(DESTDIR)$(PREFIX).

PYTHON ?=
PREFIX ?= /usr/local
DESTDIR ?=
VENV := .venv
READY := $(VENV)/.ready

.PHONY: venv demo test test-system lint bench fleet soak fuzz faults install clean

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

test-system: venv
	@$(VENV)/bin/python -m pytest -m system tests/system

lint: venv
	@$(VENV)/bin/ruff check --quiet
	@$(VENV)/bin/ruff format --check --quiet
	@$(VENV)/bin/mypy --no-error-summary

bench: venv
	@$(VENV)/bin/python -m kata_resmgr.guest
	@$(VENV)/bin/python -m tests.bench

fleet: venv
	@$(VENV)/bin/python -m kata_resmgr.guest
	@$(VENV)/bin/python -m tests.fleet

soak: venv
	@$(VENV)/bin/python -m tests.soak

install: venv
	@PYTHON="$(PYTHON)" PREFIX="$(PREFIX)" DESTDIR="$(DESTDIR)" sh .ci/install $(VENV)

fuzz: venv
	@$(VENV)/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev,fuzz]'
	@$(VENV)/bin/python -m tests.fuzz.raw --messages $(or $(MESSAGES),20000)
	@$(VENV)/bin/python -m tests.fuzz.schema --requests $(or $(MESSAGES),20000)

faults: venv
	@$(VENV)/bin/python -m kata_resmgr.guest
	@$(VENV)/bin/python -m tests.faults --kills $(or $(KILLS),1000)

clean:
	@rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
