# Checks in the current environment, after `pip install -e ".[dev]"`. `.ci/run` runs everything in a new one.

# Tests without large models and screens. They take about a minute.
QUICK = tests/engine/scheduling tests/engine/kv tests/engine/sampling tests/engine/embedding \
	$(wildcard tests/quant/test_*.py) tests/app/client tests/app/doctor tests/app/history tests/app/process \
	tests/app/settings tests/app/text tests/app/server/http tests/app/server/dialects/anthropic \
	tests/app/server/dialects/ollama tests/app/server/dialects/openai tests/app/server/dialects/responses \
	tests/test_architecture.py tests/test_documents.py tests/test_imports.py

check: lint types contracts quick

lint:
	ruff check .
	ruff format --check .

types:
	python -m mypy

contracts:
	lint-imports

quick:
	python -m pytest -n 2 -q $(QUICK)

test:
	python -m pytest -n 2

.PHONY: check lint types contracts quick test
