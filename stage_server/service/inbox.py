"""What has come for a run and is not with its engine yet: numbers are checked, tensors fetched, the order kept."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from omni.rpc.errors import OmniError, Reason
from omni.v1 import stage_pb2
from stage_server.engines.base import Feed
from stage_server.service.host import StageHost
from stage_server.transport.reader import Fetched

Message = stage_pb2.RunInput | stage_pb2.RunInputEnd


@dataclass(slots=True)
class _Source:
    next: int = 0
    """Number of its next output."""
    ended: bool = False


class Inbox:
    """Inputs of one run, on the event loop. Nothing is handed over once it is closed.

    Args:
        host: its engine is fed, its reader finds the tensors.
        run: the engine's number of the run.
        sources: (stage, role) of each run that feeds this one.
        tasks: fetches run in it.
        fail: called when the run cannot go on.
        taken: called when the engine is done with an input.
    """

    def __init__(
        self,
        host: StageHost,
        run: int,
        sources: Iterable[tuple[str, str]],
        tasks: asyncio.TaskGroup,
        *,
        fail: Callable[[OmniError], None],
        taken: Callable[[stage_pb2.RunInput], None],
    ) -> None:
        self._host = host
        self._run = run
        self._sources = {source: _Source() for source in sources}
        self._tasks = tasks
        self._fail = fail
        self._taken = taken
        self._loop = asyncio.get_running_loop()
        self._messages: deque[Message] = deque()
        self._fetching = False
        self._closed = False

    @property
    def sources(self) -> tuple[tuple[str, str], ...]:
        """(stage, role) of each run that feeds this one."""
        return tuple(self._sources)

    def put(self, message: Message) -> None:
        """Takes the run's next message in."""
        try:
            self._check(message)
        except OmniError as error:
            self._fail(error)
            return
        self._messages.append(message)
        if not self._fetching:
            self._feed()

    def close(self) -> None:
        """The run has ended."""
        self._closed = True
        self._messages.clear()

    def _check(self, message: Message) -> None:
        key = (message.source.stage, message.source.role)
        source = self._sources.get(key)
        edge = f"edge {key[0]}{f'[{key[1]}]' if key[1] else ''}->{self._host.spec.stage}"
        if source is None or source.ended:
            what = "has ended already" if source else "is not one of the run's sources"
            raise OmniError(Reason.SEQUENCE_BROKEN, f"{edge}: the source {what}")
        if isinstance(message, stage_pb2.RunInputEnd):
            source.ended = True
            if message.count != source.next:
                raise OmniError(Reason.COUNT_MISMATCH, f"{edge}: {message.count} outputs were made, {source.next} came")
        else:
            if message.range.first != source.next or not message.range.count:
                raise OmniError(
                    Reason.SEQUENCE_BROKEN, f"{edge}: number {source.next} was to come, {message.range.first} came"
                )
            source.next += message.range.count

    def _feed(self) -> None:
        """Hands over as far as tensors can be had at once; fetches the others."""
        reader = self._host.reader
        while self._messages:
            message = self._messages[0]
            fetched: list[Fetched] = []
            if isinstance(message, stage_pb2.RunInput):
                try:
                    for named in message.payload.tensors:
                        at_once = reader.at_once(named.handle)
                        if at_once is None:
                            self._fetching = True
                            self._tasks.create_task(self._fetch(message))
                            return
                        fetched.append(at_once)
                except OmniError as error:
                    self._fail(error)
                    return
            self._messages.popleft()
            self._hand_over(message, fetched)

    async def _fetch(self, message: stage_pb2.RunInput) -> None:
        try:
            fetched = [await self._host.reader.fetch(named.handle) for named in message.payload.tensors]
        except OmniError as error:
            self._fail(error)
            return
        finally:
            self._fetching = False
        if not self._closed:
            self._messages.popleft()
            self._hand_over(message, fetched)
            self._feed()

    def _hand_over(self, message: Message, fetched: list[Fetched]) -> None:
        source = message.source
        if isinstance(message, stage_pb2.RunInputEnd):
            self._host.engine.feed(self._run, Feed(source.stage, source.role, end=True))
            return
        payload = message.payload
        tensors: dict[str, list[torch.Tensor]] = {}
        for named, each in zip(payload.tensors, fetched, strict=True):
            tensors.setdefault(named.name, []).append(each.tensor)
        released = False

        def release() -> None:
            nonlocal released
            if released:
                return
            released = True
            try:
                for each in fetched:
                    each.check()
            finally:
                self._loop.call_soon_threadsafe(self._taken, message)

        self._host.engine.feed(
            self._run,
            Feed(
                source.stage,
                source.role,
                token_ids=payload.token_ids,
                text=payload.text,
                tensors=tensors,
                release=release,
            ),
        )
