# An image with accel_ddp, its recipes and configs for Kubernetes (docs/kubernetes.md) and other container platforms.
#
#   docker build -t registry.example.com/accel-ddp:1.0 .
#   docker build -t registry.example.com/accel-ddp:1.0 --build-arg EXTRAS=wandb .
#
# The PyPI packages of torch contain CUDA's libraries. The base image contributes the settings for NVIDIA's container runtime, and
# can be any Debian or Ubuntu image with Python 3.10 or newer.
ARG BASE_IMAGE=nvidia/cuda:12.9.1-base-ubuntu24.04
FROM ${BASE_IMAGE}

# Triton compiles its kernels with gcc and the headers of Python. Versions of packages are those of the base image.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

# The manifests make the volume writable for the group 1000. Some base images have a user with this number.
RUN (getent passwd 1000 || useradd --create-home --uid 1000 trainer) \
    && python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:${PATH} \
    PYTHONUNBUFFERED=1

# The largest layer changes only with the tested versions.
WORKDIR /opt/accel_ddp
COPY constraints.txt ./
RUN pip install --no-cache-dir -c constraints.txt torch accelerate transformers datasets

# Recipes and configs are found by their relative paths in this folder.
COPY . .
ARG EXTRAS=""
# hadolint ignore=DL3013
RUN pip install --no-cache-dir -c constraints.txt '.[demo]' ${EXTRAS} \
    && accel-ddp --version

USER 1000
CMD ["accel-ddp", "recipes"]
