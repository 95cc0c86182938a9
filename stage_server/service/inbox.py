"""What has come for a run and is not with its engine yet: numbers are checked, tensors fetched, the order kept."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch

from omni.rpc.errors import OmniError, Reason
from omni.v1 import stage_pb2, tensor_pb2
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
        addresses: what the run's stream has said of the owners of tensors; other streams are not believed.
        fail: called when the run cannot go on, with what could not be done and why.
        taken: called when the engine is done with an input.
    """

    def __init__(
        self,
        host: StageHost,
        run: int,
        sources: Iterable[tuple[str, str]],
        tasks: asyncio.TaskGroup,
        *,
        addresses: Mapping[str, tensor_pb2.ReplicaAddress],
        fail: Callable[[str, Exception], None],
        taken: Callable[[stage_pb2.RunInput], None],
    ) -> None:
        self._host = host
        self._run = run
        self._sources = {source: _Source() for source in sources}
        self._tasks = tasks
        self._addresses = addresses
        self._fail = fail
        self._taken = taken
        self._loop = asyncio.get_running_loop()
        self._messages: deque[Message] = deque()
        self._fetching: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def sources(self) -> tuple[tuple[str, str], ...]:
        """(stage, role) of each run that feeds this one."""
        return tuple(self._sources)

    def put(self, message: Message) -> None:
        """Takes the run's next message in."""
        if self._closed:
            return
        try:
            self._check(message)
        except OmniError as error:
            self._give_up("its input is out of order", error)
            return
        self._messages.append(message)
        if self._fetching is None:
            self._feed()

    def _give_up(self, what: str, error: Exception) -> None:
        self.close()
        self._fail(what, error)

    def close(self) -> None:
        """The run has ended, or is to end."""
        self._closed = True
        self._messages.clear()
        if self._fetching is not None:
            self._fetching.cancel()

    def _check(self, message: Message) -> None:
        key = (message.source.stage, message.source.role)
        source = self._sources.get(key)
        if source is None or source.ended:
            what = "has ended already" if source else "is not one of the run's sources"
            raise self._wrong(Reason.SEQUENCE_BROKEN, key, f"the source {what}")
        if isinstance(message, stage_pb2.RunInputEnd):
            source.ended = True
            if message.count != source.next:
                what = f"{message.count} outputs were made, {source.next} came"
                raise self._wrong(Reason.COUNT_MISMATCH, key, what)
        else:
            if message.range.first != source.next or not message.range.count:
                what = f"number {source.next} was to come, {message.range.first} came"
                raise self._wrong(Reason.SEQUENCE_BROKEN, key, what)
            source.next += message.range.count

    def _wrong(self, reason: Reason, source: tuple[str, str], what: str) -> OmniError:
        stage, role = source
        return OmniError(reason, f"edge {stage}{f'[{role}]' if role else ''}->{self._host.spec.stage}: {what}")

    def _feed(self) -> None:
        """Hands over as far as tensors can be had at once; fetches the others."""
        reader = self._host.reader
        while self._messages:
            message = self._messages[0]
            fetched: list[Fetched] = []
            if isinstance(message, stage_pb2.RunInput):
                for named in message.payload.tensors:
                    try:
                        at_once = reader.at_once(named.handle)
                    except Exception as error:
                        self._give_up("its input could not be fetched", _lost(named.handle, error))
                        return
                    if at_once is None:
                        self._fetching = self._tasks.create_task(self._fetch(message))
                        return
                    fetched.append(at_once)
            self._messages.popleft()
            if not self._hand_over(message, fetched):
                return

    async def _fetch(self, message: stage_pb2.RunInput) -> None:
        fetched: list[Fetched] = []
        for named in message.payload.tensors:
            try:
                address = self._addresses.get(named.handle.owner)
                fetched.append(await self._host.reader.fetch(named.handle, address))
            except Exception as error:
                self._fetching = None
                self._give_up("its input could not be fetched", _lost(named.handle, error))
                return
        self._fetching = None
        if not self._closed:
            self._messages.popleft()
            if self._hand_over(message, fetched):
                self._feed()

    def _hand_over(self, message: Message, fetched: list[Fetched]) -> bool:
        """False: the engine cannot take it, and the run fails."""
        try:
            self._host.engine.feed(self._run, self._made(message, fetched))
        except Exception as error:
            self._give_up("its input could not be taken", error)
            return False
        return True

    def _made(self, message: Message, fetched: list[Fetched]) -> Feed:
        source = message.source
        if isinstance(message, stage_pb2.RunInputEnd):
            return Feed(source.stage, source.role, end=True)
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

        return Feed(
            source.stage,
            source.role,
            token_ids=payload.token_ids,
            text=payload.text,
            tensors=tensors,
            release=release,
        )


def _lost(handle: tensor_pb2.TensorHandle, error: Exception) -> OmniError:
    """What a failed fetch is to the run: whatever a handle or its owner says, no other run is touched."""
    if isinstance(error, OmniError):
        return error
    why = f"{type(error).__name__}: {error}"
    message = f"a tensor of {handle.owner}, {handle.size} bytes, could not be fetched: {why}"
    return OmniError(Reason.TENSOR_LOST, message, replica=handle.owner)
