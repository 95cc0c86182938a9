"""``omni-gateway``: OpenAI's REST API in front of coordinators."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import uvicorn
import uvloop

from gateway.app import make_app
from gateway.protocol import BoundedHttp
from gateway.settings import Settings, read_api_keys
from omni.rpc import logs, tracing
from omni.rpc.address import check_address, split_address
from omni.rpc.command import add_logs, add_tls, argument, whole_number, writable_descriptor
from omni.rpc.options import MIB
from omni.rpc.tls import ClientTls, channel_credentials

KEYS_VARIABLE = "OMNI_GATEWAY_API_KEYS"
_STOP_SECONDS = 5


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line of ``omni-gateway``."""
    parser = argparse.ArgumentParser(prog="omni-gateway", description="OpenAI's REST API in front of omnid.")
    parser.add_argument(
        "--coordinator",
        action="append",
        type=argument(check_address),
        required=True,
        metavar="HOST:PORT",
        help="may be repeated",
    )
    parser.add_argument(
        "--listen",
        type=argument(split_address),
        default="127.0.0.1:8000",
        metavar="HOST:PORT",
        help="port 0: the system chooses",
    )
    parser.add_argument(
        "--ready-fd",
        type=argument(writable_descriptor),
        metavar="N",
        help='writes {"http": "HOST:PORT"} there when it serves',
    )
    parser.add_argument("--api-key-file", type=Path, help=f"one key a line; {KEYS_VARIABLE} holds more, with commas")
    parser.add_argument("--allow-media-urls", action="store_true", help="fetch http and https URLs of public hosts")
    parser.add_argument("--max-body-bytes", type=argument(whole_number(1, 2**40)), default=64 * MIB, metavar="N")
    add_tls(parser, ca="speak TLS to the coordinators")
    add_logs(parser)
    options = parser.parse_args(arguments)
    if not options.tls_ca and (options.tls_cert or options.tls_key):
        parser.error("--tls-cert and --tls-key need --tls-ca")
    return options


def settings_of(options: argparse.Namespace) -> Settings:
    """Settings of a command line.

    Raises:
        OSError, ValueError: for a file that cannot be used.
    """
    tls = ClientTls(options.tls_ca, options.tls_cert, options.tls_key) if options.tls_ca else None
    if tls:
        channel_credentials(tls)
    return Settings(
        coordinators=tuple(options.coordinator),
        tls=tls,
        api_keys=read_api_keys(options.api_key_file, os.environ.get(KEYS_VARIABLE, "")),
        allow_media_urls=options.allow_media_urls,
        max_body_bytes=options.max_body_bytes,
    )


class HttpServer(uvicorn.Server):
    """Says when it serves, and ends well when it is told to stop."""

    def __init__(self, settings: Settings) -> None:
        self.app = make_app(settings)
        super().__init__(
            uvicorn.Config(
                self.app,
                http=BoundedHttp,
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=_STOP_SECONDS,
            )
        )
        self.serving = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Uvicorn's own way raises the signal once more at the end, so that the process would seem to be killed."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.serving.set()


async def serve(settings: Settings, listener: socket.socket, ready_fd: int | None) -> None:
    """Serves until it is told to stop; `ready_fd` gets a line when requests can come."""
    server = HttpServer(settings)
    host, port = listener.getsockname()[:2]
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    async def announce() -> None:
        await server.serving.wait()
        await server.app.state.gateway.coordinators.attached()
        if ready_fd is not None:
            os.write(ready_fd, json.dumps({"http": address}).encode() + b"\n")
            os.close(ready_fd)

    async with asyncio.TaskGroup() as tasks:
        announcing = tasks.create_task(announce())
        await server.serve(sockets=[listener])
        announcing.cancel()


def main() -> int:
    """Exit status 1 when it cannot listen, 2 for what is wrong with its options."""
    options = parse()
    logs.configure(options.log_format, options.log_level)
    tracing.configure("omni-gateway")
    try:
        settings = settings_of(options)
    except (OSError, ValueError) as error:
        print(f"omni-gateway: {error}", file=sys.stderr)
        return 2
    host, port = options.listen
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        print(f"omni-gateway: cannot serve on {host}:{port}: {error}", file=sys.stderr)
        return 1
    uvloop.run(serve(settings, listener, options.ready_fd))
    return 0


if __name__ == "__main__":
    sys.exit(main())
