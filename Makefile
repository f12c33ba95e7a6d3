# Each target does by itself what it needs first; nothing is done twice.
PY := .venv/bin/python

.DEFAULT_GOAL := help
.PHONY: help setup check test test-matrix test-hybrid test-nvmeof test-rdma soak demo bench clean

help: ## Say what there is
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## Packages, .venv and the test model; minutes the first time, then nothing
	@deploy/dev/setup.sh

check: setup ## Format, lint, types, arrows between rooms
	.venv/bin/ruff format --check --quiet .
	.venv/bin/ruff check --quiet .
	.venv/bin/mypy --no-error-summary
	.venv/bin/lint-imports --no-logo pyproject.toml

test: setup check ## Everything that CI runs: check, then all tests, those with real vLLM last
	$(PY) -m pytest -n 2 -m "not process and not e2e and not slow"
	$(PY) -m pytest -m "(process or e2e) and not slow"

soak: setup ## The fault tests in long rounds, an hour, the last ones as root; CI runs a few rounds of each
	SOAK=1 $(PY) -m pytest tests/faults -m process -s
	$(PY) -m pytest tests/e2e -m slow -s

test-matrix: setup ## Real vLLM engines of different TP and PP feed each other; half an hour
	$(PY) -m tests.matrix.run

test-hybrid: setup ## Real vLLM with tiny models of several kinds of KV: windows, local attention, states, and MLA; half an hour
	$(PY) -m tests.hybrid.stage

test-nvmeof: setup ## NVMe tier on a real NVMe/TCP device in a virtual machine, its link cut; three minutes
	$(PY) -m tests.nvmeof

test-rdma: setup ## Transfers and a node over RDMA (soft-RoCE) in a virtual machine; seven minutes
	$(PY) -m tests.rdma

demo: setup ## Real vLLM prefill pushes and is killed; fresh engines behind `kvstore proxy` pull and go on
	@$(PY) deploy/demo/run.py

bench: setup ## Measurements with their aims: a minute or two each, those of real engines ten; three quarters of an hour
	@set -e; for file in bench/[a-z]*.py; do echo "== $$file"; $(PY) $$file; done

clean: ## Remove .venv, the model and every cache
	rm -rf .venv .cache .hypothesis .pytest_cache .mypy_cache .ruff_cache .import_linter_cache build dist
