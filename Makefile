# Two commands are enough: `make run` and `make test`. Each target does its own set-up, once.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
# Without compiled files each process of a test or a job compiles parti anew: a third of its start.
unexport PYTHONDONTWRITEBYTECODE

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
RESULTS := bench/results
# Spark must get the Java that was found, also when that is only in a JVM folder.
WITH_JAVA := JAVA_HOME="$$(scripts/ensure-java.sh)"; export JAVA_HOME;

.PHONY: help setup run test test-fast lint bench clean

help: ## show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 18

setup: $(INSTALLED) ## install everything into .venv, and find or install Java
	@$(WITH_JAVA) echo "Ready: $$($(BIN)/python -V), Java in $$JAVA_HOME"

$(INSTALLED): pyproject.toml requirements.lock scripts/setup-venv.sh
	@scripts/setup-venv.sh $(VENV)
	@touch $@

run: $(INSTALLED) ## run the main job: workers and the Spark pipeline under load and faults, then the verdict
	@$(WITH_JAVA) $(BIN)/python -m parti_lab.demo

test: lint ## lint, then every test
	@$(WITH_JAVA) scripts/test.sh $(BIN)/pytest

test-fast: $(INSTALLED) ## the tests that need neither Spark, nor a cluster, nor patience
	@$(BIN)/pytest -q -n 4 --dist worksteal --hypothesis-profile fast -m "not slow and not spark and not cluster"

lint: $(INSTALLED) ## style, formatting, types, and the direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(INSTALLED) ## run the benchmarks; results as JSON and HTML in bench/results
	@mkdir -p $(RESULTS)
	@$(WITH_JAVA) status=0; for name in range pull fleet spark-read spark-write; do \
	  $(BIN)/parti bench $$name --json --html $(RESULTS)/$$name.html | tee $(RESULTS)/$$name.json || status=1; \
	done; exit $$status

clean: ## remove the virtual environment, caches and results
	rm -rf $(VENV) $(RESULTS) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	rm -rf dist build spark-warehouse metastore_db derby.log
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
