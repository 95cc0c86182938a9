"""All coordinators of this gateway, and the models that they serve."""

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self

from prometheus_client import CollectorRegistry, Counter, Gauge

from gateway.upstream import Call, Upstream
from omni.rpc.channel import make_channel
from omni.rpc.errors import FieldViolation, OmniError, Reason, invalid
from omni.rpc.text import shown
from omni.rpc.tls import ClientTls
from omni.v1 import generate_pb2

_READY_BOUND_S = 3.0


class Coordinators:
    """Owns the streams; ``async with`` runs them. A request goes to the least busy coordinator that has its model."""

    def __init__(self, targets: Sequence[str], tls: ClientTls | None, registry: CollectorRegistry) -> None:
        self._targets = targets
        self._tls = tls
        self._fenced = Counter(
            "omni_gateway_fenced_events", "Events of requests that nobody waits for any more", registry=registry
        )
        self._up = Gauge("omni_gateway_attached", "Whether the stream is up", ["coordinator"], registry=registry)
        self._all_attached = asyncio.Event()
        self._refresh: asyncio.Task[OmniError | None] | None = None
        self._stack = AsyncExitStack()
        self.upstreams: list[Upstream] = []

    async def __aenter__(self) -> Self:
        group = await self._stack.enter_async_context(asyncio.TaskGroup())
        for target in self._targets:
            channel = make_channel(target, tls=self._tls)
            self._stack.push_async_callback(channel.close)
            upstream = Upstream(target, channel, fenced=self._fenced, changed=self._changed)
            self.upstreams.append(upstream)
            task = group.create_task(upstream.run())
            self._stack.callback(task.cancel)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._refresh:
            self._refresh.cancel()
            await asyncio.wait([self._refresh])
        await self._stack.__aexit__(kind, error, trace)

    async def attached(self) -> None:
        """Waits until every coordinator's stream is up."""
        await self._all_attached.wait()

    async def model(self, name: str) -> generate_pb2.Model:
        """The model of that name, as last listed; coordinators are asked again for one that is not known.

        Raises:
            OmniError: UNKNOWN_MODEL, or UNREACHABLE when no coordinator can be asked.
        """
        found = self._known().get(name)
        if found is None:
            await self._list_again()
            found = self._known().get(name)
        if found is None:
            names = ", ".join(sorted(self._known())) or "none"
            told = f"there is no model {shown(name)}; served: {names}"
            raise invalid(FieldViolation("model", told), reason=Reason.UNKNOWN_MODEL)
        return found

    async def models(self) -> list[generate_pb2.Model]:
        """All models as they are now, by name; ready when a coordinator has it ready.

        Raises:
            OmniError: UNREACHABLE when no coordinator answers.
        """
        await self._list_again()
        return [model for _, model in sorted(self._known().items())]

    async def missing(self) -> list[str]:
        """What keeps this gateway from serving every model, for people; empty: it is ready."""
        answers = await asyncio.gather(
            *(upstream.list_models(_READY_BOUND_S) for upstream in self.upstreams), return_exceptions=True
        )
        trouble = []
        for upstream, answer in zip(self.upstreams, answers, strict=True):
            if isinstance(answer, OmniError):
                trouble.append(answer.message)
            elif isinstance(answer, BaseException):
                raise answer
            elif not upstream.attached:
                trouble.append(f"no stream to the coordinator at {upstream.target}: {upstream.trouble}")
        known = self._known()
        trouble += [f"model {name} has a stage without a replica" for name in sorted(known) if not known[name].ready]
        if not known and not trouble:
            trouble.append("the coordinator serves no model")
        return trouble

    def start(self, request: generate_pb2.GenerateRequest) -> Call:
        """Sends a request to a coordinator that has its model.

        Raises:
            OmniError: UNREACHABLE, MESSAGE_TOO_LARGE.
        """
        having = [upstream for upstream in self.upstreams if request.model in upstream.models]
        up = [upstream for upstream in having if upstream.attached]
        return min(up or having or self.upstreams, key=lambda upstream: upstream.requests).start(request)

    def _known(self) -> dict[str, generate_pb2.Model]:
        known: dict[str, generate_pb2.Model] = {}
        for upstream in self.upstreams:
            for name, model in upstream.models.items():
                if name not in known or model.ready:
                    known[name] = model
        return known

    async def _list_again(self) -> None:
        """Asks all coordinators; callers at the same time share one round."""
        if self._refresh is None or self._refresh.done():
            self._refresh = asyncio.create_task(self._ask_all())
        error = await asyncio.shield(self._refresh)
        if error:
            raise error

    async def _ask_all(self) -> OmniError | None:
        """An error when none of them answers."""
        answers = await asyncio.gather(
            *(upstream.list_models(_READY_BOUND_S) for upstream in self.upstreams), return_exceptions=True
        )
        errors = []
        for answer in answers:
            if isinstance(answer, OmniError):
                errors.append(answer)
            elif isinstance(answer, BaseException):
                raise answer
        return errors[0] if len(errors) == len(answers) else None

    def _changed(self) -> None:
        for upstream in self.upstreams:
            self._up.labels(upstream.target).set(upstream.attached)
        if all(upstream.attached for upstream in self.upstreams):
            self._all_attached.set()
        else:
            self._all_attached.clear()
