# Every target makes its own environment first: nothing but Python 3.11 with pip is needed.
#   make demo    the three operators on two processes, checked and timed (about a minute)
#   make test    the tests          make test-all   the slow ones as well
#   make bench   the full sweep     make bench-cpu  the CPU backend against torch
#   make bench-net  operators between two emulated hosts, at 100 Mbit/s, 1 and 10 Gbit/s; needs root
#   make bench-plans  parallelism plans on CPU processes of different speed, predicted against measured (5 minutes)
#   make stress  random operators, shapes, worlds and delays for SECONDS (60), results and leaks checked
#   make lint    ruff and mypy
#   make test-triton VERSION=3.6.0  the tests on another Triton, in an environment of its own
# PIP_ARGS is passed to pip, for instance an index that has torch's CPU builds.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
PIP_ARGS ?=
PYTEST_ARGS ?= -n 2
VENV := .venv

SECONDS ?= 60

.PHONY: stress demo bench-cpu bench-net bench-plans test test-all test-triton bench lint setup clean
setup: $(VENV)/.ready

# $(1): the environment, $(2): its constraints
define install
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: set PYTHON=")'
	$(PYTHON) -m venv $(1)
	$(1)/bin/python -m pip install --quiet $(PIP_ARGS) -c $(2) -e '.[dev,mpi]'
	touch $(1)/.ready
endef

$(VENV)/.ready: pyproject.toml constraints.txt
	$(call install,$(VENV),constraints.txt)

demo: setup
	$(VENV)/bin/python benchmarks/bench.py --short

bench-cpu: setup
	$(VENV)/bin/python benchmarks/cpu.py

bench: setup
	$(VENV)/bin/python benchmarks/bench.py

bench-net: setup
	$(VENV)/bin/python benchmarks/net.py

bench-plans: setup
	$(VENV)/bin/python benchmarks/training_plans.py

test: setup
	$(VENV)/bin/python -m pytest -m 'not slow' $(PYTEST_ARGS)

test-all: setup
	$(VENV)/bin/python -m pytest $(PYTEST_ARGS)

stress: setup
	TRITON_EXT_STRESS_S=$(SECONDS) $(VENV)/bin/python -m pytest -q -k random_operators tests/distributed/test_stress.py

lint: setup
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

test-triton: .venv-triton-$(VERSION)/.ready
	TRITON_CACHE_DIR=.venv-triton-$(VERSION)/cache .venv-triton-$(VERSION)/bin/python -m pytest -m 'not slow' $(PYTEST_ARGS)

.venv-triton-%/.ready: pyproject.toml constraints.txt
	mkdir -p $(@D)
	sed 's/^triton==.*/triton==$*/' constraints.txt > $(@D)/constraints.txt
	$(call install,$(@D),$(@D)/constraints.txt)

clean:
	rm -rf .venv .venv-triton-* results build *.egg-info
