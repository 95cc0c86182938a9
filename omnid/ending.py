"""How commands end: by an error that a person can mend, or by a signal."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Coroutine, Iterator
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from omnid.config import DeployConfig


@contextlib.contextmanager
def plain_errors() -> Iterator[None]:
    """Errors that a person can mend, without a traceback: exit status 2 for what was written wrongly, else 1."""
    from omni.rpc import logs
    from omni.rpc.errors import OmniError
    from omnid.config import ConfigError
    from omnid.launcher.failure import BAD_OPTIONS, ProcessFailedError

    try:
        yield
    except (ConfigError, ProcessFailedError, OmniError, OSError) as error:
        logs.say(f"omnid: {error}")
        bad = isinstance(error, ConfigError) or (isinstance(error, ProcessFailedError) and error.status == BAD_OPTIONS)
        raise typer.Exit(BAD_OPTIONS if bad else 1) from None


@contextlib.contextmanager
def listening(config: DeployConfig, **options: str | None) -> Iterator[None]:
    """An address that is taken is told under the option, or the key of the deployment, that says it.

    Args:
        config: the deployment.
        options: by key in `listen`, the address of the command line that goes before that of `config`, or None.
    """
    from omni.rpc.address import ListenError
    from omnid.config import ConfigError, Place, Problem

    try:
        yield
    except ListenError as error:
        said = {key: given or getattr(config.listen, key) for key, given in options.items()}
        key = next(key for key, address in said.items() if address == error.address)
        if options[key]:
            raise ConfigError([Problem(Place(f"--{key}"), (), str(error))]) from None
        raise ConfigError([config.document.problem(("listen", key), str(error))]) from None


async def until_stopped() -> signal.Signals:
    """Returns the first SIGTERM or SIGINT. At the second this process ends at once, and with it, since nothing
    outlives its launcher, every process that it has started."""
    loop = asyncio.get_running_loop()
    stopped: asyncio.Future[signal.Signals] = loop.create_future()

    def hear(number: signal.Signals) -> None:
        if stopped.done():
            os.write(2, b"omnid: told to stop twice: ends at once\n")
            os._exit(128 + number)
        stopped.set_result(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, hear, number)
    return await stopped


async def unless_stopped(work: Coroutine[Any, Any, None]) -> None:
    """Does `work`, which a signal cancels: then the exit status says which."""
    stopped = asyncio.ensure_future(until_stopped())  # Listens before the work begins.
    working = asyncio.ensure_future(work)
    await asyncio.wait((working, stopped), return_when=asyncio.FIRST_COMPLETED)
    if stopped.done():
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        raise typer.Exit(128 + stopped.result())
    await working
