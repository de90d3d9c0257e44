# Engines: vLLM and xfer. Build it from the repository's root; docs/deploy.md has the commands.
#   --target gpu    (the default)        --target cpu    for the demo
ARG PYTHON=3.12
FROM python:${PYTHON}-slim-bookworm AS base
ARG SIDE=engine-gpu
# An index with torch's builds for CPUs, for `--target cpu`.
ARG EXTRA_INDEX=
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1
# Triton and torch's compiler compile when they are first used.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ libnuma1 && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY deploy/locks/${SIDE}.txt lock.txt
RUN pip install --no-deps ${EXTRA_INDEX:+--extra-index-url "$EXTRA_INDEX"} -r lock.txt
COPY pyproject.toml README.md LICENSE ./
COPY xfer xfer
RUN pip install --no-deps . && useradd --create-home --uid 1000 xfer
WORKDIR /app

FROM base AS cpu
# Builds for CUDA, whose import fails without it.
RUN pip uninstall -y torchvision torchaudio torchcodec
USER 1000
CMD ["xfer", "version"]

FROM base AS gpu
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility VLLM_USE_FLASHINFER_SAMPLER=0
USER 1000
CMD ["xfer", "version"]
