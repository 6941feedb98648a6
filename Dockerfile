# One image for every process: `kvlb indexer`, `kvlb balancer`, `kvlb simulate`, `kvlb load`.
# The base is an argument so that a mirror, a digest or another Debian can be named:
#   docker build --build-arg PYTHON_IMAGE=python@sha256:... .
ARG PYTHON_IMAGE=python:3.12.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /src
# Dependencies first: they change less often than our code.
COPY requirements.txt ./
RUN python -m venv --without-pip /opt/kvlb \
    && python -m pip --python /opt/kvlb/bin/python install --only-binary :all: \
        --requirement requirements.txt \
    && python -m pip install hatchling==1.33.0
COPY pyproject.toml README.md LICENSE ./
COPY balancer ./balancer
COPY indexer ./indexer
COPY kvlb ./kvlb
COPY simulator ./simulator
RUN python -m pip wheel --no-deps --no-build-isolation --wheel-dir /wheels . \
    && python -m pip --python /opt/kvlb/bin/python install --no-deps --no-index /wheels/*.whl \
    && python -m pip --python /opt/kvlb/bin/python check \
    && /opt/kvlb/bin/python -m compileall -q /opt/kvlb \
    && /opt/kvlb/bin/kvlb --version

FROM ${PYTHON_IMAGE}
LABEL org.opencontainers.image.title="kvlb" \
      org.opencontainers.image.description="Cache-aware load balancer for vLLM fleets" \
      org.opencontainers.image.licenses="Apache-2.0"
RUN groupadd --gid 10001 kvlb \
    && useradd --uid 10001 --gid kvlb --no-create-home --home-dir /nonexistent \
        --shell /usr/sbin/nologin kvlb
COPY --from=build /opt/kvlb /opt/kvlb
ENV PATH=/opt/kvlb/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
WORKDIR /
EXPOSE 8080 8081
ENTRYPOINT ["kvlb"]
CMD ["--help"]
