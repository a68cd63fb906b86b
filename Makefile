# What a contributor runs before a commit; CI runs `make test` through .ci/run.
.PHONY: check lint test gpu
check: lint test

lint:
	ruff check .
	ruff format --check .

test:
	pytest

gpu:
	pytest -m gpu
