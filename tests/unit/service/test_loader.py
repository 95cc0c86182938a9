"""Loading: off the loop, and nobody waits for what cannot be stopped."""

from __future__ import annotations

import asyncio
import contextlib
import threading

import pytest

from stage_server.loader import Loader


async def test_a_call_gives_what_its_function_returns_or_raises() -> None:
    loader = Loader()
    main = threading.get_ident()
    assert await loader.call(threading.get_ident) != main

    def broken() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await loader.call(broken)


def test_a_loop_ends_while_a_call_is_at_work() -> None:
    loader, gate, begun = Loader(), threading.Event(), threading.Event()

    def load() -> None:
        begun.set()
        gate.wait(60)

    async def told_to_stop() -> None:
        loading = asyncio.create_task(loader.call(load))
        await asyncio.sleep(0)
        assert begun.wait(60)
        loading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await loading

    asyncio.run(told_to_stop())
    assert loader.busy
    gate.set()
