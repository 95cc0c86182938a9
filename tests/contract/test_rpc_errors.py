"""An error arrives as it was raised: code, reason, places, fields, retry hint."""

import asyncio
import pickle

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from omni.rpc.channel import make_channel
from omni.rpc.errors import (
    DOMAIN,
    TABLE,
    FieldViolation,
    InvalidArgumentError,
    NotFoundError,
    OmniError,
    Reason,
    UnavailableError,
)
from omni.v1 import generate_pb2, generate_pb2_grpc
from tests.contract.rpc_echo import SERVICE, Echo, request, running


def same(left: OmniError, right: OmniError) -> bool:
    return type(left) is type(right) and vars(left) == vars(right)


@pytest.mark.parametrize("reason", list(Reason))
def test_every_reason_survives_a_status(reason: Reason):
    error = OmniError(
        reason,
        "naïve message ✓",
        request_id="req-1",
        stage="talker",
        replica="tiny-omni/talker/0",
        fields=[FieldViolation("params", "must be there"), FieldViolation("model", "must not be empty")],
        retry_after=2.5,
    )
    wire = status_pb2.Status.FromString(error.to_status().SerializeToString())
    assert wire.code == TABLE[reason].code.value[0]
    assert same(OmniError.from_status(wire), error)


def test_the_table_has_a_row_for_each_reason_and_makes_its_exception():
    assert set(TABLE) == set(Reason)
    assert type(OmniError(Reason.UNKNOWN_MODEL, "x")) is NotFoundError
    assert type(NotFoundError(Reason.UNKNOWN_MODEL, "x")) is NotFoundError
    with pytest.raises(TypeError, match="UNKNOWN_MODEL is a NotFoundError"):
        UnavailableError(Reason.UNKNOWN_MODEL, "x")


def test_an_error_survives_a_pickle():
    error = OmniError(Reason.QUEUE_FULL, "64 requests wait", stage="thinker")
    assert same(pickle.loads(pickle.dumps(error)), error)


def test_the_details_are_those_that_any_google_rpc_client_reads():
    status = OmniError(Reason.QUEUE_FULL, "full", request_id="req-1", stage="thinker").to_status()
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    assert status.details[0].Unpack(info)
    assert (info.reason, info.domain) == ("QUEUE_FULL", DOMAIN)
    assert dict(info.metadata) == {"request_id": "req-1", "stage": "thinker"}
    assert status.details[1].Unpack(retry)
    assert retry.retry_delay.seconds == 1


def test_a_foreign_status_gets_the_nearest_reason():
    assert OmniError.from_status(status_pb2.Status(code=14, message="proxy says no")).reason is Reason.UNREACHABLE
    assert OmniError.from_status(status_pb2.Status(code=2)).reason is Reason.INTERNAL
    foreign = status_pb2.Status(code=5)
    foreign.details.add().Pack(error_details_pb2.ErrorInfo(reason="QUEUE_FULL", domain="elsewhere"))
    assert OmniError.from_status(foreign).reason is Reason.NOT_FOUND


async def test_a_handlers_error_reaches_the_client_with_all_that_it_says():
    raised = OmniError(Reason.REPLICA_LOST, "gone", stage="thinker", replica="m/thinker/1", retry_after=3)

    async def fail(_request, _context):
        raise raised

    async with running(Echo(on_list=fail)) as it:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await it.stub.ListModels(generate_pb2.ListModelsRequest(), metadata=[("x-request-id", "req-7")], timeout=5)
        # Unary and idempotent: gRPC itself has called again while the server said UNAVAILABLE.
        error = OmniError.from_rpc_error(caught.value)
    assert isinstance(error, UnavailableError)
    assert (error.reason, error.message) == (Reason.REPLICA_LOST, "gone")
    assert error.metadata() == {"request_id": "req-7", "stage": "thinker", "replica": "m/thinker/1"}
    assert error.retry_after == 3


async def test_an_unexpected_exception_tells_the_client_its_request_id_and_nothing_else():
    async def fail(_request, _context):
        raise RuntimeError("the password is swordfish")

    async with running(Echo(on_list=fail)) as it:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await it.stub.ListModels(generate_pb2.ListModelsRequest(), timeout=5)
    error = OmniError.from_rpc_error(caught.value)
    assert error.code is grpc.StatusCode.INTERNAL
    assert error.request_id.startswith("req-")
    assert "swordfish" not in str(caught.value.trailing_metadata()) + (caught.value.details() or "")


async def test_an_error_out_of_a_task_group_is_the_one_that_a_task_meant():
    async def failing_task():
        raise OmniError(Reason.STAGE_TIMEOUT, "no first output within 5 s", stage="dit")

    async def fail(_request, _context):
        async with asyncio.TaskGroup() as group:
            group.create_task(failing_task())

    async with running(Echo(on_list=fail)) as it:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await it.stub.ListModels(generate_pb2.ListModelsRequest(), timeout=5)
    assert OmniError.from_rpc_error(caught.value).stage == "dit"


async def test_an_error_of_a_call_that_a_handler_made_passes_through():
    async def fail(_request, _context):
        raise OmniError(Reason.TENSOR_LOST, "lease 7 has expired", replica="m/talker/0")

    async with running(Echo(on_list=fail)) as behind:

        async def forward(asked, _context):
            return await behind.stub.ListModels(asked, timeout=5)

        async with running(Echo(on_list=forward)) as front:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await front.stub.ListModels(generate_pb2.ListModelsRequest(), timeout=5)
    error = OmniError.from_rpc_error(caught.value)
    assert (error.reason, error.replica) == (Reason.TENSOR_LOST, "m/talker/0")


async def test_a_stream_fails_with_details_after_what_it_has_sent():
    async def generate(_request, _context):
        yield generate_pb2.GenerateResponse()
        raise OmniError(Reason.SEQUENCE_BROKEN, "edge thinker->talker: expected 3, got 5", stage="talker")

    async with running(Echo(on_generate=generate)) as it:
        call = it.stub.Generate(request(), timeout=5)
        assert await call.read() == generate_pb2.GenerateResponse()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
    assert OmniError.from_rpc_error(caught.value).reason is Reason.SEQUENCE_BROKEN


async def test_a_very_long_error_still_reaches_the_client():
    fields = [FieldViolation(f"params.extra[{index}]", "é" * 300) for index in range(200)]

    async def fail(_request, _context):
        raise OmniError(Reason.BAD_REQUEST, "é" * 100_000, fields=fields)

    async with running(Echo(on_list=fail)) as it:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await it.stub.ListModels(generate_pb2.ListModelsRequest(), timeout=5)
    error = OmniError.from_rpc_error(caught.value)
    assert isinstance(error, InvalidArgumentError)
    assert error.message.endswith("…")
    assert 1 <= len(error.fields) < 200
    sent = sum(len(key) + len(value) for key, value in caught.value.trailing_metadata())
    assert sent + len(error.message.encode()) < 8192


async def test_a_server_that_cannot_be_reached_is_unavailable():
    async with make_channel("127.0.0.1:1") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generate_pb2_grpc.OmniServiceStub(channel).ListModels(generate_pb2.ListModelsRequest(), timeout=5)
    error = OmniError.from_rpc_error(caught.value)
    assert (type(error), error.reason) == (UnavailableError, Reason.UNREACHABLE)


UNDECODABLE = b"\xff\xff\xff"


@pytest.mark.parametrize("method", ["ListModels", "Generate", "Attach"])
async def test_bytes_that_are_no_message_are_the_senders_fault(method: str, caplog: pytest.LogCaptureFixture):
    async def read_all(requests, _context):
        async with asyncio.TaskGroup() as group:
            group.create_task(anext(requests))

    async with running(Echo(on_attach=read_all)) as it:
        path = f"/{SERVICE}/{method}"
        if method == "Attach":
            call = it.channel.stream_stream(path)(iter([UNDECODABLE]), timeout=5, metadata=[("x-request-id", "req-7")])
        else:
            call = it.channel.unary_stream(path)(UNDECODABLE, timeout=5, metadata=[("x-request-id", "req-7")])
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        error = OmniError.from_rpc_error(caught.value)
        counted = it.registry.get_sample_value("omni_rpc_requests_total", {"method": path, "code": "INVALID_ARGUMENT"})
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (error.reason, error.request_id) == (Reason.BAD_REQUEST, "req-7")
    assert "3 bytes cannot be decoded" in error.message
    assert counted == 1
    assert caplog.records == []
