# What a contributor runs before a commit; CI runs `make test` through .ci/run.
.PHONY: check lint types test gpu docs
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

# The documentation site: open build/site/index.html. A warning, such as a broken link, is an error.
# BUILDER=dummy checks everything and writes nothing.
SITE ?= build/site
BUILDER ?= html
docs:
	python -m sphinx -b $(BUILDER) -qEa -W --keep-going -n -c docs -d $(SITE)-doctrees . $(SITE)
	@test $(BUILDER) != html || echo "open $(SITE)/index.html"
