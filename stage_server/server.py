"""``stage-server``: one replica of one stage. Joins a coordinator, builds what it is told to, and serves it."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import secrets
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

import grpc
import uvloop
from prometheus_client import CollectorRegistry

from omni.rpc import logs, tracing
from omni.rpc.address import check_address
from omni.rpc.channel import make_channel
from omni.rpc.command import add_logs, add_tls, argument, whole_number
from omni.rpc.duration import seconds_of
from omni.rpc.errors import OmniError, Reason
from omni.rpc.metrics import serve_metrics
from omni.rpc.server import make_server
from omni.rpc.spec import spec_hash
from omni.rpc.tls import TlsFiles
from omni.v1 import cluster_pb2, cluster_pb2_grpc, config_pb2, stage_pb2, stage_pb2_grpc, tensor_pb2
from stage_server import checkpoint, models
from stage_server.device import limit_threads
from stage_server.loader import Loader
from stage_server.metrics import StageMetrics
from stage_server.service.host import StageHost
from stage_server.service.servicer import StageServicer
from stage_server.transport.arena import Arena
from stage_server.transport.reader import ArenaDoor, Reader, host_id

SERVICE = "omni.v1.StageService"
_DRAIN_SECONDS = 5.0
"""For runs to end and for what they published to be read."""
_CANCEL_SECONDS = 1.0
_LEAVE_SECONDS = 1.0
"""For the coordinator to read what was said last."""
_CLOSE_SECONDS = 0.5
"""For streams to end by themselves."""
_FIRST_BACKOFF, _LONGEST_BACKOFF = 0.2, 5.0

_log = logs.get(__name__)


_FINAL = frozenset(
    {Reason.REPLACED, Reason.BAD_REQUEST, Reason.UNKNOWN_MODEL, Reason.NOT_FOUND, Reason.UNIMPLEMENTED}
    | {Reason.UNAUTHENTICATED, Reason.PERMISSION_DENIED}
)
"""Ends of a Join stream that another one would have too; after all others it is joined anew."""


class StageServer:
    """One replica, from its start to its end.

    It listens first, since its address is part of how it joins; its spec comes with the first Join. Until the engine
    has started, health says NOT_SERVING and runs are refused.
    """

    def __init__(self, options: argparse.Namespace, loader: Loader) -> None:
        self._options = options
        self._loader = loader
        self._name = f"{options.model}/{options.stage}/{options.index}"
        epoch = secrets.randbits(63) + 1
        self._address = tensor_pb2.ReplicaAddress(
            replica=self._name, epoch=epoch, host_id=host_id(), arena_socket=f"omni-arena-{os.getpid()}-{epoch:016x}"
        )
        self._registry = CollectorRegistry()
        tls = TlsFiles(options.tls_ca, options.tls_cert, options.tls_key) if options.tls_ca else None
        self._client_tls = tls.client() if tls else None
        self._server = make_server(registry=self._registry, tls=tls.server() if tls else None, service_names=(SERVICE,))
        self._servicer = StageServicer()
        self._server.add(stage_pb2_grpc.add_StageServiceServicer_to_server, self._servicer)
        self._stopping = asyncio.Event()
        self._changed = asyncio.Event()
        """There is something to tell the coordinator."""
        self._judged = asyncio.Event()
        """What health says may be another."""
        self._spec: config_pb2.StageSpec | None = None
        self._joined = False
        self._away = ""
        """Why the coordinator is away, as far as that was said."""
        self._leaving = False
        self._arena: Arena | None = None
        self._reader: Reader | None = None

    async def run(self) -> None:
        """Returns after SIGTERM or SIGINT, when its runs have ended or their time to do so has passed.

        Raises:
            ExceptionGroup: with the OmniError or OSError that ended it.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stopping.set)
        options = self._options
        port = await self._server.start(options.listen)
        self._address.target = f"{options.advertise or options.listen.rpartition(':')[0]}:{port}"
        metrics = None
        if options.metrics_port is not None:
            metrics = await serve_metrics(options.listen.rpartition(":")[0], options.metrics_port, self._registry)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._tend_health())
                membership = tasks.create_task(self._membership(tasks))
                await self._stopping.wait()
                await self._drain()
                self._leaving = True
                if self._joined:
                    self._changed.set()
                    await asyncio.wait([membership], timeout=_LEAVE_SECONDS)
                membership.cancel()
                raise _StoppedError
        except* _StoppedError:
            pass
        finally:
            await self._close()
            if metrics is not None:
                await metrics.close()

    async def _membership(self, tasks: asyncio.TaskGroup) -> None:
        """Holds a Join stream to the coordinator, and makes a new one when it breaks, until this process leaves."""
        backoff = _FIRST_BACKOFF
        async with make_channel(self._options.coordinator, tls=self._client_tls) as channel:
            while True:
                began = time.monotonic()
                try:
                    await self._join(channel, tasks)
                except grpc.aio.AioRpcError as error:
                    meant = OmniError.from_rpc_error(error)
                    if meant.reason in _FINAL:
                        raise meant from error
                    if meant.message != self._away:
                        self._away = meant.message
                        _log.warning("coordinator is away", coordinator=self._options.coordinator, error=self._away)
                if self._leaving:
                    return
                if time.monotonic() - began > _LONGEST_BACKOFF:
                    backoff = _FIRST_BACKOFF
                await asyncio.sleep(backoff)
                backoff = min(2 * backoff, _LONGEST_BACKOFF)

    async def _join(self, channel: grpc.aio.Channel, tasks: asyncio.TaskGroup) -> None:
        """One Join stream, until it ends.

        Raises:
            grpc.aio.AioRpcError: how it ended.
            OmniError: when the coordinator wants another stage built than this process holds.
        """
        options = self._options
        call = cluster_pb2_grpc.ClusterServiceStub(channel).Join()
        hello = cluster_pb2.ReplicaHello(
            model=options.model, stage=options.stage, index=options.index, address=self._address, pid=os.getpid()
        )
        reporter: asyncio.Task[None] | None = None
        try:
            with contextlib.suppress(asyncio.InvalidStateError):  # It has ended already: reading says why.
                await call.write(cluster_pb2.JoinRequest(hello=hello))
            answer = await call.read()
            if isinstance(answer, cluster_pb2.JoinResponse):
                self._take_spec(answer.spec, tasks)
                reporter = asyncio.create_task(self._report(call, answer.report_interval))
                self._joined, self._away = True, ""
                await call.read()  # Nothing follows: this returns when the stream ends.
        finally:
            self._joined = False
            call.cancel()
            if reporter is not None:
                reporter.cancel()
                await asyncio.wait([reporter])
                if not reporter.cancelled():
                    reporter.result()

    async def _report(self, call: grpc.aio.StreamStreamCall[Any, Any], interval: float) -> None:
        """Says how the replica does: at each change of state, and at least every `interval` seconds. Leaving, it ends
        its half of the stream: the coordinator ends the other when it has read all that this replica has said."""
        try:
            while not self._leaving:
                self._changed.clear()
                host = self._servicer.host
                load = host.load() if host else stage_pb2.ReplicaLoad(state=stage_pb2.REPLICA_STATE_LOADING)
                await call.write(cluster_pb2.JoinRequest(load=load))
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), interval)
            await call.done_writing()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return  # The stream has ended; who reads it says why.
        except Exception:
            call.cancel()  # A member that says nothing more of itself is none.
            raise

    async def _tend_health(self) -> None:
        """Has the health service say what the host thinks, whether a coordinator listens or not."""
        while True:
            self._judged.clear()
            host = self._servicer.host
            serving = host is not None and host.state == stage_pb2.REPLICA_STATE_READY
            for service in (SERVICE, ""):
                await self._server.health.set_serving(service, serving)
            await self._judged.wait()

    def _take_spec(self, spec: config_pb2.StageSpec, tasks: asyncio.TaskGroup) -> None:
        if self._spec is None:
            self._spec = spec
            tasks.create_task(self._build(spec, tasks))
        elif spec_hash(self._spec) != spec_hash(spec):
            raise OmniError(Reason.STAGE_FAILED, "the coordinator has another spec now; this process must restart")

    async def _build(self, spec: config_pb2.StageSpec, tasks: asyncio.TaskGroup) -> None:
        """Makes the host and starts its engine: libraries and weights take minutes."""
        began = time.monotonic()
        engine = await self._loader.call(lambda: models.build(checkpoint.located(spec)))
        self._arena = Arena(
            self._name, self._address.epoch, spec.arena_bytes, seconds_of(spec.lease), checksum=spec.checksum
        )
        self._reader = Reader(self._arena, self._registry, self._client_tls)
        metrics = StageMetrics(self._registry, spec.model, spec.stage)
        host = StageHost(spec, self._address, engine, arena=self._arena, reader=self._reader, metrics=metrics)
        host.on_state = self._state_changed
        metrics.watch(host)
        self._servicer.host = host
        tasks.create_task(ArenaDoor(self._arena, self._address.arena_socket).serve())
        await self._loader.call(host.start)
        host.ready()
        _log.info("ready", seconds=round(time.monotonic() - began, 2), target=self._address.target)

    def _state_changed(self) -> None:
        self._changed.set()
        self._judged.set()

    async def _drain(self) -> None:
        """Lets the runs end and their tensors be read for a while, then ends what is left; then ends the streams."""
        host = self._servicer.host
        if host is None:
            return
        try:
            await asyncio.wait_for(host.drain(), _DRAIN_SECONDS)
        except TimeoutError:
            host.give_up()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(host.finish(), _CANCEL_SECONDS)
        host.end_sessions()

    async def _close(self) -> None:
        await self._server.stop(_CLOSE_SECONDS)
        host = self._servicer.host
        if host is not None:
            host.close()
            await asyncio.to_thread(host.engine.stop)
        if self._reader is not None:
            await self._reader.close()
        if self._arena is not None:
            self._arena.close()


class _StoppedError(Exception):
    """Ends the server's task group when it was told to stop."""


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line of ``stage-server``."""
    parser = argparse.ArgumentParser(prog="stage-server", description="Serves one replica of one stage of a model.")
    address = argument(check_address)
    parser.add_argument("--coordinator", type=address, required=True, metavar="HOST:PORT", help="omnid's gRPC address")
    parser.add_argument("--model", required=True, help="name under which the pipeline is served")
    parser.add_argument("--stage", required=True, help="name of the stage in its pipeline")
    parser.add_argument(
        "--index", type=argument(whole_number(0, 1023)), default=0, help="which of the stage's replicas"
    )
    parser.add_argument(
        "--listen", type=address, default="127.0.0.1:0", metavar="HOST:PORT", help="port 0: the system chooses"
    )
    parser.add_argument("--advertise", metavar="HOST", help="host by which others reach it; default: where it listens")
    port = argument(whole_number(0, 65535))
    parser.add_argument("--metrics-port", type=port, metavar="PORT", help="serves /metrics; 0: the system chooses")
    add_tls(parser, ca="speak mutual TLS, and check peers against this")
    add_logs(parser)
    options = parser.parse_args(arguments)
    if len({bool(options.tls_ca), bool(options.tls_cert), bool(options.tls_key)}) > 1:
        parser.error("--tls-ca, --tls-cert and --tls-key go together")
    return options


def main() -> int:
    """Runs until it is told to stop; exit status 1 with the reason as the last line when it cannot go on."""
    options = parse()
    name = f"{options.model}/{options.stage}/{options.index}"
    logs.configure(options.log_format, options.log_level, replica=name)
    tracing.configure("stage-server")
    limit_threads()

    loader = Loader()

    async def serve() -> None:
        await StageServer(options, loader).run()

    status = 0
    try:
        uvloop.run(serve())
    except (OmniError, OSError, BaseExceptionGroup) as error:
        causes = _leaves(error)
        for cause in causes:
            if not isinstance(cause, (OmniError, OSError)):
                _log.error("unexpected error", exc_info=cause)
        print(f"stage-server {name}: {causes[0]}", file=sys.stderr, flush=True)
        status = 1
    if loader.busy:
        os._exit(status)  # The interpreter must not be taken down under a thread that reads a model.
    return status


def _leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for each in error.exceptions for leaf in _leaves(each)]
    return [error]


if __name__ == "__main__":
    sys.exit(main())
