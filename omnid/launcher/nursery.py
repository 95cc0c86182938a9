"""The process that all others of a cluster are children of. Run as a program, on the standard library alone.

It forks what it is told to, and it is what makes sure that nothing outlives its cluster:

* it is killed itself: the kernel kills its children (parent-death signal), the launcher kills what is left of their
  process groups;
* the launcher dies: this process sees the end of its socket, kills every group and ends;
* a child dies: this process kills what is left of the child's group and says how it ended.

Stage servers start as copies of it, so that what they share (the tensor library and the model code) is imported once
and its memory is counted once. That is sound only while this process has a single thread and has started neither gRPC
nor a device, so it starts none; if a library that it was told to import starts a thread, children are programs of
their own instead, which costs time and memory and nothing else.

Messages are JSON in packets of a Unix socket. Orders: {"order": "start", "id", "target" | "argv", "arguments", "env"}
with one descriptor for output and, when "ready" is true, a second that the child finds under number 3;
{"order": "signal", "pid", "signal"}. Reports: {"report": "started", "id", "pid"}, {"report": "refused",
"id", "errno"} when this host has no room for another process, and {"report": "ended", "pid", "status"} with the status
as in `subprocess.Popen.returncode`.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

READY_FD = 3
"""Where a child finds the descriptor that it writes its addresses to."""

_PACKET = 1 << 18
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Birth:
    """What a fresh child has to become."""

    order: dict[str, Any]
    descriptors: list[int]
    parent: int


class Nursery:
    """Owns its children: a pid stays valid until this object has reaped it."""

    def __init__(self, orders: socket.socket, preload: list[str]) -> None:
        self._orders = orders
        self._preload = preload
        self._children: set[int] = set()
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = os.pipe()
        for descriptor in (self._wake, self._woken):
            os.set_blocking(descriptor, False)
        self._selector.register(orders, selectors.EVENT_READ)
        self._selector.register(self._wake, selectors.EVENT_READ)

    def serve(self) -> Birth | None:
        """Obeys until the launcher is gone (None). In a new child: what it is to become."""
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._woken, warn_on_full_buffer=False)
        for stop in (signal.SIGINT, signal.SIGTERM):
            signal.signal(stop, signal.SIG_IGN)
        while True:
            # While there is something left to import, orders are only looked for, not waited for.
            for key, _ in self._selector.select(0 if self._preload else None):
                if key.fileobj is self._orders:
                    birth, open_ = self._obey()
                    if birth is not None or not open_:
                        return birth
                else:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wake, 4096)
            self._reap()
            if self._preload:
                self._import(self._preload.pop(0))

    def end(self) -> None:
        """Kills every child and what they started."""
        for pid in self._children:
            _kill_group(pid)

    def _obey(self) -> tuple[Birth | None, bool]:
        try:
            packet, descriptors, _, _ = socket.recv_fds(self._orders, _PACKET, 2)
        except ConnectionError:
            packet, descriptors = b"", []
        if not packet:
            return None, False
        order = json.loads(packet)
        if order["order"] == "signal":
            if order["pid"] in self._children:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(order["pid"], order["signal"])
            return None, True
        while "target" in order and self._preload:
            self._import(self._preload.pop(0))
        copied = "target" in order and _threads() == 1
        parent = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            for descriptor in descriptors:
                os.close(descriptor)
            self._report(report="refused", id=order["id"], errno=error.errno)
            return None, True
        if pid == 0:
            if "target" in order and not copied:
                module, _, function = order["target"].partition(":")
                call = f"import sys; from {module} import {function}; sys.exit({function}())"
                order["argv"] = [sys.executable, "-c", call]
            self._forget()
            return Birth(order, descriptors, parent), True
        self._children.add(pid)
        for descriptor in descriptors:
            os.close(descriptor)
        self._report(report="started", id=order["id"], pid=pid)
        return None, True

    def _forget(self) -> None:
        """In a child: lets go of what is the parent's."""
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        self._selector.close()
        self._orders.close()
        os.close(self._wake)
        os.close(self._woken)

    def _reap(self) -> None:
        while self._children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            if pid in self._children:
                self._children.discard(pid)
                _kill_group(pid)
                self._report(report="ended", pid=pid, status=os.waitstatus_to_exitcode(status))

    def _import(self, module: str) -> None:
        with contextlib.suppress(Exception):  # A child that cannot import it says so itself.
            importlib.import_module(module)
        # What was imported stays; collecting it again in each child would only copy its pages.
        gc.freeze()

    def _report(self, **report: Any) -> None:
        with contextlib.suppress(ConnectionError):
            self._orders.send(json.dumps(report).encode())


def _become(birth: Birth) -> NoReturn:
    """Turns this fresh child into what was ordered."""
    os.setsid()
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != birth.parent:
        os._exit(1)  # The parent died before the kernel was told to watch it.
    order = birth.order
    # Moved out of the way first, because what arrived may have the very numbers that are about to be taken.
    moved = [_above(descriptor, READY_FD) for descriptor in birth.descriptors]
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(moved[0], 1)
    os.dup2(moved[0], 2)
    if order.get("ready"):
        os.dup2(moved[1], READY_FD)
    for descriptor in {nothing, *moved} - {0, 1, 2, READY_FD}:
        os.close(descriptor)
    os.environ.update(order["env"])
    if "argv" in order:
        argv = [*order["argv"], *order["arguments"]]
        try:
            os.execvp(argv[0], argv)
        except OSError as error:
            sys.stderr.write(f"cannot run {argv[0]}: {error.strerror}\n")
            sys.stderr.flush()
            os._exit(127)
    module, _, function = order["target"].partition(":")
    sys.argv = [module, *order["arguments"]]
    sys.exit(getattr(importlib.import_module(module), function)())


def _above(descriptor: int, floor: int) -> int:
    if descriptor > floor:
        return descriptor
    import fcntl

    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, floor + 1)
    os.close(descriptor)
    return moved


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def main() -> None:
    """`nursery.py FD [MODULE ...]`: the socket's descriptor and what to import for the children."""
    nursery = Nursery(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:])
    birth = nursery.serve()
    if birth is None:
        nursery.end()
    else:
        _become(birth)


if __name__ == "__main__":
    main()
