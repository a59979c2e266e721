# An image whose command is `hocket run`. For GPUs: --build-arg BASE=pytorch/pytorch:2.13.0-cuda13.0-cudnn9-runtime
#   docker build -t hocket .
# Your own image: FROM hocket, then COPY your script and its data to /workspace.
ARG BASE=python:3.12-slim
FROM ${BASE}
COPY pyproject.toml README.md LICENSE /src/
COPY src /src/src
RUN pip install --no-cache-dir /src && rm -rf /src
RUN useradd --create-home --uid 1000 trainer && mkdir -p /workspace && chown trainer /workspace
USER trainer
WORKDIR /workspace
CMD ["hocket", "doctor"]
