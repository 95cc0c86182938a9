"""Sessions: messages and arena shares stay within their bounds, and what is wrong with one run ends no other."""

from __future__ import annotations

import pytest
import torch
from scripted import ARENA, Stand, let_go, rows, stand, stopped, text

from omni.rpc.errors import OmniError, Reason
from omni.v1 import stage_pb2, tensor_pb2
from stage_server.engines.base import Feed, Output, Run
from stage_server.service.outbox import MESSAGE_BYTES
from stage_server.service.replies import RESPONSE_BYTES
from stage_server.service.session import ARENA_SHARE
from stage_server.transport.buddy import SMALLEST

SHARE = ARENA // ARENA_SHARE
ROW = 32
SOURCE = stage_pb2.RunSource(stage="a")


def error_of(event: stage_pb2.RunEvent) -> OmniError:
    return OmniError.from_status(event.failed)


async def messages(at: Stand) -> list[stage_pb2.StageServiceAttachResponse]:
    """All that can be taken without waiting; each within its bound."""
    taken: list[stage_pb2.StageServiceAttachResponse] = []
    while not at.session.idle and not at.session.replies.empty:
        message = await at.take()
        assert message.ByteSize() <= RESPONSE_BYTES
        if message.events:
            taken.append(message)
    return taken


async def test_a_message_is_bounded_and_its_runs_take_turns() -> None:
    async with stand() as at:
        runs = {number: at.start(number, window=40) for number in (1, 2, 3)}
        await at.take()
        piece = "x" * (MESSAGE_BYTES // 2 - 100)
        for _ in range(80):
            await at.step(*(text(run, piece) for run in runs.values()))
        await at.step(*(stopped(run) for run in runs.values()))
        came = await messages(at)
        assert len(came) > 1
        shares = [sum(event.run == number for event in came[0].events) for number in runs]
        assert max(shares) - min(shares) <= 1
        at.receive(credits_=(1, 2, 3) * 40)
        came += await messages(at)
        for number in runs:
            events = [event for message in came for event in message.events if event.run == number]
            outputs = [event.output for event in events if event.HasField("output")]
            due = 0
            for output in outputs:
                assert output.range.first == due
                assert len(output.payload.text) == output.range.count * len(piece) <= MESSAGE_BYTES
                due += output.range.count
            assert due == events[-1].finished.count == 80


async def test_many_last_words_do_not_make_a_large_message() -> None:
    async with stand() as at:
        count = 3 * RESPONSE_BYTES // 200
        at.receive(*(stage_pb2.RunCommand(run=number, start=stage_pb2.StartRun()) for number in range(count)))
        came = await messages(at)
        assert [event.run for message in came for event in message.events] == list(range(count))


async def test_a_reader_without_credits_gets_everything_in_bounded_messages() -> None:
    async with stand() as at:
        run = at.start()
        await at.take()
        for _ in range(3 * RESPONSE_BYTES // MESSAGE_BYTES):
            await at.step(text(run, "x" * (MESSAGE_BYTES - 100)))
        await at.step(stopped(run))
        came = await messages(at)
        assert came[-1].events[-1].finished.count == 3 * RESPONSE_BYTES // MESSAGE_BYTES


async def test_tensors_of_a_reader_behind_never_outgrow_their_share_of_the_arena() -> None:
    async with stand() as at:
        run = at.start(window=1, tensors=["rows"])
        await at.step(rows(run, 64))
        await at.take()
        while not at.engine.told:
            await at.step(rows(run, 64))
        assert at.engine.told == [("hold", run, True)]
        await at.step(*(rows(run, 64) for _ in range(3 * ARENA // (64 * ROW))), stopped(run))
        due = 1
        finished = None
        while finished is None:
            at.receive(credits_=(1,))
            for event in await at.events():
                if event.HasField("finished"):
                    finished = event.finished
                    continue
                [named] = event.output.payload.tensors
                assert named.handle.size <= SHARE
                assert event.output.range.first == due
                due += event.output.range.count
                at.session.receive((), {}, (named.handle.lease,), ())
        assert finished.count == due
        assert at.engine.told == [("hold", run, True), ("hold", run, False)]


async def test_in_a_crowded_arena_a_single_output_goes_where_no_more_would_fit() -> None:
    async with stand() as at:
        run = at.start(window=1, tensors=["rows"])
        await at.step(rows(run, 1))
        await at.take()
        taken = [at.arena.publish(torch.ones(ARENA // 2 // 4)), at.arena.publish(torch.ones(ARENA // 4 // 4))]
        while (handle := at.arena.publish(torch.ones(1024))) is not None:
            taken.append(handle)
        await at.step(*(rows(run, 128) for _ in range(64)))
        at.receive(credits_=(1,))
        assert await at.events() == []
        last = taken.pop()
        assert last is not None
        at.arena.release(last.lease)
        [event] = await at.events()
        assert (event.output.range.first, event.output.range.count) == (1, 1)
        for handle in taken:
            assert handle is not None
            at.arena.release(handle.lease)


async def test_a_reader_that_waits_for_its_next_chunk_gets_it_though_those_not_begun_fill_the_arena() -> None:
    async with stand() as at:
        begun, fills, not_begun = (at.start(number, tensors=["rows"]) for number in (1, 2, 3))
        await at.take()

        async def next_chunk() -> int:
            await at.step(rows(begun, 1))
            [event] = await at.events()
            assert event.run == 1
            return event.output.payload.tensors[0].handle.lease

        first = await next_chunk()
        at.session.receive((), {}, (first,), ())
        sizes = [ARENA // 2]
        while sizes[-1] > SMALLEST:
            sizes.append(sizes[-1] // 2)
        for size in (*sizes, SMALLEST):
            await at.step(rows(fills, size // ROW))
            while not await at.events():
                pass
        assert at.arena.publish(torch.ones(1)) is None
        await at.step(rows(fills, 1), rows(not_begun, 1))
        for _ in range(3):
            lease = await next_chunk()
            at.session.receive((), {}, (lease,), ())
        await next_chunk()
        await at.step(rows(begun, 1))
        assert await at.events() == [], "it has something to read"


async def test_a_step_larger_than_its_share_goes_alone() -> None:
    async with stand() as at:
        run = at.start(window=2, tensors=["rows"])
        await at.step(rows(run, 1))
        await at.take()
        await at.step(rows(run, 2 * SHARE // ROW), rows(run, 1), stopped(run))
        at.receive(credits_=(1, 1))
        events: list[stage_pb2.RunEvent] = []
        while not any(event.HasField("finished") for event in events):
            events += await at.events()
        assert [event.output.range.count for event in events[:-1]] == [1, 1]


@pytest.mark.parametrize("count", [2**31, 2**32 - 1])
async def test_credits_beyond_what_was_sent_are_no_more_than_the_window(count: int) -> None:
    async with stand() as at:
        run = at.start(window=1)
        await at.take()
        at.session.receive((), {1: count}, (), ())
        for letter in "abc":
            await at.step(text(run, letter))
        [event] = await at.events()
        assert event.output.range.count == 3
        await at.step(text(run, "d"))
        assert at.session.replies.empty


@pytest.mark.parametrize(
    "start",
    [
        stage_pb2.StartRun(),
        stage_pb2.StartRun(request_id="r", window=1025),
        stage_pb2.StartRun(request_id="r", sources=[stage_pb2.RunSource()]),
    ],
    ids=["no request", "window", "source"],
)
async def test_an_invalid_start_fails_its_run_alone(start: stage_pb2.StartRun) -> None:
    async with stand() as at:
        run = at.start(1)
        await at.take()
        at.receive(stage_pb2.RunCommand(run=2, start=start))
        await at.step(text(run, "a"))
        failed, output = await at.events()
        assert (failed.run, error_of(failed).reason) == (2, Reason.BAD_REQUEST)
        assert error_of(failed).fields[0].field.startswith("start.")
        assert output.output.payload.text == "a"


@pytest.mark.parametrize(
    "handle",
    [
        tensor_pb2.TensorHandle(size=2**62, shape=[2**62], dtype=tensor_pb2.ELEMENT_TYPE_UINT8),
        tensor_pb2.TensorHandle(size=2**40, shape=[2**40], dtype=tensor_pb2.ELEMENT_TYPE_UINT8),
        tensor_pb2.TensorHandle(size=0, shape=[0, 2**62, 2**62], dtype=tensor_pb2.ELEMENT_TYPE_FLOAT32),
        tensor_pb2.TensorHandle(size=0, shape=[2**62] * 100_000 + [0], dtype=tensor_pb2.ELEMENT_TYPE_FLOAT32),
        tensor_pb2.TensorHandle(size=8, shape=[-1, -2], dtype=tensor_pb2.ELEMENT_TYPE_FLOAT32),
    ],
    ids=["2^62 bytes", "1 TB", "no bytes in a huge shape", "too many dimensions", "negative"],
)
@pytest.mark.parametrize("target", ["127.0.0.1:1", ""], ids=["nobody there", "no address"])
async def test_a_handle_that_cannot_be_fetched_fails_its_run_alone(
    handle: tensor_pb2.TensorHandle, target: str
) -> None:
    async with stand() as at:
        at.session.receive((), {}, (), [tensor_pb2.ReplicaAddress(replica="m/a/0", epoch=3, target=target)])
        run, other = at.start(1, sources=[SOURCE]), at.start(2)
        await at.take()
        handle.owner, handle.epoch, handle.lease = "m/a/0", 3, 1
        given = stage_pb2.RunInput(source=SOURCE)
        given.range.count = 1
        given.payload.tensors.add(name="rows", handle=handle)
        at.receive(stage_pb2.RunCommand(run=1, input=given))
        await at.engine.cancelled(run)
        await at.step(let_go(run), text(other, "a"))
        failed, output = sorted(await at.events(), key=lambda event: event.run)
        assert error_of(failed).reason is Reason.TENSOR_LOST
        assert output.output.payload.text == "a"


async def test_an_engine_that_raises_fails_the_run_that_it_was_told_of_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async with stand() as at:
        run, other = at.start(1, sources=[SOURCE]), at.start(2)
        await at.take()

        def submit(_run: Run) -> None:
            raise ValueError("submit")

        def feed(_run: int, _feed: Feed) -> None:
            raise IndexError("feed")

        monkeypatch.setattr(at.engine, "submit", submit)
        monkeypatch.setattr(at.engine, "feed", feed)
        at.receive(stage_pb2.RunCommand(run=3, start=stage_pb2.StartRun(request_id="r")))
        given = stage_pb2.RunInput(source=SOURCE)
        given.range.count = 1
        at.receive(stage_pb2.RunCommand(run=1, input=given))
        await at.engine.cancelled(run)
        await at.step(let_go(run), text(other, "a"))
        failed = {event.run: error_of(event) for event in await at.events() if event.HasField("failed")}
        assert {number: error.reason for number, error in failed.items()} == {
            1: Reason.STAGE_FAILED,
            3: Reason.STAGE_FAILED,
        }


async def test_an_output_that_cannot_be_sent_fails_its_run_alone() -> None:
    async with stand() as at:
        run, other = at.start(1, tensors=["rows"]), at.start(2)
        await at.take()
        await at.step(Output(run, tensors={"rows": torch.ones(1, dtype=torch.complex64)}), text(other, "a"))
        [output] = await at.events()
        assert output.output.payload.text == "a"
        await at.step(let_go(run))
        [failed] = await at.events()
        assert error_of(failed).reason is Reason.STAGE_FAILED
