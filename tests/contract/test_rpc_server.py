"""The server factory: validation, request ids, deadlines, metrics, health, reflection, channelz, limits."""

import asyncio
import socket

import grpc
import pytest
from google.protobuf import descriptor_pb2
from grpc_channelz.v1 import channelz_pb2, channelz_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from prometheus_client import CollectorRegistry

from omni.rpc import context
from omni.rpc.channel import make_channel
from omni.rpc.errors import DeadlineExceededError, OmniError, Reason
from omni.rpc.server import make_server
from omni.v1 import generate_pb2
from tests.contract.rpc_echo import SERVICE, Echo, request, running

MIB = 1024 * 1024


async def failure(call) -> OmniError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return OmniError.from_rpc_error(caught.value)


async def test_a_request_that_breaks_the_contract_is_refused_with_every_field():
    async def generate(_request, _context):
        raise AssertionError("the handler must not be reached")
        yield

    bad = generate_pb2.GenerateRequest(model="", outputs=[1, 9])
    bad.params["thinker"].sampling.top_p = 7
    async with running(Echo(on_generate=generate)) as it:
        error = await failure(it.stub.Generate(bad, timeout=5).read())
    assert error.reason is Reason.BAD_REQUEST
    assert {violation.field for violation in error.fields} == {
        "model", "prompt", "outputs[1]", 'params["thinker"].sampling.top_p',
    }  # fmt: skip


async def test_the_callers_request_id_and_trace_are_the_handlers_and_come_back():
    seen = []
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

    async def look(_request, _context):
        seen.append((context.request_id(), context.traceparent()))
        return generate_pb2.ListModelsResponse()

    async with running(Echo(on_list=look)) as it:
        metadata = (("x-request-id", "mine-1"), ("traceparent", trace))
        call = it.stub.ListModels(generate_pb2.ListModelsRequest(), metadata=metadata, timeout=5)
        await call
        assert ("x-request-id", "mine-1") in list(await call.trailing_metadata())
    assert seen == [("mine-1", trace)]


@pytest.mark.parametrize("bad", ["with blank", "x" * 129])
async def test_a_request_id_that_is_missing_or_unfit_is_made_anew(bad: str):
    seen = []

    async def look(_request, _context):
        seen.append(context.request_id())
        return generate_pb2.ListModelsResponse()

    async with running(Echo(on_list=look)) as it:
        await it.stub.ListModels(generate_pb2.ListModelsRequest(), metadata=[("x-request-id", bad)], timeout=5)
        await it.stub.ListModels(generate_pb2.ListModelsRequest(), timeout=5)
    assert all(made.startswith("req-") for made in seen)
    assert seen[0] != seen[1]


async def test_a_deadline_cancels_the_handler_and_is_known_to_it():
    left, cancelled = [], asyncio.Event()

    async def hang(_request, _context):
        left.append(context.remaining())
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    async with running(Echo(on_list=hang)) as it:
        error = await failure(it.stub.ListModels(generate_pb2.ListModelsRequest(), timeout=1))
        await asyncio.wait_for(cancelled.wait(), 5)
    assert isinstance(error, DeadlineExceededError)
    assert 0 < left[0] < 5, "the deadline of the client, not the bound of the server"


async def test_a_client_that_goes_away_closes_a_generator():
    closed = asyncio.Event()

    async def generate(_request, _context):
        try:
            while True:
                yield generate_pb2.GenerateResponse()
                await asyncio.sleep(0)
        finally:
            closed.set()

    async with running(Echo(on_generate=generate)) as it:
        call = it.stub.Generate(request(), timeout=30)
        await call.read()
        call.cancel()
        await asyncio.wait_for(closed.wait(), 5)


async def test_streams_in_both_directions_pass_through():
    async def echo(requests, stream):
        async for message in requests:
            await stream.write(generate_pb2.OmniServiceAttachResponse(events=[{"request": message.credits[0]}]))

    async with running(Echo(on_attach=echo)) as it:
        call = it.stub.Attach(timeout=5)
        for number in range(3):
            await call.write(generate_pb2.OmniServiceAttachRequest(credits=[number]))
            assert (await call.read()).events[0].request == number
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF


async def test_a_stream_in_with_one_answer_is_mapped_too():
    async def count(requests, _context):
        numbers = [int(each) async for each in requests]
        if 13 in numbers:
            raise OmniError(Reason.MEDIA_INVALID, "13 is no number")
        return str(sum(numbers)).encode()

    handler = grpc.stream_unary_rpc_method_handler(count)
    generic = grpc.method_handlers_generic_handler("test.Sum", {"Sum": handler})

    def add(_servicer, server):
        server.add_generic_rpc_handlers((generic,))

    server = make_server(registry=CollectorRegistry())
    server.add(add, None)
    port = await server.start("127.0.0.1:0")
    async with make_channel(f"127.0.0.1:{port}") as channel:
        method = channel.stream_unary("/test.Sum/Sum")
        assert await method(iter([b"1", b"2"]), timeout=5) == b"3"
        assert (await failure(method(iter([b"13"]), timeout=5))).reason is Reason.MEDIA_INVALID
    await server.stop(0)


async def test_calls_are_counted_by_method_and_code():
    async def fail(_request, _context):
        raise OmniError(Reason.UNKNOWN_MODEL, "no")

    echo = Echo()
    async with running(echo) as it:
        await it.stub.ListModels(generate_pb2.ListModelsRequest(), timeout=5)
        echo.on_list = fail
        await failure(it.stub.ListModels(generate_pb2.ListModelsRequest(), timeout=5))
    method = f"/{SERVICE}/ListModels"

    def value(name: str, **labels: str) -> float | None:
        return it.registry.get_sample_value(name, {"method": method, **labels})

    assert value("omni_rpc_requests_total", code="OK") == 1
    assert value("omni_rpc_requests_total", code="NOT_FOUND") == 1
    assert value("omni_rpc_in_flight") == 0
    assert value("omni_rpc_latency_seconds_count") == 2


async def test_health_says_what_it_was_told_and_watchers_hear_of_it():
    async with running(Echo()) as it:
        stub = health_pb2_grpc.HealthStub(it.channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE), timeout=10)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        await it.server.health.set_serving(SERVICE, True)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=""), timeout=5)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        error = await failure(stub.Check(health_pb2.HealthCheckRequest(service="nobody"), timeout=5))
        assert error.code is grpc.StatusCode.NOT_FOUND
        watch.cancel()


async def ask(it, **question):
    stub = reflection_pb2_grpc.ServerReflectionStub(it.channel)
    call = stub.ServerReflectionInfo(timeout=5)
    await call.write(reflection_pb2.ServerReflectionRequest(**question))
    answer = await call.read()
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF
    return answer


async def test_reflection_lists_the_services_and_shows_their_files():
    async with running(Echo()) as it:
        services = (await ask(it, list_services="")).list_services_response.service
        assert {each.name for each in services} == {
            SERVICE,
            "grpc.health.v1.Health",
            "grpc.channelz.v1.Channelz",
            "grpc.reflection.v1alpha.ServerReflection",
        }
        found = await ask(it, file_containing_symbol=SERVICE)
        files = [
            descriptor_pb2.FileDescriptorProto.FromString(each)
            for each in found.file_descriptor_response.file_descriptor_proto
        ]
        assert "omni/v1/generate.proto" in {each.name for each in files}
        assert "buf/validate/validate.proto" in {each.name for each in files}


async def test_channelz_knows_the_server():
    async with running(Echo()) as it:
        call = channelz_pb2_grpc.ChannelzStub(it.channel).GetServers(channelz_pb2.GetServersRequest(), timeout=5)
        assert len((await call).server) >= 1


async def test_the_largest_media_part_fits_and_more_is_refused():
    sizes = []

    async def generate(asked, _context):
        sizes.append(len(asked.prompt.conversation.messages[0].content[0].media.data))
        yield generate_pb2.GenerateResponse()

    def with_media(size: int) -> generate_pb2.GenerateRequest:
        asked = generate_pb2.GenerateRequest(model="m")
        message = asked.prompt.conversation.messages.add(role=2)
        message.content.add().media.MergeFrom(type(message.content.add().media)(modality=2, data=bytes(size)))
        del message.content[1:]
        return asked

    async with running(Echo(on_generate=generate)) as it:
        assert await it.stub.Generate(with_media(64 * MIB), timeout=30).read()
        error = await failure(it.stub.Generate(with_media(66 * MIB), timeout=30).read())
    assert sizes == [64 * MIB]
    assert error.reason is Reason.MESSAGE_TOO_LARGE


async def test_a_port_that_is_taken_is_an_error_that_names_it():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        server = make_server(registry=CollectorRegistry())
        with pytest.raises(OSError, match=address):
            await server.start(address)
        await server.stop(0)


async def test_two_servers_never_share_a_port():
    async with running(Echo()) as it:
        other = make_server(registry=CollectorRegistry())
        with pytest.raises(OSError, match="cannot listen"):
            await other.start(it.address)
        await other.stop(0)
