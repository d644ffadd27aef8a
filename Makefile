# The commands people type; the work is in scripts/.
SHELL := /bin/bash
FORMAT ?= table
INVENTORY ?= inventories/demo
.PHONY: help demo demo-down status bench test test-all test-toolkit test-jit lint unit
help: ## what there is
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' Makefile
demo: ## the real engine on this machine's CPUs: eight servers under systemd, deployed and asked
	@scripts/demo up
demo-down: ## remove the demo's host
	@scripts/demo down
status: ## every server at a glance: FORMAT=table|json INVENTORY=inventories/demo
	@scripts/status "$(FORMAT)" "$(INVENTORY)"
bench: ## what the deploy adds to the engine's own start, on the demo's host; what kernels built ahead save
	@.venv/bin/python benchmarks/deploy_overhead.py
	@.venv/bin/python benchmarks/diagnose_journals.py
	@.venv/bin/python benchmarks/jit_servers.py
test: ## all checks and tests but the longest
	@scripts/test fast
test-all: ## everything
	@scripts/test all
lint: ## static checks only
	@scripts/test lint
unit: ## unit tests only
	@scripts/test unit
test-toolkit: ## CUDA 13.0 to 13.5 with real compilers: fails before, passes after (20 minutes, a table)
	@scripts/test toolkit
test-jit: ## kernels built ahead of time, with real compilers for SM90 and SM120
	@scripts/test jit
