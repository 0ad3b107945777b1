# make demo, make test: everything on a fresh Debian or Ubuntu machine, set-up included.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

VENV := .venv
PYTHON := $(VENV)/bin/python
BOX := $(PYTHON) sandbox/box
NAME := gpuserve-sandbox
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
export ANSIBLE_CONFIG := $(CURDIR)/ansible.cfg

.PHONY: help
help: ## List the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 16

.PHONY: setup
setup: ## Install what the machine lacks: apt packages, virtual environment
	@sandbox/setup $(VENV)

.PHONY: demo
demo: setup ## Boot a throw-away GPU box, run site.yml on it with the real engine, ask it something
	@$(BOX) up $(NAME)
	@ansible-playbook -i inventories/sandbox site.yml
	@sandbox/summary $(NAME)

.PHONY: shell
shell: ## A shell on the demo box
	@podman exec -it $(NAME) bash

.PHONY: clean
clean: ## Remove this checkout's boxes, its downloads and virtual environment, and images that no other checkout uses
	@if [ -x $(PYTHON) ]; then $(BOX) clean; else python3 sandbox/box clean; fi
	@rm -rf $(VENV) tests/output gpuserve-sglang-*.tar.gz

.PHONY: test
test: setup ## Lint, unit tests, Molecule, integration
	@tests/run

.PHONY: test-all
test-all: setup ## The same, and what takes long: faults, switches, take-overs, benchmarks
	@tests/run all

.PHONY: lint unit engine molecule integration sanity slow benchmarks
lint unit engine molecule integration sanity slow benchmarks: setup # One part of make test
	@tests/run $@

.PHONY: docs
docs: setup ## Generate the variable tables of the role READMEs
	@$(PYTHON) tools/role_docs.py
