"""The launcher's side of the nursery: starts it, orders children, and hears how they end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omnid.launcher.plan import ProcessPlan

_PROGRAM = Path(__file__).with_name("nursery.py")
_PACKET = 1 << 18
KILLED = -int(signal.SIGKILL)


class NurseryLostError(Exception):
    """The nursery has died, and with it all of its children."""


class Child:
    """A process of the cluster and the head of its process group."""

    def __init__(self, pid: int, spawner: Spawner) -> None:
        self.pid = pid
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        """Its status, as `subprocess.Popen.returncode` has it."""
        self._spawner = spawner

    async def signal(self, number: signal.Signals) -> None:
        """Signals the process itself, not its group; nothing happens when it has ended."""
        if not self.ended.done():
            await self._spawner._send({"order": "signal", "pid": self.pid, "signal": int(number)})


class Spawner:
    """Owns one nursery. All calls belong on the loop that `start` ran on."""

    def __init__(self, preload: Sequence[str], env: Mapping[str, str]) -> None:
        self._preload = tuple(preload)
        self._env = dict(env)
        self._ids = 0
        self._starting: dict[int, asyncio.Future[Child]] = {}
        self._children: dict[int, Child] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._sending = asyncio.Lock()
        self.lost = asyncio.Event()
        """Set when the nursery has ended."""

    def start(self) -> None:
        """Starts the nursery, as a program of its own in a group of its own.

        Raises:
            OSError: this host has no room for another process.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        try:
            self._process = subprocess.Popen(
                [sys.executable, str(_PROGRAM), str(theirs.fileno()), *self._preload],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **self._env},
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        self._socket = ours
        asyncio.get_running_loop().add_reader(ours.fileno(), self._receive)

    async def spawn(self, plan: ProcessPlan, output: int, ready: int | None = None) -> Child:
        """Starts a process that writes to the descriptor `output`; both descriptors stay the caller's to close.

        Raises:
            NurseryLostError: the nursery is gone.
            OSError: this host has no room for another process.
        """
        self._ids += 1
        number = self._ids
        started: asyncio.Future[Child] = asyncio.get_running_loop().create_future()
        self._starting[number] = started
        order: dict[str, Any] = {"order": "start", "id": number, "arguments": plan.arguments, "env": dict(plan.env)}
        if plan.copied:
            order["target"] = plan.target
        else:
            order["argv"] = program(plan.target)
        order["ready"] = ready is not None
        try:
            await self._send(order, [output] if ready is None else [output, ready])
            return await started
        finally:
            self._starting.pop(number, None)

    async def stop(self, within: float) -> None:
        """Ends the nursery, which kills whatever still runs; after `within` seconds it is killed itself."""
        if self._process is None:
            return
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_WR)
        try:
            async with asyncio.timeout(within):
                await self.lost.wait()
        except TimeoutError:
            self._process.kill()
            await self.lost.wait()

    async def _send(self, order: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
        packet = json.dumps(order).encode()
        async with self._sending:
            while True:
                if self._socket is None:
                    raise NurseryLostError("the nursery has ended")
                try:
                    socket.send_fds(self._socket, [packet], list(descriptors))
                except BlockingIOError:
                    await _writable(self._socket)
                except OSError:
                    raise NurseryLostError("the nursery has ended") from None
                else:
                    return

    def _receive(self) -> None:
        assert self._socket is not None
        while True:
            try:
                packet = self._socket.recv(_PACKET)
            except BlockingIOError:
                return
            except ConnectionError:
                packet = b""
            if not packet:
                self._end()
                return
            report = json.loads(packet)
            match report["report"]:
                case "started":
                    child = self._children[report["pid"]] = Child(report["pid"], self)
                    started = self._starting.get(report["id"])
                    if started is not None and not started.done():
                        started.set_result(child)
                case "refused":
                    started = self._starting.get(report["id"])
                    if started is not None and not started.done():
                        started.set_exception(OSError(report["errno"], os.strerror(report["errno"])))
                case "ended":
                    child = self._children.pop(report["pid"])
                    child.ended.set_result(report["status"])

    def _end(self) -> None:
        """The nursery is gone. Its children die with it by their parent-death signal; their own children do not."""
        assert self._socket is not None
        assert self._process is not None
        asyncio.get_running_loop().remove_reader(self._socket.fileno())
        self._socket.close()
        self._socket = None
        self._process.wait()
        for started in self._starting.values():
            if not started.done():
                started.set_exception(NurseryLostError("the nursery has ended"))
        for child in self._children.values():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGKILL)
            child.ended.set_result(KILLED)
        self._children.clear()
        self.lost.set()


def program(target: str) -> list[str]:
    """The command that runs a target as a program of its own."""
    module, _, function = target.partition(":")
    return [sys.executable, "-c", f"import sys; from {module} import {function}; sys.exit({function}())"]


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


async def _writable(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    loop.add_writer(sock.fileno(), _set, ready)
    try:
        await ready
    finally:
        loop.remove_writer(sock.fileno())
