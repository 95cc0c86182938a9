"""Prometheus: metrics of all calls that a server serves, and the page that shows a process's metrics."""

import asyncio
from http import HTTPStatus
from types import TracebackType
from typing import Self

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

_HEAD_BYTES = 8192
_HEAD_SECONDS = 5.0
_LATENCY_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class RpcMetrics:
    """Calls by method: begun and not ended, ended by code, and how long they took."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.in_flight = Gauge("omni_rpc_in_flight", "Calls being served", ["method"], registry=registry)
        self.calls = Counter("omni_rpc_requests", "Calls served", ["method", "code"], registry=registry)
        self.latency = Histogram(
            "omni_rpc_latency_seconds",
            "From a call's begin to its end",
            ["method"],
            registry=registry,
            buckets=_LATENCY_SECONDS,
        )


class MetricsServer:
    """Serves ``GET /metrics`` on the running event loop; made by `serve_metrics`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.port = 0
        self._registry = registry
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()

    async def start(self, host: str, port: int) -> None:
        """Binds; `self.port` is then the bound port."""
        self._server = await asyncio.start_server(self._serve, host, port, limit=_HEAD_BYTES)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Stops listening and drops the connections that are open."""
        if self._server:
            self._server.close()
            for writer in self._open:
                writer.transport.abort()
            await self._server.wait_closed()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        try:
            async with asyncio.timeout(_HEAD_SECONDS):
                head = await reader.readuntil(b"\r\n\r\n")
                method, path, *_ = [*head.split(b"\r\n", 1)[0].split(b" "), b"", b""]
                if path.split(b"?")[0] != b"/metrics":
                    status, body = HTTPStatus.NOT_FOUND, b""
                elif method not in (b"GET", b"HEAD"):
                    status, body = HTTPStatus.METHOD_NOT_ALLOWED, b""
                else:
                    status, body = HTTPStatus.OK, generate_latest(self._registry)
                writer.write(
                    f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {CONTENT_TYPE_LATEST}\r\n"
                    f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode()
                )
                if method != b"HEAD":
                    writer.write(body)
                await writer.drain()
        except (TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError):
            pass  # Not HTTP, or gone: there is nobody to answer.
        finally:
            self._open.discard(writer)
            writer.close()


async def serve_metrics(host: str, port: int, registry: CollectorRegistry) -> MetricsServer:
    """Shows `registry` at ``http://host:port/metrics``; with port 0 the system chooses, see ``.port``.

    Raises:
        OSError: when the port is taken.
    """
    server = MetricsServer(registry)
    await server.start(host, port)
    return server
