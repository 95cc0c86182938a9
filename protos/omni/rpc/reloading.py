"""A channel whose TLS files may be replaced while it is in use.

gRPC's channel credentials are fixed, so this channel stands before a real one: when a call begins and the files have
changed, it makes a new one for this call and those after it. Calls on the old one, streams above all, go on until they
end by themselves; then it is closed.
"""

import asyncio
import contextlib
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import grpc

from omni.rpc import logs
from omni.rpc.options import Options
from omni.rpc.tls import ClientTls, Stamp, channel_credentials, stamp

LOOK_AGAIN_S = 1.0
"""The files are looked at no more often than this."""

# Longer than any stream: an old channel ends with its last call, not by the clock.
_RETIREMENT_S = 30 * 24 * 3600.0

_log = logs.get(__name__)


class ReloadingChannel(grpc.aio.Channel):
    """A channel over TLS; made by `make_channel`."""

    def __init__(self, target: str, tls: ClientTls, options: Options) -> None:
        self._target, self._tls, self._options = target, tls, options
        self._stamp: Stamp = stamp(tls)
        self._current = self._connect()
        self._next_look = 0.0
        self._retiring: dict[asyncio.Task[None], grpc.aio.Channel] = {}

    def _connect(self) -> grpc.aio.Channel:
        return grpc.aio.secure_channel(self._target, channel_credentials(self._tls), options=self._options)

    def current(self) -> grpc.aio.Channel:
        """The channel for calls that begin now. A half-done rotation leaves the last one in use."""
        now = asyncio.get_running_loop().time()
        if now < self._next_look:
            return self._current
        self._next_look = now + LOOK_AGAIN_S
        try:
            fresh = stamp(self._tls)
            if fresh == self._stamp:
                return self._current
            channel = self._connect()
        except OSError as error:
            _log.warning("tls_files_unreadable", target=self._target, error=str(error))
            return self._current
        old, self._current, self._stamp = self._current, channel, fresh
        retirement = asyncio.ensure_future(old.close(_RETIREMENT_S))
        self._retiring[retirement] = old
        retirement.add_done_callback(self._retired)
        return self._current

    def _retired(self, retirement: asyncio.Task[None]) -> None:
        self._retiring.pop(retirement, None)
        if not retirement.cancelled() and (error := retirement.exception()):
            _log.warning("old_channel_not_closed", target=self._target, error=repr(error))

    async def close(self, grace: float | None = None) -> None:
        """Closes the channel and the old ones that still have calls."""
        for retirement, old in list(self._retiring.items()):
            retirement.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await retirement
            await old.close(grace)
        await self._current.close(grace)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        await self.close()

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """State of the channel in use."""
        return self.current().get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """Waits until the channel in use has another state."""
        await self.current().wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """Waits until the channel in use is connected."""
        await self.current().channel_ready()

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        """A method as `grpc.aio.Channel` has it."""
        return self._method(lambda channel: channel.unary_unary(*args, **kwargs))

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        """A method as `grpc.aio.Channel` has it."""
        return self._method(lambda channel: channel.unary_stream(*args, **kwargs))

    def stream_unary(self, *args: Any, **kwargs: Any) -> Any:
        """A method as `grpc.aio.Channel` has it."""
        return self._method(lambda channel: channel.stream_unary(*args, **kwargs))

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:
        """A method as `grpc.aio.Channel` has it."""
        return self._method(lambda channel: channel.stream_stream(*args, **kwargs))

    def _method(self, make: Callable[[grpc.aio.Channel], Any]) -> Callable[..., Any]:
        channel: grpc.aio.Channel | None = None
        method: Any = None

        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal channel, method
            if (current := self.current()) is not channel:
                channel, method = current, make(current)
            return method(*args, **kwargs)

        return call
