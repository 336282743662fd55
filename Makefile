# Everything a fresh clone needs is Python 3.10+ with venv, and this file: the package, PyTorch and the tools go into
# $(VENV), nothing outside it is touched. `make help` lists the targets.

PYTHON ?= python3
VENV   ?= .venv
TORCH  ?= torch==2.13.0 torchvision==0.28.0
ARGS   ?=
WORKERS ?= 2
SCALING := --models squeezenet1_1 --batches 1 4 16 64 256 640 --threads 1 2 --contenders ours eager_cl openvino \
             --seconds 2 --warmup 10 --min-iterations 4

BIN     := $(VENV)/bin
SOURCES := $(shell find zendnn_cffi fx_passes native third_party -type f -not -path '*/__pycache__/*' \
             -not -path '*/_engine/*' -not -path '*/_generated/*' -not -path 'third_party/*/*' 2>/dev/null)

.DEFAULT_GOAL := help
.PHONY: help venv install demo test verify-library memory zoo hugging-face models sweep conformance bench scaling shipped-times \
        learned-estimates notebook notebooks docs lint format clean distclean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo "  Variables: PYTHON=$(PYTHON) VENV=$(VENV) TORCH='$(TORCH)' WORKERS=$(WORKERS) ARGS='arguments of the program run'"

demo: install  ## train, optimize and compare: digits, then ResNet-50 on a photograph
	$(BIN)/python demo/run.py $(ARGS)

# A file is one process's. Files start in their order: the longest ones would come last if those of most tests came first.
# A process that crashes is a failure and is not replaced: pytest-xdist would wait for ever for the rest of its file.
test: install  ## all tests, on the installed package, WORKERS files at a time
	$(BIN)/pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0 $(ARGS)

verify-library: $(VENV)/.package  ## every implementation of the library against a reference, on this CPU (half an hour, two cores)
	ZENDNN_CFFI_LIBRARY=$$(cd / && $(abspath $(BIN))/python -c "from zendnn_cffi.engine.library import find; print(find().path)") \
	  $(BIN)/python -m zendnn_cffi.primitives.verification.run $(ARGS)

memory: install  ## nearly all tests with memory that ends the process where it is used wrongly (half an hour; gcc)
	$(BIN)/python tests/memory/guarded.py $(ARGS)

zoo: install  ## every torchvision classification model: right, how much ZenDNN ran, times beside eager's
	$(BIN)/python tests/zoo/sweep.py $(ARGS)

hugging-face: install  ## seventeen kinds of transformers beside eager, by torch.compile and by optimize()
	$(BIN)/python tests/hugging_face/sweep.py $(ARGS)

models: install  ## models of every family beside eager and Inductor, for docs/models.md (an hour; goes on where it was)
	$(BIN)/python -m pip install --quiet --no-deps diffusers
	$(BIN)/python tests/families/sweep.py --page $(ARGS)

sweep: install  ## every model of torchvision, timm (60M parameters) and Hugging Face (tiny) beside eager (hours; goes on where it was)
	$(BIN)/python tests/sweep/sweep.py --page $(ARGS)

conformance: install  ## PyTorch's own samples of its operators and modules beside eager (hours; goes on where it was)
	$(BIN)/python tests/conformance/sweep.py --page $(ARGS)

bench: install  ## side by side with Inductor, zentorch, ONNX Runtime and OpenVINO (hours; see ARGS=--help)
	$(BIN)/python benchmarks/compare.py $(ARGS)

scaling: install  ## throughput from batch 1 to 640, on one and two threads (half an hour)
	$(BIN)/python benchmarks/compare.py --out benchmarks/out/scaling $(SCALING) $(ARGS)

shipped-times: install  ## measure common networks on this kind of CPU, for the times that ship with the package (an hour)
	$(BIN)/python benchmarks/shipped_times.py $(ARGS)

learned-estimates: install  ## fit estimates to the times that ship, and say how well they predict networks left out (minutes)
	$(BIN)/python benchmarks/learned_estimates.py $(ARGS)

notebook: install  ## open the quick-start notebook
	$(BIN)/python -m pip install -q notebook
	$(BIN)/jupyter notebook notebooks/quickstart.ipynb

notebooks: install  ## run all notebooks and store them with their outputs (some minutes, on a quiet machine)
	$(BIN)/python notebooks/store.py $(ARGS)

docs: install  ## the documentation site, into build/site; warnings are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict $(ARGS)

lint: $(VENV)/.tools  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.tools  ## put the code into ruff's form
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

venv: $(VENV)/.torch

install: $(VENV)/.package  ## make $(VENV) with PyTorch and this package in it

$(VENV)/.torch:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(TORCH)
	@touch $@

# Installed, not linked: what the tests see is what a user gets. PyTorch is named again so that pip keeps this one.
$(VENV)/.package: $(VENV)/.torch pyproject.toml $(SOURCES)
	$(BIN)/python -m pip install --quiet $(TORCH) ".[test,bench]"
	@touch $@

$(VENV)/.tools: $(VENV)/.package
	$(BIN)/python -m pip install --quiet ruff mypy
	@touch $@

clean:  ## remove what builds, tests, demo and benchmarks wrote
	rm -rf build dist _skbuild *.egg-info demo/out benchmarks/out benchmarks/.cache tests/conformance/out tests/families/out
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.venv/*' -not -path './benchmarks/.venvs/*' -prune -exec rm -rf {} +

distclean: clean  ## the same, and the virtual environments
	rm -rf $(VENV) benchmarks/.venvs
