# Outrider's server, on a CPU unless asked otherwise. How to build and run it: docs/deploying.md
#
#   docker build -t outrider .                                                  # torch as the package index has it
#   docker build -t outrider --build-arg TORCH_INDEX=URL .                      # a package index of CPU-only torch
#   docker build -t outrider:cuda --build-arg ACCELERATOR=cuda .

FROM python:3.12-slim AS build
ARG ACCELERATOR=cpu
ARG TORCH=
ARG EXTRAS=server
ARG TORCH_INDEX=
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
RUN python -m venv /opt/outrider && python -m venv /opt/build
# What is installed is pinned by hash (scripts/lock writes the files). Torch first, in a layer of its own: it is most of
# the image, and changes least. The usual package index has it built for CUDA, which runs on a CPU too and takes
# gigabytes; TORCH_INDEX names another index, such as PyTorch's for CPUs, and TORCH another release. Those are other
# files, so torch and what only torch asks for is then taken as that index has it.
COPY scripts/torch.lock /src/scripts/
RUN case "$ACCELERATOR" in cpu | cuda) ;; *) echo "ACCELERATOR must be cpu or cuda: $ACCELERATOR" >&2; exit 1 ;; esac \
    && if [ -z "$TORCH$TORCH_INDEX" ]; then \
        /opt/outrider/bin/pip install --no-deps --require-hashes --requirement /src/scripts/torch.lock; \
    else \
        /opt/outrider/bin/pip install ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "${TORCH:-torch==2.13.0}"; \
    fi
COPY scripts/server.lock scripts/build.lock scripts/constraints.txt /src/scripts/
RUN /opt/outrider/bin/pip install --no-deps --require-hashes --requirement /src/scripts/server.lock \
    && /opt/build/bin/pip install --no-deps --require-hashes --requirement /src/scripts/build.lock
COPY pyproject.toml README.md LICENSE /src/
COPY outrider /src/outrider
# The extras that the lock covers need no index any more; others bring what they bring, unpinned.
RUN /opt/build/bin/pip wheel --no-deps --no-build-isolation --wheel-dir /wheel /src \
    && case "$EXTRAS" in server | otel | server,otel) pinned=--no-index ;; *) pinned= ;; esac \
    && /opt/outrider/bin/pip install $pinned --constraint /src/scripts/constraints.txt "$(echo /wheel/*.whl)[$EXTRAS]" \
    && /opt/outrider/bin/pip check

FROM python:3.12-slim
ARG ACCELERATOR=cpu
# Triton compiles a small C file for each kernel when it first meets a card.
RUN if [ "$ACCELERATOR" = cuda ]; then \
        apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*; \
    fi
RUN useradd --uid 10001 --user-group --create-home outrider && install -d -o outrider -g outrider /models
COPY --from=build /opt/outrider /opt/outrider
# All that is written goes to /models: downloads, compiled kernels, what tuning found.
ENV PATH=/opt/outrider/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    HF_HOME=/models/huggingface \
    OUTRIDER_CACHE=/models/outrider \
    TRITON_CACHE_DIR=/models/triton
VOLUME /models
WORKDIR /models
USER 10001:10001
EXPOSE 8000
STOPSIGNAL SIGTERM
# Large weights take minutes to read; until then the server answers 503.
HEALTHCHECK --interval=10s --timeout=5s --start-period=15m --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/ready', timeout=4)"]
# Arguments of `docker run` follow: the model first. The port is the health check's, too.
ENTRYPOINT ["outrider", "serve", "--host", "0.0.0.0", "--port", "8000", \
    "--api-key-file", "/run/secrets/outrider-api-keys"]
