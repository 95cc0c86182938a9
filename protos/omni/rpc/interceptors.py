"""What happens around every call that a server serves, in one fixed order, outermost first:

1. errors: what a handler raises becomes a status with details; what it did not mean to raise tells the client nothing;
2. deadline: the caller's deadline ends the handler and is known to it;
3. request id and trace context, taken over from the caller or made;
4. metrics: in flight, ended by code, latency;
5. the request message, decoded and validated against the contract (methods that take one message; a stream's messages
   are checked by its session where they matter, so that nothing is spent on the others).

Each is wrapped round a method once, when the method is first called, and costs nothing per message of a stream.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, TypeAlias

import grpc

from omni.rpc import context as call_context
from omni.rpc import logs, tracing
from omni.rpc.errors import DETAILS_KEY, MAX_MESSAGE_BYTES, OmniError, Reason
from omni.rpc.metrics import RpcMetrics
from omni.rpc.text import clip
from omni.rpc.validation import validate

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"

Behaviour = Callable[[Any, Any], Awaitable[Any]]
"""A method: (request or iterator of requests, context) -> the response, or None when it has written a stream."""

Layer = Callable[[str, Handler, Behaviour], Behaviour]
"""Wraps a method; gets its full name and its handler as it was registered."""

_log = logs.get(__name__)


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Wraps each method once in the layers of this module."""

    def __init__(self, metrics: RpcMetrics) -> None:
        self._layers: list[Layer] = [map_errors, bound_by_deadline, identify, measure(metrics), check_request]
        self._wrapped: dict[str, tuple[Handler, Handler]] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        known, wrapped = self._wrapped.get(method, (None, None))
        if wrapped is not None and known is handler:
            return wrapped
        if handler is None:
            return handler
        behaviour = _behaviour(handler)
        if behaviour is None:
            return handler
        for layer in reversed(self._layers):
            behaviour = layer(method, handler, behaviour)
        # What gRPC itself decodes before a handler runs is out of reach: one message is decoded by the last layer.
        wrapped = _MAKERS[handler.request_streaming, handler.response_streaming](
            behaviour, _decoder(handler) if handler.request_streaming else None, handler.response_serializer
        )
        self._wrapped[method] = handler, wrapped
        return wrapped


_MAKERS: dict[tuple[bool, bool], Callable[..., Handler]] = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


def _behaviour(handler: Handler) -> Behaviour | None:
    """The handler's function as a coroutine function; None for a blocking one, which gRPC runs on a thread."""
    kinds = (handler.unary_unary, handler.unary_stream, handler.stream_unary, handler.stream_stream)
    function: Callable[..., Any] = next(kind for kind in kinds if kind is not None)
    if inspect.isasyncgenfunction(function):
        return _written(function)
    return function if inspect.iscoroutinefunction(function) else None


def _decoder(handler: Handler) -> Callable[[bytes], Any]:
    """The handler's own decoder; what it cannot decode is the sender's fault, BAD_REQUEST."""
    decode = handler.request_deserializer or bytes

    def decoded(data: bytes) -> Any:
        try:
            return decode(data)
        except Exception as error:
            text = f"the request is no message of this method: its {len(data)} bytes cannot be decoded"
            raise OmniError(Reason.BAD_REQUEST, text) from error

    return decoded


def _written(generator: Callable[[Any, Any], AsyncGenerator[Any, None]]) -> Behaviour:
    """A method that yields its responses, as one that writes them; it is closed whatever ends the call."""

    async def write_all(request: Any, context: Any) -> None:
        responses = generator(request, context)
        try:
            async for response in responses:
                await context.write(response)
        finally:
            await responses.aclose()

    return write_all


def map_errors(method: str, _handler: Handler, call: Behaviour) -> Behaviour:
    """Ends a failed call with the status of its error."""

    async def mapped(request: Any, context: Any) -> Any:
        try:
            return await call(request, context)
        except grpc.aio.AbortError:
            raise
        except Exception as error:
            if context.cancelled() or context.done() or _hung_up(error):
                _log.debug("call_ended_by_caller", method=method, error=repr(error))
                raise asyncio.CancelledError from error
            meant = as_omni_error(error)
            if meant is None:
                _log.error("unexpected_error", method=method, request_id=call_context.request_id(), exc_info=error)
                meant = OmniError(Reason.INTERNAL, "internal error; the server's log has it under this request id")
            await abort(context, meant.located(request_id=call_context.request_id()))
            raise AssertionError("abort raises") from error

    return mapped


def _hung_up(error: BaseException) -> bool:
    """Whether a write failed because the caller had gone: gRPC may find that out before the context knows."""
    if isinstance(error, BaseExceptionGroup):
        return any(map(_hung_up, error.exceptions))
    return isinstance(error, grpc.aio.InternalError)


async def abort(context: Any, error: OmniError) -> None:
    """Ends the call with the error's status and details.

    Raises:
        grpc.aio.AbortError: always.
    """
    status = error.to_status()
    trailing = (*(context.trailing_metadata() or ()), (DETAILS_KEY, status.SerializeToString()))
    await context.abort(error.code, clip(error.message, MAX_MESSAGE_BYTES), trailing)


def as_omni_error(error: BaseException) -> OmniError | None:
    """The error that a handler meant: itself, of a call that it made, or of a task of its group; else None."""
    if isinstance(error, OmniError):
        return error
    if isinstance(error, grpc.RpcError):
        return OmniError.from_rpc_error(error)
    if isinstance(error, BaseExceptionGroup):
        meant = [as_omni_error(each) for each in error.exceptions]
        return next((each for each in meant if each is not None), None)
    return None


def bound_by_deadline(_method: str, _handler: Handler, call: Behaviour) -> Behaviour:
    """Cancels the handler when the caller's deadline passes."""

    async def bounded(request: Any, context: Any) -> Any:
        remaining = context.time_remaining()
        if remaining is None:
            return await call(request, context)
        call_context.enter(remaining=remaining)
        try:
            async with asyncio.timeout(remaining) as scope:
                return await call(request, context)
        except TimeoutError as error:
            if not scope.expired():
                raise
            raise OmniError(Reason.DEADLINE, f"the call's deadline of {remaining:.3g} s has passed") from error

    return bounded


def identify(method: str, handler: Handler, call: Behaviour) -> Behaviour:
    """Takes over or makes the request id and says it in the trailing metadata; takes over the trace context.

    An id that was made for a stream of many requests is that of the call: its log lines, each about one request or
    none, do not carry it.
    """
    many = handler.request_streaming

    async def identified(request: Any, context: Any) -> Any:
        request_id = traceparent = ""
        for key, value in context.invocation_metadata() or ():
            if key == call_context.REQUEST_ID_KEY and call_context.valid_request_id(value):
                request_id = value
            elif key == call_context.TRACEPARENT_KEY and call_context.valid_traceparent(value):
                traceparent = value
        logged = bool(request_id) or not many
        request_id = request_id or call_context.new_request_id()
        call_context.enter(request_id=request_id, traceparent=traceparent, logged=logged)
        context.set_trailing_metadata(((call_context.REQUEST_ID_KEY, request_id),))
        with tracing.span(method):
            return await call(request, context)

    return identified


def measure(metrics: RpcMetrics) -> Layer:
    """Counts calls in `metrics`."""

    def layer(method: str, _handler: Handler, call: Behaviour) -> Behaviour:
        in_flight, latency = metrics.in_flight.labels(method), metrics.latency.labels(method)

        async def measured(request: Any, context: Any) -> Any:
            begin = time.perf_counter()
            in_flight.inc()
            code = "OK"
            try:
                return await call(request, context)
            except BaseException as error:
                code = _code(error, context)
                raise
            finally:
                in_flight.dec()
                latency.observe(time.perf_counter() - begin)
                metrics.calls.labels(method, code).inc()

        return measured

    return layer


def _code(error: BaseException, context: Any) -> str:
    if isinstance(error, grpc.aio.AbortError):
        code = context.code()
        return code.name if isinstance(code, grpc.StatusCode) else grpc.StatusCode.UNKNOWN.name
    if isinstance(error, asyncio.CancelledError):
        late = call_context.remaining() == 0
        return (grpc.StatusCode.DEADLINE_EXCEEDED if late else grpc.StatusCode.CANCELLED).name
    meant = as_omni_error(error)
    return (meant.code if meant else grpc.StatusCode.INTERNAL).name


def check_request(_method: str, handler: Handler, call: Behaviour) -> Behaviour:
    """Decodes a request message, and refuses one that breaks the contract's constraints."""
    if handler.request_streaming:
        return call
    decode = _decoder(handler)

    async def checked(data: Any, context: Any) -> Any:
        request = decode(data)
        validate(request)
        return await call(request, context)

    return checked
