# syntax=docker/dockerfile:1
#
#   docker build --target core -t draftgate:core .                     without torch: gateway, simulator, load
#   docker build -t draftgate:engine .                                 with the engine, for CPUs
#   docker build -t draftgate:engine-cuda --build-arg TORCH_INDEX= .   with the engine, for NVIDIA GPUs
#
# If packages come from a mirror, pass `--secret id=pip,src=pip.conf`. No layer keeps the file.

FROM python:3.12.11-slim-bookworm AS python


FROM python AS build

ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/draftgate
ENV PATH=/opt/draftgate/bin:$PATH
WORKDIR /src

# This layer contains only the dependencies and is rebuilt only when they change. An empty README
# prevents a rebuild after a change of the README.
COPY pyproject.toml constraints.txt LICENSE ./
COPY draftgate/__init__.py draftgate/
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    touch README.md \
    && pip install -c constraints.txt setuptools \
    && pip install -c constraints.txt --no-build-isolation .


FROM build AS wheel

COPY README.md ./
COPY draftgate draftgate
COPY policies policies
COPY backends backends
COPY gateway gateway
COPY loadgen loadgen
COPY lab lab
RUN pip wheel --no-index --no-deps --no-build-isolation --wheel-dir /wheel .


FROM build AS build-core

COPY --from=wheel /wheel /wheel
RUN pip install --no-index --no-deps --force-reinstall /wheel/*.whl \
    && pip uninstall --yes setuptools pip


FROM build AS build-engine

# The build of PyTorch: a folder of its index (cpu, cu126, ...), or empty for the CUDA default.
ARG TORCH_INDEX=cpu
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    if [ "$TORCH_INDEX" = cpu ]; then extras=engine,hub; else extras=cuda,hub; fi \
    && pip install -c constraints.txt --no-build-isolation \
       ${TORCH_INDEX:+--extra-index-url https://download.pytorch.org/whl/${TORCH_INDEX}} ".[$extras]"
COPY --from=wheel /wheel /wheel
RUN pip install --no-index --no-deps --force-reinstall /wheel/*.whl \
    && pip uninstall --yes pip


# The common parts of both images: the user, the port, the health check and the command.
FROM python AS runtime

# A volume mounted on the cache takes its owner from this folder.
RUN groupadd --gid 10001 draftgate \
    && useradd --create-home --uid 10001 --gid 10001 draftgate \
    && install --directory --owner=10001 --group=10001 /home/draftgate/.cache
ENV PATH=/opt/draftgate/bin:$PATH PYTHONUNBUFFERED=1
USER 10001:10001
WORKDIR /home/draftgate

EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 \
    CMD ["python", "-m", "draftgate.gateway.healthcheck", "http://127.0.0.1:8000/health"]

# SIGTERM drains the node. `docker stop --time` limits the time for running streams.
ENTRYPOINT ["draftgate"]

# `core` needs servers in DRAFTGATE_UPSTREAM, and exits without them. `engine` serves the shipped model.
CMD ["serve", "--host", "0.0.0.0", "--port", "8000"]


FROM runtime AS core

COPY --from=build-core /opt/draftgate /opt/draftgate


FROM runtime AS engine

# The compiler builds the CPU operators at the first start of a worker. Triton uses the compiler for
# the small C launcher of each kernel on a GPU.
USER root
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
USER 10001:10001

# Compiled and downloaded files share one folder, because the root file system may be read-only.
ENV TRITON_CACHE_DIR=/home/draftgate/.cache/triton
COPY --from=build-engine /opt/draftgate /opt/draftgate
