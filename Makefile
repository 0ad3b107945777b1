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
	@PART_TIMEOUT=$${PART_TIMEOUT:-7200} tests/run all

.PHONY: lint unit engine molecule integration sanity slow benchmarks
lint unit engine molecule integration sanity slow benchmarks: setup # One part of make test
	@tests/run $@

.PHONY: faults
faults: setup ## Do every fault to a box with the real engine (half an hour), and show what was seen in docs/faults.md
	@PART_TIMEOUT=7200 tests/run molecule/faults
	@$(PYTHON) tools/fault_docs.py --record tests/output/faults.json

PROFILE := small
INVENTORY := inventories/production
PYTHON_ENGINE := python3
.PHONY: gpu-proof
gpu-proof: setup ## Prove this GPU box: PYTHON_ENGINE=with SGLang, or PROFILE=production INVENTORY=...; writes tests/output/gpu-proof.json
	@$(PYTHON) tests/gpu/proof.py --profile $(PROFILE) --out tests/output/gpu-proof.json --keep tests/output/gpu-proof \
	    $(if $(filter production,$(PROFILE)),--inventory $(INVENTORY),--python $(shell command -v $(PYTHON_ENGINE)))

.PHONY: gpu-payload
gpu-payload: setup ## Pack what a GPU machine without a network needs for the proof: tests/output/gpu-payload.tar.xz
	@$(PYTHON) tests/gpu/payload.py

.PHONY: docs
docs: setup ## Generate the variable tables of the role READMEs and the example of the handbook, and the tables of docs/proof.md
	@$(PYTHON) tools/role_docs.py
	@$(PYTHON) tools/handbook_docs.py
	@$(PYTHON) tools/proof_docs.py
