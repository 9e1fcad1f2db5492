# Checks in the current environment, which `pip install -e ".[dev]"` has prepared. `.ci/run` runs everything in a new one.

# Tests of parsing, planning, and data: they load no model and start no server.
QUICK = tests/engine/scheduling tests/engine/kv tests/engine/sampling tests/quant/test_gguf.py \
	tests/app/generation tests/app/settings tests/app/text tests/app/client tests/test_architecture.py

check: lint types contracts quick

lint:
	ruff check .
	ruff format --check .

types:
	mypy

contracts:
	lint-imports

quick:
	python -m pytest -n 2 -q $(QUICK)

test:
	python -m pytest -n 2

.PHONY: check lint types contracts quick test
