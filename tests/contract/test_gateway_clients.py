"""Clients that go away, clients that read slowly, and a coordinator that goes away."""

import asyncio
import contextlib
import json
import socket

import httpx
import pytest
import trustme
from prometheus_client import CollectorRegistry, Counter

from gateway import protocol
from gateway.upstream import Upstream
from omni.rpc.channel import make_channel
from omni.rpc.errors import UnavailableError
from omni.rpc.tls import ClientTls, ServerTls
from omni.v1 import content_pb2, generate_pb2
from tests.contract.gateway_upstream import BOUND_S, Omni, gateway, gateway_at, hello, http, start_omni

BODY = {"model": "tiny-omni", "messages": [{"role": "user", "content": "hi"}]}


def raw_request(body: dict) -> bytes:
    content = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
    return head.encode() + content


def address(url: str) -> tuple[str, int]:
    host, port = url.removeprefix("http://").split(":")
    return host, int(port)


async def silent(turn):
    await turn.accept()
    await turn.cancelled.wait()


async def one_word(turn):
    await turn.accept()
    await turn.text("word")
    await turn.cancelled.wait()


async def test_a_client_that_hangs_up_before_the_first_output_cancels_its_request():
    for stream in (True, False):
        omni = Omni()
        omni.script = silent
        async with gateway(omni) as url:
            _reader, writer = await asyncio.open_connection(*address(url))
            writer.write(raw_request(BODY | {"stream": stream}))
            turn = await omni.turn()
            writer.transport.abort()
            await asyncio.wait_for(turn.cancelled.wait(), BOUND_S)


async def test_a_client_that_hangs_up_in_the_middle_of_its_stream_cancels_its_request():
    omni = Omni()
    omni.script = one_word
    async with gateway(omni) as url:
        reader, writer = await asyncio.open_connection(*address(url))
        writer.write(raw_request(BODY | {"stream": True}))
        await asyncio.wait_for(reader.readuntil(b"word"), BOUND_S)
        writer.transport.abort()
        turn = await omni.turn()
        await asyncio.wait_for(turn.cancelled.wait(), BOUND_S)


async def test_a_client_that_reads_nothing_holds_up_its_own_request_only():
    piece = "x" * 60_000

    async def script(turn):
        if turn.start.client_request_id != "slow":
            await hello(turn)
            return
        await turn.accept()
        for sent in range(10_000):
            if sent >= 2:
                await turn.credits.acquire()
            await turn.text(piece)

    omni = Omni()
    omni.script = script
    async with gateway(omni) as url:
        slow = socket.socket()
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(address(url))
        with contextlib.closing(slow), contextlib.suppress(TimeoutError):
            slow.sendall(raw_request(BODY | {"stream": True}).replace(b"Host: x", b"Host: x\r\nx-request-id: slow"))
            turn = await omni.turn()
            # It goes on until the buffers between here and there are full, and then it stands.
            while True:
                taken = turn.taken
                await omni.seen(lambda taken=taken: turn.taken > taken, within=0.5)
        assert turn.taken < 500, "the gateway took what its client did not"
        async with httpx.AsyncClient(base_url=url, timeout=BOUND_S) as client:
            answer = await client.post("/v1/chat/completions", json=BODY)
        assert answer.status_code == 200
        await asyncio.wait_for(turn.cancelled.wait(), BOUND_S)


async def test_a_client_that_stalls_for_too_long_is_given_up():
    piece = "x" * 60_000

    async def script(turn):
        await turn.accept()
        while not turn.cancelled.is_set():
            await turn.text(piece)
            acquired = asyncio.ensure_future(turn.credits.acquire())
            gone = asyncio.ensure_future(turn.cancelled.wait())
            await asyncio.wait((acquired, gone), return_when=asyncio.FIRST_COMPLETED)

    omni = Omni()
    omni.script = script
    async with gateway(omni, stalled_client_s=0.3) as url:
        slow = socket.socket()
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(address(url))
        with contextlib.closing(slow):
            slow.sendall(raw_request(BODY | {"stream": True}))
            turn = await omni.turn()
            await asyncio.wait_for(turn.cancelled.wait(), BOUND_S)


async def test_each_output_that_the_client_took_is_credited():
    async def script(turn):
        await turn.accept()
        for _ in range(20):
            await turn.text("x")
            await turn.credits.acquire()
        await turn.finish()

    omni = Omni()
    omni.script = script
    async with http(omni) as client:
        for stream in (True, False):
            answer = await client.post("/v1/chat/completions", json=BODY | {"stream": stream})
            assert answer.status_code == 200
    assert [turn.taken for turn in omni.turns] == [20, 20]


async def test_a_stream_that_has_nothing_to_say_sends_comments():
    omni = Omni()
    omni.script = silent
    async with gateway(omni, heartbeat_s=0.05, first_event_s=0.05) as url:
        reader, writer = await asyncio.open_connection(*address(url))
        writer.write(raw_request(BODY | {"stream": True}))
        answer = await asyncio.wait_for(reader.readuntil(b": still at work\n\n"), BOUND_S)
        assert answer.startswith(b"HTTP/1.1 200")
        writer.close()


async def test_a_stream_whose_coordinator_says_nothing_at_all_answers_under_the_sender_s_id():
    async def mute(_turn):
        pass

    omni = Omni()
    omni.script = mute
    async with (
        http(omni, heartbeat_s=0.05, first_event_s=0.05) as client,
        client.stream(
            "POST", "/v1/chat/completions", json=BODY | {"stream": True}, headers={"x-request-id": "mine"}
        ) as it,
    ):
        lines = it.aiter_lines()
        first = await asyncio.wait_for(anext(lines), BOUND_S)
    assert it.headers["x-request-id"] == "mine"
    assert '"id":"chatcmpl-mine"' in first


async def test_a_broken_stream_fails_its_requests_with_503_and_the_next_one_is_served():
    omni = Omni()
    omni.script = silent
    async with http(omni) as client:
        asked = asyncio.ensure_future(client.post("/v1/chat/completions", json=BODY))
        await omni.turn()
        omni.break_streams()
        lost = await asked
        assert lost.status_code == 503 and lost.json()["error"]["code"] == "coordinator_unreachable"
        assert "cannot be reached" in lost.json()["error"]["message"] and lost.headers["retry-after"]
        omni.script = hello
        async with asyncio.timeout(BOUND_S):
            while (await client.get("/ready")).status_code != 200:
                pass
        assert (await client.post("/v1/chat/completions", json=BODY)).status_code == 200
    assert len(omni.sessions) == 2


async def test_a_gateway_without_its_coordinator_lives_but_is_not_ready_and_finds_it_when_it_comes():
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        target = f"127.0.0.1:{reserved.getsockname()[1]}"
    async with gateway_at(target, attached=False) as url, httpx.AsyncClient(base_url=url, timeout=BOUND_S) as client:
        assert (await client.get("/health")).status_code == 200
        ready = await client.get("/ready")
        assert ready.status_code == 503 and target in ready.json()["missing"][0]
        answer = await client.post("/v1/chat/completions", json=BODY)
        assert answer.status_code == 503 and target in answer.json()["error"]["message"]
        server, _ = await start_omni(Omni(), target)
        try:
            async with asyncio.timeout(BOUND_S):
                while (await client.get("/ready")).status_code != 200:
                    pass
            assert (await client.post("/v1/chat/completions", json=BODY)).status_code == 200
        finally:
            await server.stop(0)


async def test_a_lost_event_is_an_error_and_no_shorter_answer():
    async def script(turn):
        await turn.accept()
        turn._index += 1
        await turn.text("late")
        await turn.finish()

    omni = Omni()
    omni.script = script
    async with http(omni) as client:
        answer = await client.post("/v1/chat/completions", json=BODY)
    assert answer.status_code == 500 and answer.json()["error"]["code"] == "sequence_broken"


async def test_a_picture_without_its_last_piece_is_an_error():
    async def script(turn):
        await turn.accept()
        await turn.output("dit", media=[content_pb2.MediaPiece(modality=content_pb2.MODALITY_IMAGE, data=b"x")])
        await turn.finish()

    omni = Omni()
    omni.script = script
    async with http(omni) as client:
        answer = await client.post("/v1/images/generations", json={"prompt": "x"})
    assert answer.status_code == 500 and "ended short" in answer.json()["error"]["message"]


async def test_streams_over_mutual_tls_serve_and_a_stranger_s_do_not(tmp_path):
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca")
    for name in ("127.0.0.1", "client"):
        certificate = authority.issue_cert(name)
        certificate.private_key_pem.write_to_path(tmp_path / f"{name}.key")
        certificate.cert_chain_pems[0].write_to_path(tmp_path / f"{name}.pem")
    files = ServerTls(tmp_path / "127.0.0.1.pem", tmp_path / "127.0.0.1.key", tmp_path / "ca")
    server, target = await start_omni(Omni(), tls=files)
    own = ClientTls(tmp_path / "ca", tmp_path / "client.pem", tmp_path / "client.key")
    try:
        async with gateway_at(target, tls=own) as url, httpx.AsyncClient(base_url=url, timeout=BOUND_S) as client:
            assert (await client.post("/v1/chat/completions", json=BODY)).status_code == 200
        stranger = ClientTls(tmp_path / "ca")
        async with (
            gateway_at(target, attached=False, tls=stranger) as url,
            httpx.AsyncClient(base_url=url, timeout=BOUND_S) as client,
        ):
            assert (await client.post("/v1/chat/completions", json=BODY)).status_code == 503
    finally:
        await server.stop(0)


async def test_urls_of_media_are_fetched_only_when_allowed_and_never_from_this_host():
    asked = []

    async def serve(reader, writer):
        asked.append(await reader.readline())
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/a.png"
        body = BODY | {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]}
        for allowed, says in ((False, "fetches no URLs"), (True, "not on the public internet")):
            async with http(Omni(), allow_media_urls=allowed) as client:
                answer = await client.post("/v1/chat/completions", json=body)
            assert answer.status_code == 400 and says in answer.json()["error"]["message"]
    assert asked == []


async def test_many_requests_share_one_stream_and_get_their_own_answers():
    async def script(turn):
        await turn.accept(f"req-{turn.start.client_request_id}")
        for letter in turn.start.client_request_id:
            await turn.text(letter)
        await turn.finish()

    omni = Omni()
    omni.script = script
    async with http(omni) as client:
        names = [f"name{number:03d}" for number in range(100)]
        answers = await asyncio.gather(
            *(client.post("/v1/chat/completions", json=BODY, headers={"x-request-id": name}) for name in names)
        )
    assert [answer.json()["choices"][0]["message"]["content"] for answer in answers] == names
    assert [answer.headers["x-request-id"] for answer in answers] == [f"req-{name}" for name in names]
    assert len(omni.sessions) == 1


POST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"


@pytest.mark.parametrize(
    "begin",
    [b"GET /health HTTP/1.1\r\nHost: x\r\n", b"GET /", POST + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n0\r\n"],
    ids=["headers", "path", "trailers"],
)
async def test_a_head_or_a_trailer_that_never_ends_is_refused(begin):
    piece = b"x-long: " + b"y" * 4096 + b"\r\n"
    async with gateway(Omni()) as url:
        reader, writer = await asyncio.open_connection(*address(url))
        writer.write(begin)
        answer = asyncio.create_task(reader.readline())
        sent = 0
        async with asyncio.timeout(BOUND_S):
            with contextlib.suppress(ConnectionError):
                while not answer.done():
                    writer.write(piece.replace(b"\r\n", b"") if begin == b"GET /" else piece)
                    sent += len(piece)
                    await writer.drain()
                    await asyncio.sleep(0)  # drain alone does not let the server read
            with contextlib.suppress(ConnectionError):
                assert b" 400 " in await answer
        assert sent < 16 * 2**20
        async with httpx.AsyncClient(base_url=url) as client:
            assert (await client.get("/health")).status_code == 200


async def test_a_long_head_within_the_bound_and_one_more_after_it_are_served():
    async with gateway(Omni()) as url, httpx.AsyncClient(base_url=url) as client:
        for _ in range(3):
            answer = await client.get("/health", headers={"x-long": "y" * 30_000})
            assert answer.status_code == 200


@pytest.mark.parametrize(
    "begin",
    [
        b"",
        b"GET /health HTTP/1.1\r\nHo",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{",
    ],
    ids=["nothing", "half a head", "half a body"],
)
async def test_a_client_that_stops_in_the_middle_of_a_request_is_hung_up_on(begin, monkeypatch):
    monkeypatch.setattr(protocol, "HEAD_SECONDS", 0.2)
    monkeypatch.setattr(protocol, "BODY_SECONDS", 0.2)
    async with gateway(Omni()) as url:
        reader, writer = await asyncio.open_connection(*address(url))
        writer.write(begin)
        assert await asyncio.wait_for(reader.read(), BOUND_S) == b""
        writer.close()


async def test_a_stream_whose_writer_fails_is_made_anew() -> None:
    omni = Omni()
    server, target = await start_omni(omni)
    attached: asyncio.Queue[bool] = asyncio.Queue()
    fenced = Counter("fenced", "", registry=CollectorRegistry())
    async with make_channel(target) as channel:
        upstream = Upstream(target, channel, fenced=fenced, changed=lambda: attached.put_nowait(upstream.attached))
        running = asyncio.create_task(upstream.run())
        try:
            async with asyncio.timeout(BOUND_S):
                assert await attached.get()
                call = upstream.start(generate_pb2.GenerateRequest(model="tiny-omni"))
                upstream._commands.append(None)  # What no message can hold.
                with pytest.raises(UnavailableError, match="writer has failed"):
                    while True:
                        await call.events()
                assert [await attached.get(), await attached.get()] == [False, True]
        finally:
            running.cancel()
            await asyncio.wait([running])
            await server.stop(0)
