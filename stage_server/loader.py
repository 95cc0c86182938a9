"""Calls that load a model: they block for minutes, and nothing can stop them."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class Loader:
    """Makes calls in a thread of its own, so that neither the event loop nor a process that ends waits for them, as
    both would for a thread of the loop's pool."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None

    @property
    def busy(self) -> bool:
        """A call is at work, whether or not somebody still waits for it."""
        return self._thread is not None and self._thread.is_alive()

    async def call(self, function: Callable[[], T]) -> T:
        """What the function returns or raises."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()

        def settle(result: T | None, error: BaseException | None) -> None:
            if done.done():
                return  # Nobody waits any more.
            if error is not None:
                done.set_exception(error)
            else:
                done.set_result(result)  # type: ignore[arg-type]  # what the function returned

        def work() -> None:
            result, failure = None, None
            try:
                result = function()
            except BaseException as error:
                failure = error
            with contextlib.suppress(RuntimeError):  # The loop is closed.
                loop.call_soon_threadsafe(settle, result, failure)

        self._thread = threading.Thread(target=work, name="loader", daemon=True)
        self._thread.start()
        return await done
