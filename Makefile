# What users and CI call. `make` alone says what there is.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# Every process that a test starts would compile what it imports anew.
unexport PYTHONDONTWRITEBYTECODE

# An environment that lacks its uv is made anew.
.DELETE_ON_ERROR:

.PHONY: help install lock demo test test-long test-all test-core planted faults lives hostile cluster-test s3-test check format bench soak clean

help:
	@echo "make demo      the whole pipeline on real clickstream data against a real broker, without Spark (ENGINE=spark: with Spark, which it installs)"
	@echo "make install   everything for development: .venv with the pinned packages, Spark, and the pinned JVM artifacts"
	@echo "make test      the tests for every change: the rules, the laws, a whole run on both engines (25 minutes)"
	@echo "make test-long what shows every promise of docs/guarantees.md beside it (half an hour)"
	@echo "make test-all  everything, with other random cases in each run; SEED=... draws those of one again (hours)"
	@echo "make planted   plants a fault in each layer, and sees the tests catch it (four minutes)"
	@echo "make test-core the pure functions' tests alone, a minute, for every change"
	@echo "make faults    kills runs at every step on every kind of lake, and compares the end with the merge model (an hour; POWER=1: the power goes, too; WIRE=1: by a wire that lies)"
	@echo "make lives     what can happen to a lake, every two things after one another, with a kill at every point, for half an hour (ENGINE=embedded, MINUTES=10, SEED=2; POWER=1: the power goes, too; WIRE=1: by a wire that lies)"
	@echo "make hostile   hostile records, registries and connections beside good records, for half an hour (ENGINE=embedded, MINUTES=10, SEED=2)"
	@echo "make cluster-test  executors in JVMs of their own, killed in the midst of a batch, and clusters that do not fit (ten minutes)"
	@echo "make s3-test   a lake on a real S3 server, written by both engines in turns (fetches 654 MB for Spark the first time)"
	@echo "make check     lint, format check, types"
	@echo "make bench     the benchmarks: thirteen points with their marks, on both engines (BENCH='1 8 --records 550000' for some of them, smaller)"
	@echo "make soak      half an hour at a steady rate: does anything grow? (ENGINE=embedded, MINUTES=10)"
	@echo "make format    rewrite the code in the project's format"

install: $(VENV)/.installed

# What is installed, by groups, from the one lock: each package of a group is compared with its hashes there, and so is what builds one.
JARS := pipelines/watersmeet/jvm/jars.lock
LOCKED := requirements.lock pyproject.toml $(JARS)
UV = $(shell uv --version >/dev/null 2>&1 && echo uv || echo $(BIN)/uv)
UV_INSTALL = $(UV) pip install --python $(BIN)/python --build-constraints requirements.lock
INSTALL = $(UV_INSTALL) --require-hashes --constraint requirements.lock
INSTALL_SELF = $(UV_INSTALL) --no-deps --editable .

# With the uv of this machine, or else with the pinned one, which comes first.
$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || { echo "Watersmeet needs Python 3.10 or newer, and there is no '$(PYTHON)' on this machine: install it, or name one with PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "Watersmeet needs Python 3.10 or newer, and '$(PYTHON)' is $$($(PYTHON) --version 2>&1): name a newer one with PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "Watersmeet needs Python's venv module to make .venv, and '$(PYTHON)' lacks it: install your system's python3-venv package" >&2; exit 1; }
	@bash bin/java-version
	$(PYTHON) -m venv $(VENV)
	@[ $(UV) = uv ] || $(BIN)/python -m pip install --quiet --require-hashes --requirement <(sed -n '/^uv==/,/[^\\]$$/p' requirements.lock)

$(VENV)/.embedded: $(LOCKED) | $(BIN)/python
	$(INSTALL) --requirement pyproject.toml --extra broker --extra quality --extra report
	$(INSTALL_SELF)
	$(BIN)/python bin/fetch-jars broker
	@touch $@

$(VENV)/.spark: $(VENV)/.embedded
	@echo "Spark is a package of 434 MB, which is built here: a minute or two"
	$(INSTALL) --requirement pyproject.toml --extra spark
	$(BIN)/python bin/fetch-jars spark
	@touch $@

$(VENV)/.installed: $(LOCKED) | $(BIN)/python
	$(INSTALL) --requirement requirements.lock
	$(INSTALL_SELF)
	$(BIN)/python bin/fetch-jars broker spark
	$(BIN)/python -m ipykernel install --prefix $(VENV) --name python3 >/dev/null
	@touch $(VENV)/.embedded $(VENV)/.spark $@

# After a change of requirements.txt: the packages that those need, for every Python that is supported, with their hashes; after one of an
# Ivy file: the files that it names, and what they need.
lock:
	$(BIN)/uv pip compile --universal --python-version 3.10 --generate-hashes --no-annotate --custom-compile-command "make lock" --quiet \
		requirements.txt --output-file requirements.lock
	$(BIN)/python bin/lock-jars pipelines/watersmeet/jvm/ivy.xml benchmarks/ivy.xml tests/registry/ivy.xml tests/stores/ivy.xml

ENGINE ?= spark
# Quickly without Spark, unless ENGINE=spark is said.
QUICK = $(if $(filter command line environment,$(origin ENGINE)),$(ENGINE),embedded)

demo: $(VENV)/.$(or $(filter spark,$(QUICK)),embedded)
	$(BIN)/watersmeet demo --engine $(QUICK)
	@[ $(QUICK) = spark ] || printf '\nThe same on Spark, which is installed for it first (434 MB): make demo ENGINE=spark\n'

# More processes than cores, since some of the time is waiting; each of them collects and imports anew. Files stay together, and
# so do the tests that share the Spark session (tests/conftest.py); what takes minutes begins first.
PROCESSES ?= 5
PYTEST := $(BIN)/python -m pytest --numprocesses $(PROCESSES) --dist loadscope --no-loadscope-reorder

test: install
	$(PYTEST) -m "not long and not nightly"

test-long: install $(VENV)/.registry
	$(PYTEST) -m "long and not nightly"

# Other random cases in every run: SEED=... repeats one.
test-all: install $(VENV)/.registry $(VENV)/.s3
	seed=$${SEED:-$$(date +%s)} && WATERSMEET_TEST_SEED=$$seed $(PYTEST) --hypothesis-seed=$$seed

# Fetched the first time: a schema registry for the tests of Avro (109 MB); Hadoop's S3 connector with the AWS SDK; Spark's own Kafka
# source and Kafka Streams, for what the benchmarks compare with. Stamps, since a fetch that fails halfway leaves the folder.
$(VENV)/.registry: tests/registry/jars.lock
$(VENV)/.s3: tests/stores/jars.lock
$(VENV)/.benchmarks: benchmarks/jars.lock

$(VENV)/.registry $(VENV)/.s3 $(VENV)/.benchmarks: | install
	$(BIN)/python bin/fetch-jars $<
	@touch $@

planted: install
	$(BIN)/python -m tests.support.planted

test-core: install
	$(BIN)/python -m pytest tests/core tests/unit/test_architecture.py

s3-test: install $(VENV)/.s3
	$(BIN)/python -m pytest tests/stores/test_s3.py tests/stores/spark_on_s3.py

SEED ?= 1
KILLS ?= 48
MINUTES ?= 30
LAKE ?= all

# KILLS on each kind of lake; LAKE=embedded, LAKE=folder or LAKE=catalog (the latter two with Spark) for one of them.
faults: install
	$(BIN)/python -m tests.faults.soak --seed $(SEED) --kills $(KILLS) --lake $(LAKE)
	WATERSMEET_TEST_BATCHES=200 $(BIN)/python -m pytest tests/integration/test_operations.py -k files_stay_few --timeout 3600

lives: install
	$(BIN)/python -m tests.faults.lives --engine $(QUICK) --minutes $(MINUTES) --seed $(SEED)

hostile: install $(VENV)/.registry
	$(BIN)/python -m tests.faults.hostile --engine $(ENGINE) --minutes $(MINUTES) --seed $(SEED)

# `make test-long` kills an executor in a JVM of its own, without a cluster.
cluster-test: install
	$(BIN)/python -m pytest tests/cluster/kills.py tests/cluster/test_standalone.py

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy tests benchmarks

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/python -m tests.support.walkthrough

BENCH ?=

bench: install $(VENV)/.benchmarks
	$(BIN)/python -m benchmarks $(BENCH)

soak: install
	$(BIN)/python -m benchmarks.soak --engine $(ENGINE) --minutes $(MINUTES)

clean:
	rm -rf $(VENV) demo-lake .pytest_cache .mypy_cache .ruff_cache .hypothesis
