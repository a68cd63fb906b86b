# What a contributor runs before a commit; CI runs `make test` through .ci/run.
.PHONY: check lint types test gpu
check: lint types test

lint:
	ruff check .
	ruff format --check .

types:
	mypy

test:
	pytest

gpu:
	pytest -m gpu
