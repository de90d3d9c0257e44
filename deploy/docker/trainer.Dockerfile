# Trainers: Megatron-Core, Megatron-Bridge and xfer. Build it from the repository's root; docs/deploy.md has the commands.
#   --target gpu    with TransformerEngine (the default)        --target cpu    for the demo
FROM python:3.12-slim-bookworm AS base
ARG SIDE=trainer-gpu
ARG BRIDGE=0.6.2
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1
WORKDIR /src
COPY deploy/locks/${SIDE}.txt lock.txt
# Bridge's metadata asks for packages that are compiled for GPUs and that its conversion code does not need.
RUN pip install --no-deps -r lock.txt "megatron-bridge==${BRIDGE}"
COPY pyproject.toml README.md LICENSE ./
COPY xfer xfer
RUN pip install --no-deps . && useradd --create-home --uid 1000 xfer
WORKDIR /app

FROM base AS cpu
USER 1000
CMD ["xfer", "version"]

FROM base AS te
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
COPY scripts/te_site.sh /src/scripts/te_site.sh
RUN PYTHON=/usr/local/bin/python bash /src/scripts/te_site.sh /opt/te 2.20.2

FROM base AS gpu
# Triton compiles its launchers when they are first used.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
COPY --from=te /opt/te /opt/te
ENV PYTHONPATH=/opt/te NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 1000
CMD ["xfer", "version"]
