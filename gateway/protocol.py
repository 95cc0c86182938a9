"""HTTP/1.1 with bounds: on what a client sends beside the body, and on how long it may take to send head and body."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_BYTES = 64 * 1024
"""Most bytes that may come and be neither a whole head nor a piece of a body: request line and headers, and what goes
with chunks, extensions and trailers. The one read in which they end may bring more."""
HEAD_SECONDS = 30.0
"""From the connection, or from the first byte of a head, to its last."""
BODY_SECONDS = 30.0
"""Between two pieces of a body."""


class BoundedHttp(HttpToolsProtocol):
    """Refuses a head or a trailer that is too long, and hangs up on a client that stops in the middle of a request."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_head = True
        self._in_body = False
        self._unused = 0
        """Bytes since the last whole head or piece of a body."""
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in its parent
        """Of the transport."""
        super().connection_made(transport)
        self._timer = self.loop.call_later(HEAD_SECONDS, self._hang_up)

    def data_received(self, data: bytes) -> None:
        """Of the transport."""
        self._unused += len(data)
        if self._in_head and self._timer is None:
            self._timer = self.loop.call_later(HEAD_SECONDS, self._hang_up)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._unused > HEAD_BYTES:
            part = "head" if self._in_head else "trailer"
            self.send_400_response(f"The request's {part} is longer than {HEAD_BYTES} bytes.")
        elif self._in_body:
            self._stop_timer()
            self._timer = self.loop.call_later(BODY_SECONDS, self._hang_up)

    def connection_lost(self, exc: Exception | None) -> None:
        """Of the transport."""
        self._stop_timer()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        """Of the parser."""
        self._in_head = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Of the parser."""
        self._in_head, self._in_body, self._unused = False, True, 0
        self._stop_timer()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Of the parser."""
        self._unused = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Of the parser."""
        self._in_body, self._unused = False, 0
        self._stop_timer()
        super().on_message_complete()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _hang_up(self) -> None:
        self._timer = None
        if self.flow.read_paused:  # It is this side that does not read.
            self._timer = self.loop.call_later(BODY_SECONDS, self._hang_up)
        else:
            self.transport.close()
