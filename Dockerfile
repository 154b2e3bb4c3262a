# legato in a container: docker build -t legato . && docker run -p 8787:8787 \
#   -e LEGATO_UPSTREAM=https://… -e LEGATO_SECRET=… -v legato:/var/lib/legato legato
# It listens on every address of the container; TLS belongs in front.

FROM python:3.13-slim AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY proxy ./proxy
RUN python -m venv /opt/legato \
 && /opt/legato/bin/python -m pip install --no-cache-dir --disable-pip-version-check .

FROM python:3.13-slim
RUN useradd --system --uid 10001 --create-home --home-dir /var/lib/legato legato
COPY --from=build /opt/legato /opt/legato
ENV PATH=/opt/legato/bin:$PATH

USER legato
# The log is written here (sqlite:legato.db), with mode 0600.
WORKDIR /var/lib/legato
VOLUME /var/lib/legato

EXPOSE 8787
# Another port or prefix needs another line here. Not urllib: it would ask a proxy from the environment.
HEALTHCHECK --interval=10s --timeout=3s --start-period=10s CMD ["python", "-c", \
  "import http.client as h; c = h.HTTPConnection('127.0.0.1', 8787, timeout=2); c.request('GET', '/legato/health'); raise SystemExit(c.getresponse().status != 200)"]

CMD ["legato", "serve", "--host", "0.0.0.0"]
