# What a contributor runs before a commit; CI runs `make test` through .ci/run.
.PHONY: check lint types test gpu
check: lint
	$(MAKE) --no-print-directory --jobs 2 types test

lint:
	ruff check .
	ruff format --check .

types:
	mypy

# More workers than cores: most tests wait for most of their time. One after another: plain `pytest`.
WORKERS ?= 4
test:
	pytest -n $(WORKERS)

gpu:
	pytest -m gpu
