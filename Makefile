# What a contributor runs before a commit; CI runs `make test` through .ci/run.
.PHONY: check lint types test gpu gpu-shared gpu-alone gpu-slow docs
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

# Every promise about GPUs, once: less than 10 minutes on an H200 with 16 cores. -k: the second part runs if the first one fails.
gpu:
	$(MAKE) --no-print-directory -k gpu-shared gpu-alone

GPU_WORKERS ?= 8
GPU_TESTS = tests/test_gpu.py tests/test_gpu_sharding.py tests/test_compat.py
gpu-shared:
	pytest -n $(GPU_WORKERS) -m "gpu and not gpu_alone and not gpu_slow" $(GPU_TESTS)

gpu-alone:
	pytest -m "gpu_alone and not gpu_slow" $(GPU_TESTS)

gpu-slow:
	pytest -m gpu_slow $(GPU_TESTS)

# The documentation site: open build/site/index.html. A warning, such as a broken link, is an error.
# BUILDER=dummy checks everything and writes nothing.
SITE ?= build/site
BUILDER ?= html
docs:
	python -m sphinx -b $(BUILDER) -qEa -W --keep-going -n -c docs -d $(SITE)-doctrees . $(SITE)
	@test $(BUILDER) != html || echo "open $(SITE)/index.html"
