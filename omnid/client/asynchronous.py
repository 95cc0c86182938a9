"""The client for programs with an event loop of their own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import Self

import grpc

from omni.rpc.channel import make_channel
from omni.rpc.errors import OmniError
from omni.rpc.tls import ClientTls
from omni.v1 import content_pb2, generate_pb2
from omni.v1.generate_pb2_grpc import OmniServiceStub
from omnid.client.types import Generation, Output, Params, output_of, request

_ANSWER_SECONDS = 30.0
"""For a coordinator to say what it serves."""


class AsyncOmni:
    """A coordinator at `target`; ``async with`` closes the connection."""

    def __init__(self, target: str, *, tls: ClientTls | None = None) -> None:
        self._channel = make_channel(target, tls=tls)
        self._stub = OmniServiceStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        await self._channel.close()

    async def models(self) -> list[generate_pb2.Model]:
        """What is served.

        Raises:
            OmniError: when the coordinator cannot be asked.
        """
        try:
            listed = await self._stub.ListModels(generate_pb2.ListModelsRequest(), timeout=_ANSWER_SECONDS)
        except grpc.aio.AioRpcError as error:
            raise OmniError.from_rpc_error(error) from error
        return list(listed.models)

    async def stream(
        self,
        model: str,
        prompt: str | Sequence[content_pb2.ChatMessage],
        *,
        outputs: Sequence[str] = (),
        params: Params | None = None,
        timeout: float | None = None,
        generation: Generation | None = None,
    ) -> AsyncIterator[Output]:
        """Outputs as they come; a loop that is left early (close the iterator) cancels the request on every stage.

        Args:
            model: name of a served model.
            prompt: a question, or the messages of a conversation.
            outputs: "text", "audio", "image"; empty: the model's default.
            params: see `Params`.
            timeout: seconds for the whole request.
            generation: takes the request's id, what it made and how it ended.

        Raises:
            OmniError: of the class that says what failed.
        """
        call = self._stub.Generate(request(model, prompt, outputs, params or {}, timeout))
        try:
            async for response in call:
                for event in response.events:
                    kind = event.WhichOneof("event")
                    if kind == "output":
                        output = output_of(event.output)
                        if generation is not None:
                            generation.take(output)
                        yield output
                    elif kind == "accepted" and generation is not None:
                        generation.request_id = event.accepted.request_id
                    elif kind == "finished" and generation is not None:
                        generation.finished = event.finished
        except grpc.aio.AioRpcError as error:
            raise OmniError.from_rpc_error(error) from error
        finally:
            call.cancel()

    async def generate(
        self,
        model: str,
        prompt: str | Sequence[content_pb2.ChatMessage],
        *,
        outputs: Sequence[str] = (),
        params: Params | None = None,
        timeout: float | None = None,
    ) -> Generation:
        """The whole answer; arguments and errors as those of `stream`."""
        generation = Generation()
        async for _ in self.stream(
            model, prompt, outputs=outputs, params=params, timeout=timeout, generation=generation
        ):
            pass
        return generation
