# syntax=docker/dockerfile:1
#
#   docker build -t draftgate .                              for a CPU
#   docker build -t draftgate --build-arg TORCH_INDEX= .     for an NVIDIA GPU (CUDA wheels)
FROM python:3.12-slim-bookworm AS build

# Which of PyTorch's wheels: a folder of its index (cpu, cu126, ...), or empty for the CUDA default.
ARG TORCH_INDEX=cpu
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1

RUN python -m venv /opt/draftgate
ENV PATH=/opt/draftgate/bin:$PATH
WORKDIR /src

# The dependencies first: this layer stays as long as they do.
COPY pyproject.toml constraints.txt README.md LICENSE ./
RUN pip install -c constraints.txt setuptools \
    && pip install -c constraints.txt --no-build-isolation \
       ${TORCH_INDEX:+--extra-index-url https://download.pytorch.org/whl/${TORCH_INDEX}} '.[engine]'

COPY policies policies
COPY backends backends
COPY gateway gateway
COPY loadgen loadgen
RUN pip install -c constraints.txt --no-build-isolation --no-deps --force-reinstall .


FROM python:3.12-slim-bookworm

# On a CPU the worker compiles its operators for the very machine, at its first start; on a GPU
# Triton compiles a small launcher in C for each kernel.
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 10001 draftgate

COPY --from=build /opt/draftgate /opt/draftgate
ENV PATH=/opt/draftgate/bin:$PATH PYTHONUNBUFFERED=1
USER draftgate
WORKDIR /home/draftgate

EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]

# SIGTERM drains: give running streams time with `docker stop --time`.
ENTRYPOINT ["draftgate"]
CMD ["serve", "--host", "0.0.0.0", "--port", "8000"]
