"""The client for scripts: a private cluster, and calls that block."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import CancelledError, Future
from types import TracebackType
from typing import Any, Self

import uvloop

from omni.v1 import content_pb2
from omnid.client.asynchronous import AsyncOmni
from omnid.client.types import Generation, Params
from omnid.launcher.deployment import prepare
from omnid.launcher.local import local_cluster

Prompt = str | Sequence[content_pb2.ChatMessage]


class Omni:
    """Starts the cluster of a deployment on this host, without a gateway, and stops it when it is closed.

    >>> with Omni("demo") as omni:
    ...     answer = omni.generate("tiny-omni", "What is two plus three?", outputs=["text", "audio"])

    Args:
        deploy: name of a shipped deployment, or path of a file.
        overrides: as on the command line, "models.tiny-omni.stages.thinker.max_running=4".
        ready_seconds: how long it may take until every stage serves.

    Raises:
        ConfigError, ProcessFailedError, OmniError: when it cannot be started.
    """

    def __init__(self, deploy: str, *, overrides: Sequence[str] = (), ready_seconds: float = 300.0) -> None:
        config, self._pipelines = prepare(deploy, overrides)
        self._tls = config.tls_files()
        self._ready_seconds = ready_seconds
        self._loop = uvloop.new_event_loop()
        self._close = asyncio.Event()
        self._up = threading.Event()
        self._failure: BaseException | None = None
        self._lock = threading.Lock()
        self._client: AsyncOmni | None = None
        """None before and after the time in which calls are taken; changed under the lock, as calls are made."""
        self._calls: set[Future[Any]] = set()
        self._thread = threading.Thread(target=self._run, name="omni", daemon=True)
        self._thread.start()
        try:
            self._up.wait()
        except BaseException:
            self.close()
            raise
        if self._failure is not None:
            self._thread.join()
            raise self._failure

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.close()

    def generate(
        self,
        model: str,
        prompts: Prompt | list[Prompt],
        *,
        outputs: Sequence[str] = (),
        params: Params | None = None,
        progress: bool = True,
    ) -> Generation | list[Generation]:
        """The answer to one prompt, or to a list of prompts at once, in their order.

        Raises:
            OmniError: the first failure; the other requests are then cancelled.
            RuntimeError: the cluster is closed, or is while they are at work.
        """
        many = isinstance(prompts, list)
        asked: list[Prompt] = prompts if isinstance(prompts, list) else [prompts]
        shown = progress and sys.stderr.isatty()
        with self._lock:
            if self._client is None:
                raise self._ended()
            work = self._all(self._client, model, asked, outputs, params, shown)
            call = asyncio.run_coroutine_threadsafe(work, self._loop)
            self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        try:
            answers = call.result()
        except CancelledError:
            raise self._ended() from self._failure
        finally:
            call.cancel()  # Of a caller that was interrupted.
        return answers if many else answers[0]

    def close(self) -> None:
        """Stops the cluster and ends what is at work; returns when its processes have ended. Any thread may call it."""
        with contextlib.suppress(RuntimeError):  # It has ended.
            self._loop.call_soon_threadsafe(self._close.set)
        self._thread.join()

    def _ended(self) -> RuntimeError:
        return RuntimeError(f"the cluster has ended: {self._failure}" if self._failure else "the cluster is closed")

    async def _all(
        self,
        client: AsyncOmni,
        model: str,
        prompts: Iterable[Prompt],
        outputs: Sequence[str],
        params: Params | None,
        progress: bool,
    ) -> list[Generation]:
        from rich.console import Console
        from rich.progress import Progress

        with contextlib.ExitStack() as stack:
            bar = stack.enter_context(Progress(console=Console(stderr=True), disable=not progress))
            asked = list(prompts)
            row = bar.add_task(model, total=len(asked))

            async def one(prompt: Prompt) -> Generation:
                answer = await client.generate(model, prompt, outputs=outputs, params=params)
                bar.advance(row)
                return answer

            try:
                async with asyncio.TaskGroup() as tasks:
                    running = [tasks.create_task(one(prompt)) for prompt in asked]
            except BaseExceptionGroup as group:
                raise group.exceptions[0] from None
            return [task.result() for task in running]

    def _run(self) -> None:
        """The thread's life."""
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            try:
                runner.run(self._serve())
            except BaseException as error:
                self._failure = error
            finally:
                self._up.set()

    async def _serve(self) -> None:
        """Cluster up, calls of other threads, cluster down."""
        async with (
            local_cluster(self._pipelines, grpc="127.0.0.1:0", http=None, tls=self._tls) as cluster,
            AsyncOmni(cluster.grpc, tls=self._tls.client() if self._tls else None) as client,
        ):
            closing = asyncio.create_task(self._close.wait())
            ready = asyncio.create_task(cluster.ready(self._ready_seconds))
            try:
                await asyncio.wait((closing, ready), return_when=asyncio.FIRST_COMPLETED)
                if not closing.done():
                    await ready
                    self._client = client
                    self._up.set()
                    await closing
            finally:
                ready.cancel()
                closing.cancel()
                self._take_no_more()

    def _take_no_more(self) -> None:
        with self._lock:
            self._client = None
            calls = list(self._calls)
        for call in calls:
            call.cancel()
