"""The channel factory: retries of idempotent calls, keepalive that the server takes, TLS by files that change."""

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path

import grpc
import pytest
import trustme

from omni.rpc import options, reloading
from omni.rpc.channel import make_channel
from omni.rpc.errors import OmniError, Reason
from omni.rpc.tls import ClientTls, ServerTls, channel_credentials
from omni.v1 import generate_pb2, generate_pb2_grpc
from tests.contract.rpc_echo import Echo, request, running


async def list_models(channel: grpc.aio.Channel) -> None:
    await generate_pb2_grpc.OmniServiceStub(channel).ListModels(generate_pb2.ListModelsRequest(), timeout=10)


async def refused(channel: grpc.aio.Channel) -> bool:
    """Whether the connection itself is refused."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await generate_pb2_grpc.OmniServiceStub(channel).Generate(request(), timeout=10).read()
    return OmniError.from_rpc_error(caught.value).reason is Reason.UNREACHABLE


async def test_an_idempotent_call_is_made_again_and_another_is_not():
    calls = []

    async def at_the_third(_request, _context):
        calls.append("list")
        if len(calls) < 3:
            raise OmniError(Reason.NO_REPLICA, "not yet")
        return generate_pb2.ListModelsResponse()

    async def never(_request, _context):
        calls.append("generate")
        raise OmniError(Reason.NO_REPLICA, "not yet")
        yield

    async with running(Echo(on_list=at_the_third, on_generate=never)) as it:
        await list_models(it.channel)
        with pytest.raises(grpc.aio.AioRpcError):
            await it.stub.Generate(request(), timeout=10).read()
    assert calls == ["list", "list", "list", "generate"]


class Wire:
    """Relays one server's connections and counts the pings that its clients send."""

    def __init__(self, target: str) -> None:
        self.host, self.port = target.rsplit(":", 1)
        self.connections = 0
        self.pings = 0
        self.counted = asyncio.Condition()
        self.ended = asyncio.Event()

    async def relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        behind_reader, behind_writer = await asyncio.open_connection(self.host, int(self.port))
        async with asyncio.TaskGroup() as group:
            group.create_task(self.frames(reader, behind_writer))
            group.create_task(self.bytes(behind_reader, writer))

    async def frames(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            writer.write(await reader.readexactly(24))
            while True:
                head = await reader.readexactly(9)
                writer.write(head + await reader.readexactly(int.from_bytes(head[:3], "big")))
                await writer.drain()
                if (head[3], head[4]) == (6, 0):
                    async with self.counted:
                        self.pings += 1
                        self.counted.notify_all()
        writer.close()

    async def bytes(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        self.ended.set()
        writer.close()


@contextlib.asynccontextmanager
async def wired(monkeypatch: pytest.MonkeyPatch, keepalive_s: float, least_s: float):
    """A server behind a `Wire`, and a channel that is connected through it, with a keepalive pair as given."""
    monkeypatch.setattr(options, "KEEPALIVE_S", keepalive_s)
    monkeypatch.setattr(options, "MIN_PING_INTERVAL_S", least_s)
    async with running(Echo()) as it:
        wire = Wire(it.address)
        front = await asyncio.start_server(wire.relay, "localhost", 0)
        async with front, make_channel(f"localhost:{front.sockets[0].getsockname()[1]}") as channel:
            await list_models(channel)
            yield wire, channel
        await asyncio.wait_for(wire.ended.wait(), 10)


async def test_keepalive_pings_of_an_idle_channel_are_taken(monkeypatch):
    factor = options.KEEPALIVE_S / options.MIN_PING_INTERVAL_S
    async with wired(monkeypatch, 0.1, 0.1 / factor) as (wire, channel):
        async with asyncio.timeout(20), wire.counted:
            await wire.counted.wait_for(lambda: wire.pings >= 5)
        assert not wire.ended.is_set()
        await list_models(channel)
        assert wire.connections == 1


async def test_a_server_that_does_not_expect_the_pings_would_cut_the_channel(monkeypatch):
    async with wired(monkeypatch, 0.1, 3600) as (wire, _channel):
        await asyncio.wait_for(wire.ended.wait(), 20)
        assert wire.pings < 5


class Files:
    """A CA and the files of a server and of a client that it signed, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.ca_file, self.other = folder / "ca.pem", folder / "other.pem"
        self.server = ServerTls(folder / "server.pem", folder / "server.key", self.ca_file)
        self.client = ClientTls(self.ca_file, folder / "client.pem", folder / "client.key")
        trustme.CA().cert_pem.write_to_path(self.other)
        self.rotate()

    def rotate(self) -> None:
        """Replaces everything, by another CA's."""
        ca = trustme.CA()
        ca.cert_pem.write_to_path(self.ca_file)
        for tls, certificate in (
            (self.server, ca.issue_cert("localhost", "127.0.0.1")),
            (self.client, ca.issue_cert("client")),
        ):
            assert tls.cert and tls.key
            certificate.private_key_pem.write_to_path(tls.key)
            certificate.cert_chain_pems[0].write_to_path(tls.cert)


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


async def test_tls_serves_those_who_trust_it_and_nobody_in_plain_text(files: Files):
    async with running(Echo(), tls=ServerTls(files.server.cert, files.server.key)) as it:
        async with make_channel(it.address, tls=ClientTls(files.ca_file)) as channel:
            await list_models(channel)
        async with make_channel(it.address, tls=ClientTls(files.other)) as channel:
            assert await refused(channel)
        assert await refused(it.channel)


async def test_mutual_tls_refuses_a_client_without_a_certificate(files: Files):
    async with running(Echo(), tls=files.server, client_tls=files.client) as it:
        await list_models(it.channel)
        async with make_channel(it.address, tls=ClientTls(files.ca_file)) as channel:
            assert await refused(channel)


async def test_files_that_are_replaced_serve_new_connections_while_old_streams_go_on(files: Files, monkeypatch):
    monkeypatch.setattr(reloading, "LOOK_AGAIN_S", 0.0)

    async def echo(requests, stream):
        async for message in requests:
            await stream.write(generate_pb2.OmniServiceAttachResponse(events=[{"request": message.credits[0]}]))

    async with running(Echo(on_attach=echo), tls=files.server, client_tls=files.client) as it:
        old = it.stub.Attach(timeout=30)
        await old.write(generate_pb2.OmniServiceAttachRequest(credits=[1]))
        assert (await old.read()).events[0].request == 1
        before = it.channel.current()

        files.rotate()
        await list_models(it.channel)
        assert it.channel.current() is not before
        async with make_channel(it.address, tls=files.client) as channel:
            await list_models(channel)
        async with make_channel(it.address, tls=ClientTls(files.other)) as channel:
            assert await refused(channel)

        await old.write(generate_pb2.OmniServiceAttachRequest(credits=[2]))
        assert (await old.read()).events[0].request == 2
        await old.done_writing()
        assert await old.read() is grpc.aio.EOF


async def test_a_rotation_that_is_half_done_leaves_the_last_good_files_in_use(files: Files, monkeypatch):
    monkeypatch.setattr(reloading, "LOOK_AGAIN_S", 0.0)
    async with running(Echo(), tls=files.server, client_tls=files.client) as it:
        before = it.channel.current()
        assert files.client.cert
        server_key, client_cert = files.server.key.read_bytes(), files.client.cert.read_bytes()
        files.server.key.write_bytes(b"")
        files.client.cert.unlink()
        await list_models(it.channel)
        assert it.channel.current() is before
        files.client.cert.write_bytes(client_cert)
        async with make_channel(it.address, tls=files.client) as channel:
            await list_models(channel)
        files.server.key.write_bytes(server_key)


def test_files_that_do_not_fit_together_are_an_error_that_names_them(files: Files):
    assert files.client.cert
    wrong = ClientTls(files.ca_file, files.client.cert, files.server.key)
    with pytest.raises(OSError, match=str(files.server.key)):
        channel_credentials(wrong)
    with pytest.raises(ValueError, match="both its cert and its key"):
        ClientTls(files.ca_file, files.client.cert)


FROZEN = """
import asyncio
from prometheus_client import CollectorRegistry
from omni.rpc.server import make_server
async def main():
    server = make_server(registry=CollectorRegistry())
    print(await server.start("127.0.0.1:0"), flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


async def test_a_frozen_server_is_given_up_soon_after_it_should_have_answered(monkeypatch):
    monkeypatch.setattr(options, "KEEPALIVE_S", 1.0)
    monkeypatch.setattr(options, "KEEPALIVE_TIMEOUT_S", 1.0)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", FROZEN, stdout=asyncio.subprocess.PIPE, env={**os.environ, "PYTHONPATH": "protos"}
    )
    try:
        port = int(await asyncio.wait_for(process.stdout.readline(), 30))
        async with make_channel(f"127.0.0.1:{port}") as channel:
            await asyncio.wait_for(channel.channel_ready(), 10)
            process.send_signal(signal.SIGSTOP)
            call = generate_pb2_grpc.OmniServiceStub(channel).Generate(request())
            async with asyncio.timeout(20):  # without a bound of its own on the ping's answer: a minute
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call.read()
        assert OmniError.from_rpc_error(caught.value).reason is Reason.UNREACHABLE
    finally:
        process.kill()
        await process.wait()
