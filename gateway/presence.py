"""Work for an HTTP client, ended when the client hangs up."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

from omni.rpc.errors import OmniError, Reason

Result = TypeVar("Result")


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`, which is cancelled when the client hangs up or the caller is cancelled.

    Args:
        receive: of the request, whose body has been read: what still comes is the end of the connection.
        work: runs in a task of its own.

    Raises:
        OmniError: CANCELLED, when the client hung up first.
    """
    working = asyncio.create_task(work)
    gone = asyncio.create_task(_hung_up(receive))
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise OmniError(Reason.CANCELLED, "the client hung up")
        return working.result()
    finally:
        working.cancel()
        gone.cancel()
        await asyncio.wait((working, gone))


async def _hung_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
