"""The thread that owns an engine's model and runs."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import torch

STOP_SECONDS = 30.0
"""How long `stop` waits for the step at work."""


class EngineThread:
    """Takes turns until it is stopped. Other threads talk to it through a mailbox of calls, which a turn reads.

    Args:
        name: of the thread, for debuggers.
        turn: one step and what belongs to it; raises nothing.
    """

    def __init__(self, name: str, turn: Callable[[], None]) -> None:
        self._name = name
        self._turn = turn
        self._mailbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._stopping = False
        self.idle = True
        """It waits for a call, since its last turn found nothing to do. Read by other threads."""

    def start(self) -> None:
        """Begins to take turns."""
        self._thread = threading.Thread(target=self._loop, name=self._name, daemon=True)
        self._thread.start()

    def put(self, call: Callable[[], None]) -> None:
        """Has a call made in the thread, after those put in before; from any thread."""
        self._mailbox.put(call)

    def read(self, *, wait: bool) -> None:
        """Makes the calls that are in the mailbox, in the thread itself; waits for one when there is none to make."""
        if wait:
            self.idle = True
            call = self._mailbox.get()
            self.idle = False
            call()
        while not self._mailbox.empty():  # This thread alone takes from it.
            self._mailbox.get_nowait()()

    def stop(self) -> bool:
        """Ends it after the turn at work; False: it never began."""
        self._mailbox.put(self._end)
        if self._thread is None:
            return False
        self._thread.join(STOP_SECONDS)
        return True

    def _end(self) -> None:
        self._stopping = True

    def _loop(self) -> None:
        with torch.inference_mode():
            while not self._stopping:
                self._turn()
