# Everything is started through .venv, which scripts/setup makes.
.DEFAULT_GOAL := help
.PHONY: help setup check test test-long fuzz-long demo demo-local bench format
python := .venv/bin/python

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 14

setup: ## make .venv (torch and its CUDA libraries are downloaded once a machine)
	scripts/setup

check: ## ruff, mypy, import contracts and unit tests: under a minute
	scripts/run_tests set-up check unit

test: ## everything, as CI runs it
	scripts/run_tests

test-long: ## everything, with what takes minutes
	scripts/run_tests --long

fuzz-long: ## the fuzz tests with many more examples
	scripts/run_tests --long set-up fuzz

format: setup ## format the sources and mend what ruff can mend
	$(python) -m ruff check --fix
	$(python) -m ruff format

demo-local: ## a checkpoint, a daemon and an engine process on this machine, without a GPU
	scripts/setup exporter
	$(python) -m demo.local

demo: demo-local ## for now the same as demo-local; the one on Kubernetes comes with the operator

bench: setup ## list the benchmarks, and run those that this machine can run
	$(python) scripts/run_benchmarks.py
