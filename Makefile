# Two commands for newcomers: `make demo` and `make test`. Both set up what they need.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help demo docs test check fix bench bench-overhead bench-peers chaos lint types contracts unit e2e deep soak sabotage clean services test-engine

help: ## Show this list.
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "kvlb needs Python 3.11 or newer; name one with: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV) || \
		{ echo "cannot make a virtual environment; on Debian: apt-get install python3-venv"; exit 1; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade 'pip>=25.1'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[demo]' --group dev
	@touch $@

demo: $(READY) ## Simulated 2P2D fleet, real OpenAI client traffic, a table of what went where and why.
	$(BIN)/kvlb demo

test: services check e2e ## Everything that CI runs: lint, types, import contracts, tests, real processes.

services: ## Programs that tests start: Redis, Prometheus. Installs Debian packages if it may, else names them.
	@.ci/setup-services

check: lint types contracts unit ## The quick half of `test`.

fix: $(READY) ## Format, and fix what the linter can fix.
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/codespell

types: $(READY)
	$(BIN)/mypy

contracts: $(READY)
	$(BIN)/lint-imports

unit: $(READY)
	$(BIN)/python -m pytest -m "not e2e and not engine" --numprocesses 2 --dist worksteal --cov --cov-report=
	$(BIN)/coverage report --include='balancer/core/*,balancer/connectors/*,indexer/core/*,kvlb/doctor/core/*,kvlb/replay/core/*,simulator/core/*' --fail-under=100
	$(BIN)/coverage report --fail-under=90 --skip-covered

e2e: $(READY) ## Tests that start real processes.
	$(BIN)/python -m pytest -m e2e --numprocesses 2 --dist worksteal

deep: $(READY) ## Property tests with many more examples. By hand, before a release.
	HYPOTHESIS_PROFILE=deep $(BIN)/python -m pytest -m "not e2e and not engine" --timeout=3600

soak: $(READY) ## 5,000 requests, a tenth of them broken by their clients: nothing may be left. By hand: a minute.
	KVLB_SOAK_REQUESTS=5000 $(BIN)/python -m pytest tests/integration/dataplane/test_dataplane_soak.py

test-engine: $(READY) ## Tests against real vLLM on the CPU. Installs it (2.5 GB) unless KVLB_ENGINE_VENV names an environment with it.
	@test -n "$$KVLB_ENGINE_VENV" || tests/real_engine/install.sh .venv-engine
	$(BIN)/python -m pytest -m engine -rP tests/real_engine

sabotage: $(READY) ## Break a line per fault of docs/faults.md, and see that its test notices. By hand: some minutes.
	$(BIN)/python tests/sabotage.py

docs: $(READY) ## Write docs/configuration.md from the settings' docstrings, docs/faults.md from its table.
	$(BIN)/kvlb config reference > docs/configuration.md.new
	mv docs/configuration.md.new docs/configuration.md
	$(BIN)/python tests/sabotage.py --page > docs/faults.md

bench: $(READY) ## Micro benchmarks and proxy overhead, written to benchmarks/RESULTS.md.
	$(BIN)/python -m benchmarks

bench-overhead: $(READY) ## CPU, latency and memory of proxying, beside nginx, haproxy and two Rust routers. Six minutes.
	$(BIN)/python -m benchmarks overhead

bench-peers: $(READY) ## Routing in real time beside vllm-router and sglang-router. By hand: an hour and a half.
	$(BIN)/python -m benchmarks peers

chaos: $(READY) ## A simulated fleet whose engines die, hang and lose the network: 10 x 2,000 requests. By hand: 20 minutes.
	$(BIN)/python -m benchmarks.chaos

clean: ## Remove the virtual environment and every cache.
	rm -rf $(VENV) .venv-peers .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage dist build
