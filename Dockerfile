# The server on CPUs; for NVIDIA GPUs: docker build --build-arg EXTRA=cuda13 (or cuda12).
FROM python:3.12-slim

# The kernels for CPUs are compiled when a model is loaded.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/jaxserve
COPY pyproject.toml README.md ./
COPY jaxserve jaxserve
COPY pallas_kernels pallas_kernels
COPY predictor predictor
COPY sharding sharding
ARG EXTRA=""
RUN pip install --no-cache-dir ".[serve${EXTRA:+,$EXTRA}]"

# Models, converted weights and executables, which a volume keeps.
RUN useradd --create-home jaxserve && install -d -o jaxserve -g jaxserve /home/jaxserve/.cache
USER jaxserve
WORKDIR /home/jaxserve
VOLUME /home/jaxserve/.cache

EXPOSE 8000
HEALTHCHECK --interval=30s --timeout=10s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=8)"]
ENTRYPOINT ["jaxserve", "serve", "--host", "0.0.0.0"]
CMD ["smollm2-135m"]
