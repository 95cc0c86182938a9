"""Keeps the processes of a plan alive: starts them, hears how they end, starts them again."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from omni.rpc import logs
from omnid.launcher.failure import ProcessFailedError
from omnid.launcher.plan import ClusterPlan, ProcessPlan
from omnid.launcher.spawner import KILLED, Child, NurseryLostError, Spawner

STOP_SECONDS = 8.0
"""From SIGTERM to SIGKILL of what is still there."""
_NURSERY_SECONDS = 1.0
_FIRST_BACKOFF, _LONGEST_BACKOFF = 0.5, 30.0
_STEADY_SECONDS = 60.0
"""A process that lived so long starts again without a longer pause."""
_LAST_LINES = 12

_log = logs.get(__name__)


@dataclass(slots=True)
class _Kept:
    plan: ProcessPlan
    child: Child | None = None
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=_LAST_LINES))
    was_ready: bool = False
    """Known of the gateway, which says so itself."""


class Launcher:
    """Owns the processes of one host.

    Args:
        plan: the stage servers.
        was_ready: whether the stage server of that name has ever been ready.
        echo: takes each line that a process prints.
    """

    def __init__(
        self, plan: ClusterPlan, was_ready: Callable[[str], bool], echo: Callable[[str], None] | None = None
    ) -> None:
        self._plan = plan
        self._was_ready = was_ready
        self._echo = echo or logs.say
        self._kept: dict[str, _Kept] = {}
        self._spawner = Spawner(plan.preload, plan.env)
        self._stopping = False
        self.settled = False
        """The cluster serves: from now on a process that ends before it is ready is started again like any other."""

    async def run(self, gateway: ProcessPlan | None, gateway_ready: Callable[[str], None]) -> None:
        """Keeps everything alive until it is cancelled, then stops it within `STOP_SECONDS`.

        Args:
            gateway: the gateway's process, if there is to be one.
            gateway_ready: takes the address of the gateway each time that it serves.

        Raises:
            ExceptionGroup: with a ProcessFailedError, when a process ends that was never ready.
        """
        self._spawner.start()
        try:
            async with asyncio.TaskGroup() as tasks:
                for plan in self._plan.here:
                    tasks.create_task(self._keep(plan, None), name=plan.name)
                if gateway is not None:
                    tasks.create_task(self._keep(gateway, gateway_ready), name=gateway.name)
                try:
                    await asyncio.get_running_loop().create_future()
                finally:  # While the processes end, what they say is still read.
                    self._stopping = True
                    await asyncio.shield(self._stop())
        finally:
            await asyncio.shield(self._spawner.stop(_NURSERY_SECONDS))

    async def _keep(self, plan: ProcessPlan, ready: Callable[[str], None] | None) -> None:
        kept = self._kept[plan.name] = _Kept(plan)
        backoff = _FIRST_BACKOFF
        while True:
            began = time.monotonic()
            try:
                self._renew()
                status = await self._live(kept, ready)
                how = _how(status)
            except NurseryLostError:
                status, how = KILLED, _how(KILLED)
            except OSError as error:  # This host has no process or no descriptor for it just now.
                status, how = KILLED, f"not started: {error}"
            if self._stopping:
                return
            if not self._has_served(kept):
                words = "\n".join(f"  {line}" for line in kept.last_lines) or "  (it said nothing)"
                message = f"{plan.name} ended ({how}) before it was ready; its last words:\n{words}"
                raise ProcessFailedError(message, status)
            if time.monotonic() - began > _STEADY_SECONDS:
                backoff = _FIRST_BACKOFF
            _log.warning("process_ended", name=plan.name, how=how, starts_again_in=backoff)
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, _LONGEST_BACKOFF)

    def _has_served(self, kept: _Kept) -> bool:
        """Whether its end is no reason to end everything."""
        return self.settled or kept.was_ready or self._was_ready(kept.plan.name)

    async def _live(self, kept: _Kept, ready: Callable[[str], None] | None) -> int:
        """One life of a process; its exit status."""
        kept.last_lines.clear()
        output, output_end = os.pipe()
        address = address_end = -1
        try:
            if ready is not None:
                address, address_end = os.pipe()
            kept.child = await self._spawner.spawn(kept.plan, output_end, None if ready is None else address_end)
        except BaseException:
            for descriptor in (output, address):
                _close(descriptor)
            raise
        finally:
            for descriptor in (output_end, address_end):
                _close(descriptor)
        child = kept.child
        try:
            async with asyncio.TaskGroup() as tasks:
                reading = tasks.create_task(self._read_lines(output, lambda line: self._heard(kept, line)))
                if ready is not None:
                    tasks.create_task(self._read_lines(address, lambda line: self._serves(kept, line, ready)))
                status = await asyncio.shield(child.ended)
                # What it started may hold the pipe open; what it said itself is there at once.
                await asyncio.wait([reading], timeout=0.5)
                reading.cancel()
                return status
        finally:
            kept.child = None if child.ended.done() else child

    def _heard(self, kept: _Kept, line: str) -> None:
        kept.last_lines.append(line)
        self._echo(line)

    def _serves(self, kept: _Kept, line: str, ready: Callable[[str], None]) -> None:
        address = json.loads(line)["http"]
        if not kept.was_ready:  # Its later lives listen there too, whatever port it was told: clients know this one.
            kept.plan = replace(kept.plan, arguments=(*kept.plan.arguments, "--listen", address))
        kept.was_ready = True
        ready(address)

    async def _read_lines(self, descriptor: int, take: Callable[[str], None]) -> None:
        reader = asyncio.StreamReader(limit=1 << 20)
        pipe = os.fdopen(descriptor, "rb", buffering=0)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), pipe
        )
        try:
            while True:
                try:
                    line = await reader.readline()
                except ValueError:  # Longer than anybody wants to read; what came of it is gone.
                    continue
                if not line:
                    return
                take(line.decode(errors="replace").rstrip("\n"))
        finally:
            transport.close()

    def _renew(self) -> None:
        """When the nursery was killed, and with it its children, a new one takes its place."""
        if self._spawner.lost.is_set() and not self._stopping:
            spawner = Spawner(self._plan.preload, self._plan.env)
            spawner.start()
            self._spawner = spawner

    async def _stop(self) -> None:
        """SIGTERM to all, gateways and stages alike; SIGKILL to whatever is left when the bound has passed."""
        children = [kept.child for kept in self._kept.values() if kept.child is not None]
        with contextlib.suppress(NurseryLostError):
            for child in children:
                await child.signal(signal.SIGTERM)
        if children:
            await asyncio.wait([child.ended for child in children], timeout=STOP_SECONDS)


def _how(status: int) -> str:
    if status >= 0:
        return f"exit status {status}"
    known = {number.value for number in signal.Signals}
    return f"killed by {signal.Signals(-status).name if -status in known else f'signal {-status}'}"


def _close(descriptor: int) -> None:
    if descriptor >= 0:
        os.close(descriptor)


def failures(error: BaseExceptionGroup[BaseException]) -> list[ProcessFailedError]:
    """The processes that ended before they were ready."""
    found: list[ProcessFailedError] = []
    for each in error.exceptions:
        if isinstance(each, BaseExceptionGroup):
            found.extend(failures(each))
        elif isinstance(each, ProcessFailedError):
            found.append(each)
    return found
