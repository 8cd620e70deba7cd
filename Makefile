# demo, test, check, bench, docs: each is one command that does everything it needs. `make` alone lists them.

PYTHON ?= python3
PORT ?= 8080
NODES ?= 2
MINUTES ?= 30
SECONDS ?= 60
QUESTION ?= What is a shard, in one sentence?
BIN := .venv/bin
# From where pip takes torch; empty: pip's own configuration. CPU only: https://download.pytorch.org/whl/cpu
export TORCH_INDEX ?=
# From where pip takes llama-cpp-python ready-made; empty: it is compiled, once.
export LLAMA_INDEX ?=
# What the set-up tells people to type again.
export GOALS := $(MAKECMDGOALS)
# Tests start some thousand Pythons: what each has compiled is kept, whatever the environment says.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test check bench docs site proofs faults soak clients fuzz upstream upstream-check clean python

help: ## This list
	@echo "Shardline: one open model served over several machines."
	@echo
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST)
	@echo
	@echo "Variables: PYTHON=$(PYTHON) PORT=$(PORT) NODES=$(NODES) QUESTION='…' ONCE=1 TORCH_INDEX=URL LLAMA_INDEX=URL MINUTES=$(MINUTES) SECONDS=$(SECONDS) ARGS='-k pattern'"

demo: python ## Set up, start a Tracker, a Gateway and two Nodes, ask one question, serve until Ctrl-C (ONCE=1: end after it)
	@$(PYTHON) scripts/prepare.py demo --port $(PORT)
	@$(BIN)/python -m shardline demo --nodes $(NODES) --port $(PORT) --question '$(subst ','\'',$(QUESTION))' $(if $(ONCE),--once)

test: check ## Set up, then lint, types, import rules, all tests side by side (ARGS='-k word -x --pdb': those, in one process)
	@echo "== tests"
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(or $(ARGS),--numprocesses auto --dist loadfile --no-loadscope-reorder)

check: python ## Set up, then all that needs no test run: lint, types, import rules, sizes, generated pages
	@$(PYTHON) scripts/prepare.py test
	@echo "== format and lint (ruff)"
	@$(BIN)/python -m ruff format --check --quiet . || { echo "What to do: $(BIN)/python -m ruff format ."; exit 1; }
	@$(BIN)/python -m ruff check --quiet .
	@echo "== types (mypy)"
	@$(BIN)/python -m mypy
	@echo "== import rules (import-linter)"
	@$(BIN)/lint-imports --no-logo
	@echo "== sizes and names"
	@$(BIN)/python scripts/sizes.py
	@echo "== generated pages"
	@$(BIN)/python scripts/reference.py --check

bench: python ## Routes of 1, 2, 3 Nodes against unsplit llama.cpp, far Nodes, hops, PyTorch, on this machine (ARGS='--only split')
	@$(PYTHON) scripts/prepare.py bench
	@$(BIN)/python -m bench $(ARGS)

proofs: python ## The long proofs: exactness of 1, 2, 3 and 30 Nodes, engines against each other, all faults (an hour; ARGS)
	@$(PYTHON) scripts/prepare.py test
	@$(BIN)/python -m pytest -m long $(ARGS)

faults: python ## The whole fault table with the llama.cpp engine (some minutes)
	@$(PYTHON) scripts/prepare.py test
	@$(BIN)/python -m pytest -m long tests/cluster/test_llama_faults.py $(ARGS)

soak: python ## Mixed load for MINUTES=30: right answers, flat memory, nothing left behind
	@$(PYTHON) scripts/prepare.py test
	@$(BIN)/python -m tests.soak --minutes $(MINUTES) $(ARGS)

clients: python ## Clients of the API as they are, each in an environment of its own; writes what each could do (ARGS)
	@$(PYTHON) scripts/prepare.py test
	@$(BIN)/python -m pytest -m "long or not long" tests/clients --ignore tests/clients/test_record.py --conformance tests/clients/conformance.json $(ARGS)

fuzz: python ## Bytes of strangers into every reader, led by coverage, SECONDS=60 for each (ARGS='--target gguf')
	@$(PYTHON) scripts/prepare.py test
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --group fuzz
	@$(BIN)/python -m tests.fuzz --seconds $(SECONDS) $(ARGS)

upstream: python ## The patch for llama.cpp: source fetched, patched, built, held against itself, measured (half an hour; ARGS='--save')
	@$(PYTHON) scripts/prepare.py test
	@nice -n 10 $(BIN)/python -m upstream $(ARGS)

upstream-check: python ## What another llama-cpp-python changes: make upstream-check VERSION=0.3.37 (it may be compiled first)
	@test -n "$(VERSION)" || { echo "make: which version? What to do: make upstream-check VERSION=0.3.37" >&2; exit 1; }
	@$(PYTHON) scripts/prepare.py test
	@nice -n 10 $(BIN)/python -m upstream.check $(VERSION) $(ARGS)

docs: python ## Generate the reference pages anew (settings, errors, commands, protocol example)
	@$(PYTHON) scripts/prepare.py docs
	@$(BIN)/python scripts/reference.py

site: python ## The documentation as a site, in build/site: strict, with nothing from other hosts (installs MkDocs only)
	@$(PYTHON) scripts/prepare.py site
	@$(BIN)/python scripts/site.py

clean: ## Remove .venv and all caches
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find src tests bench scripts -name __pycache__ -type d -prune -exec rm -rf {} +

python:
	@command -v $(PYTHON) >/dev/null || { echo "make: $(PYTHON) is not there. What to do: install Python 3.11 or newer (Debian, Ubuntu: apt install python3 python3-venv), or name one: make demo PYTHON=/path/to/python3" >&2; exit 1; }
