"""Sessions: outputs as credit allows, one end for each run, and inputs in order."""

from __future__ import annotations

import asyncio
import socket
import time
from types import SimpleNamespace

import pytest
import torch
from scripted import ARENA, let_go, rows, stand, stopped, text
from structlog.testing import capture_logs

from omni.rpc.errors import FieldViolation, OmniError, Reason, invalid
from omni.v1 import content_pb2, stage_pb2, tensor_pb2
from stage_server.engines.base import Failed, Output
from stage_server.service import session
from stage_server.service.session import HOLD_BYTES, INLINE_BYTES

CANCEL = content_pb2.FINISH_REASON_CANCELLED
SOURCE = stage_pb2.RunSource(stage="a")


def cancel(number: int = 1) -> stage_pb2.RunCommand:
    return stage_pb2.RunCommand(run=number, cancel=stage_pb2.CancelRun(reason="test"))


def given(first: int, count: int = 1, *, handle: tensor_pb2.TensorHandle | None = None) -> stage_pb2.RunCommand:
    command = stage_pb2.RunCommand(run=1)
    command.input.source.CopyFrom(SOURCE)
    command.input.range.first, command.input.range.count = first, count
    command.input.payload.text = f"{first}"
    if handle is not None:
        command.input.payload.tensors.add(name="rows", handle=handle)
    return command


def end(count: int) -> stage_pb2.RunCommand:
    return stage_pb2.RunCommand(run=1, input_end=stage_pb2.RunInputEnd(source=SOURCE, count=count))


def reason(event: stage_pb2.RunEvent) -> Reason:
    return OmniError.from_status(event.failed).reason


async def test_outputs_without_credit_join_and_go_out_when_it_comes() -> None:
    async with stand() as at:
        run = at.start(window=1)
        await at.step(text(run, "a"))
        accepted, first = await at.events()
        assert accepted.HasField("accepted")
        assert (first.output.range.first, first.output.range.count, first.output.payload.text) == (0, 1, "a")
        for letter in "bcd":
            await at.step(text(run, letter))
        await at.step(stopped(run))
        assert await at.events() == []
        at.receive(credits_=(1,))
        joined, finished = await at.events()
        assert (joined.output.range.first, joined.output.range.count, joined.output.payload.text) == (1, 3, "bcd")
        assert finished.finished.count == 4


async def test_the_end_waits_for_the_outputs_before_it() -> None:
    async with stand() as at:
        run = at.start(window=1)
        await at.step(text(run, "a"), text(run, "b"))
        await at.take()
        await at.step(text(run, "c"), stopped(run))
        assert await at.events() == []
        assert not at.session.idle
        at.receive(credits_=(1,))
        assert [event.WhichOneof("event") for event in await at.events()] == ["output", "finished"]
        assert at.session.idle


@pytest.mark.parametrize("engine_done", [False, True], ids=["at work", "engine finished, reader behind"])
async def test_a_cancelled_run_ends_once_and_sends_nothing_more(engine_done: bool) -> None:
    async with stand() as at:
        run = at.start(window=1)
        await at.step(text(run, "a"))
        await at.take()
        await at.step(text(run, "b"), *([stopped(run)] if engine_done else []))
        at.receive(cancel(), cancel())
        if not engine_done:
            assert at.engine.told == [("cancel", run)] * 2
            await at.step(text(run, "late"), let_go(run))
        at.receive(cancel(), credits_=(1,))
        [finished] = await at.events()
        assert finished.finished.reason == CANCEL
        assert at.host.load().cancelled_runs == 1
        await at.step(let_go(run))
        assert at.session.idle


async def test_an_engine_that_fails_a_run_which_was_cancelled_has_let_go_of_it() -> None:
    async with stand() as at:
        run = at.start()
        await at.take()
        at.receive(cancel())
        await at.step(Failed(run, OmniError(Reason.STAGE_FAILED, "broke")))
        [finished] = await at.events()
        assert finished.finished.reason == CANCEL


async def test_a_failed_run_says_where_it_failed() -> None:
    async with stand() as at:
        run = at.start()
        await at.step(Failed(run, OmniError(Reason.STAGE_FAILED, "broke")))
        failed = OmniError.from_status((await at.events())[-1].failed)
        assert (failed.reason, failed.request_id, failed.stage, failed.replica) == (
            Reason.STAGE_FAILED,
            "req-1",
            "b",
            "m/b/0",
        )


async def test_a_number_that_is_at_work_has_one_end_when_it_is_started_again() -> None:
    async with stand() as at:
        run = at.start()
        await at.take()
        at.start()
        assert len(at.engine.runs) == 1
        assert at.engine.told == [("cancel", run)]
        await at.step(let_go(run))
        [failed] = await at.events()
        assert reason(failed) is Reason.BAD_REQUEST


async def test_runs_beyond_the_room_are_refused_and_the_others_go_on() -> None:
    async with stand() as at:
        for number in range(1, 6):
            at.start(number)
        events = await at.events()
        assert [event.WhichOneof("event") for event in events] == ["accepted"] * 4 + ["failed"]
        assert reason(events[-1]) is Reason.QUEUE_FULL
        assert len(at.engine.runs) == 4


async def test_a_run_whose_reader_is_far_behind_is_held_until_half_is_gone() -> None:
    async with stand() as at:
        run = at.start(window=1)
        await at.step(text(run, "a"))
        await at.take()
        piece = content_pb2.MediaPiece(data=b"x" * (HOLD_BYTES // 4))
        for _ in range(3):
            await at.step(Output(run, media=[piece]))
        assert at.engine.told == []
        await at.step(Output(run, media=[piece]))
        assert at.engine.told == [("hold", run, True)]
        for left in (3, 2, 1, 0):
            at.receive(credits_=(1,))
            assert len(await at.events()) == 1
            assert (("hold", run, False) in at.engine.told) == (left < 2)


async def test_a_run_that_is_held_for_large_tensors_goes_on_when_they_are_on_their_way() -> None:
    async with stand() as at:
        run = at.start(window=1, tensors=["rows"])
        await at.step(text(run, "a"))
        await at.take()
        await at.step(rows(run, HOLD_BYTES // 32 + 1))
        assert at.engine.told == [("hold", run, True)]
        at.receive(credits_=(1,))
        assert await at.events() == []
        assert len(await at.events()) == 1
        assert at.engine.told == [("hold", run, True), ("hold", run, False)]


async def test_tensors_wait_for_room_in_the_arena_and_hold_up_no_other_run() -> None:
    async with stand() as at:
        big, small = at.start(1, tensors=["rows"]), at.start(2)
        await at.take()
        taken = at.arena.publish(torch.ones(ARENA // 4 - 64))
        assert taken is not None
        await at.step(rows(big, 1), text(small, "a"))
        assert [event.run for event in await at.events()] == [2]
        at.arena.release(taken.lease)
        [event] = await at.events()
        assert event.run == 1
        handle = event.output.payload.tensors[0].handle
        assert at.reader.at_once(handle).tensor.equal(torch.ones(1, 8))


async def test_a_large_tensor_is_copied_aside_while_other_runs_go_on() -> None:
    async with stand() as at:
        big, small = at.start(1, tensors=["rows"]), at.start(2)
        await at.take()
        await at.step(rows(big, INLINE_BYTES // 4), text(small, "a"), stopped(big))
        events = await at.events()
        while len(events) < 3:
            events += await at.events()
        assert events[0].run == 2
        assert [event.WhichOneof("event") for event in events[1:]] == ["output", "finished"]


@pytest.mark.parametrize("how", ["cancel", "close"])
async def test_what_was_being_copied_for_a_run_that_ends_is_freed(how: str) -> None:
    async with stand() as at:
        run = at.start(tensors=["rows"])
        await at.step(rows(run, INLINE_BYTES // 4))
        empty = asyncio.Event()
        at.arena.on_room = lambda: at.arena.load().used_bytes or empty.set()
        await at.take()
        await asyncio.sleep(0)
        if how == "cancel":
            at.receive(cancel())
            await at.step(let_go(run))
        else:
            at.session.close()
        await asyncio.wait_for(empty.wait(), 10)


async def test_a_run_whose_tensors_are_taken_back_before_they_are_sent_fails() -> None:
    async with stand() as at:
        run = at.start(tensors=["rows"])
        await at.take()
        await at.step(rows(run, INLINE_BYTES // 4))
        assert not (await at.take()).events
        at.arena.release_all(at.session._published)
        await at.engine.cancelled(run)
        await at.step(let_go(run))
        [failed] = await at.events()
        assert reason(failed) is Reason.TENSOR_LOST


async def test_a_run_that_finds_no_room_for_long_fails_with_the_arena_and_what_to_raise() -> None:
    async with stand() as at:
        at.host.spec.bounds.gap.FromMilliseconds(10)
        run = at.start(tensors=["rows"])
        await at.step(rows(run, 1))
        first = (await at.events())[-1].output.payload.tensors[0].handle
        rest = [at.arena.publish(torch.ones(ARENA // 8)), at.arena.publish(torch.ones(ARENA // 16))]
        await at.step(rows(run, ARENA // 64))
        assert not (await at.take()).events
        await at.engine.cancelled(run)
        await at.step(let_go(run))
        error = OmniError.from_status((await at.events())[-1].failed)
        assert error.reason is Reason.ARENA_FULL
        assert f"the arena's {ARENA} bytes" in error.message
        assert "3 tensors" in error.message
        assert "raise `arena` of stage b" in error.message
        for handle in (first, *rest):
            assert handle is not None
            at.arena.release(handle.lease)


async def test_a_run_that_finds_room_in_time_goes_on() -> None:
    async with stand() as at:
        run = at.start(tensors=["rows"])
        await at.take()
        full = at.arena.publish(torch.ones(ARENA // 4))
        assert full is not None
        await at.step(rows(run, 1), stopped(run))
        assert not (await at.take()).events
        at.arena.release(full.lease)
        assert [event.WhichOneof("event") for event in await at.events()] == ["output", "finished"]
        assert not at.session.starved._timers


async def test_what_a_cancelled_run_has_sent_stays_until_its_reader_gives_it_back() -> None:
    async with stand() as at:
        run = at.start(tensors=["rows"])
        await at.step(rows(run, 1))
        handle = (await at.events())[-1].output.payload.tensors[0].handle
        at.receive(cancel())
        await at.step(let_go(run))
        await at.take()
        assert at.reader.at_once(handle) is not None
        at.session.receive((), {}, (handle.lease,), ())
        assert at.arena.load().leases == 0


async def test_inputs_are_handed_over_in_order_and_credited_when_the_engine_is_done_with_them() -> None:
    async with stand() as at:
        at.start(sources=[SOURCE])
        await at.take()
        handle = at.arena.publish(torch.ones(1, 8))
        assert handle is not None
        at.receive(given(0), given(1, 2, handle=handle), end(3))
        assert [(feed.text, feed.end) for feed in at.engine.feeds] == [("0", False), ("1", False), ("", True)]
        feed = at.engine.feeds[1]
        assert feed.tensors["rows"][0].equal(torch.ones(1, 8))
        feed.release()
        feed.release()
        message = await at.take()
        assert list(message.credits) == [1]
        assert [(each.owner, list(each.leases)) for each in message.releases] == [("m/b/0", [handle.lease])]
        at.arena.release(handle.lease)


@pytest.mark.parametrize(
    ("commands", "wrong", "says"),
    [
        ([given(1)], Reason.SEQUENCE_BROKEN, "a->b: number 0 was to come, 1 came"),
        ([given(0), given(0)], Reason.SEQUENCE_BROKEN, "a->b: number 1 was to come, 0 came"),
        ([given(0, 0)], Reason.SEQUENCE_BROKEN, "a->b: number 0 was to come"),
        ([given(0), end(2)], Reason.COUNT_MISMATCH, "a->b: 2 outputs were made, 1 came"),
        ([end(0), given(0)], Reason.SEQUENCE_BROKEN, "a->b: the source has ended already"),
        (
            [stage_pb2.RunCommand(run=1, input_end=stage_pb2.RunInputEnd(source=stage_pb2.RunSource(stage="x")))],
            Reason.SEQUENCE_BROKEN,
            "x->b: the source is not one of",
        ),
        (
            [given(0, handle=tensor_pb2.TensorHandle(owner="m/b/0", epoch=1, lease=5, size=4))],
            Reason.TENSOR_LOST,
            "element type",
        ),
        (
            [given(0, handle=tensor_pb2.TensorHandle(owner="m/x/9", dtype=1, size=4, shape=[4]))],
            Reason.TENSOR_LOST,
            "how to reach m/x/9",
        ),
    ],
)
async def test_an_input_out_of_order_or_out_of_reach_fails_its_run_alone(
    commands: list[stage_pb2.RunCommand], wrong: Reason, says: str
) -> None:
    async with stand() as at:
        run, other = at.start(1, sources=[SOURCE]), at.start(2)
        await at.take()
        at.receive(*commands)
        await at.engine.cancelled(run)
        await at.step(let_go(run), text(other, "a"))
        failed, output = sorted(await at.events(), key=lambda event: event.run)
        error = OmniError.from_status(failed.failed)
        assert error.reason is wrong
        assert says in error.message
        assert output.output.payload.text == "a"


@pytest.mark.parametrize("how", ["cancel", "close"])
async def test_a_run_that_is_over_waits_for_no_tensor_any_more(how: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        target = f"127.0.0.1:{silent.getsockname()[1]}"
        handle = tensor_pb2.TensorHandle(
            owner="m/a/0", epoch=3, lease=1, size=4, shape=[4], dtype=tensor_pb2.ELEMENT_TYPE_UINT8
        )
        async with asyncio.timeout(20), stand() as at:
            at.session.receive((), {}, (), [tensor_pb2.ReplicaAddress(replica="m/a/0", epoch=3, target=target)])
            run = at.start(sources=[SOURCE])
            await at.take()
            at.receive(given(0, handle=handle))
            await asyncio.to_thread(silent.accept)
            if how == "cancel":
                at.receive(cancel())
                await at.step(let_go(run))
                assert (await at.events())[-1].finished.reason == CANCEL
            else:
                at.session.close()
        assert not at.engine.feeds


async def test_a_run_whose_time_is_up_fails_with_the_deadline() -> None:
    async with stand() as at:
        start = stage_pb2.StartRun(request_id="req-1")
        start.timeout.FromMilliseconds(1)
        at.receive(stage_pb2.RunCommand(run=1, start=start))
        run = at.engine.runs[0].id
        await at.engine.cancelled(run)
        await at.step(let_go(run))
        assert reason((await at.events())[-1]) is Reason.DEADLINE


async def test_a_cancel_that_came_while_the_process_stood_still_comes_before_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with stand() as at:
        start = stage_pb2.StartRun(request_id="req-1")
        start.timeout.FromMilliseconds(1)
        at.receive(stage_pb2.RunCommand(run=1, start=start))
        rang = asyncio.Event()
        begun = time.monotonic()

        def much_later() -> float:
            rang.set()
            return begun + 100.0

        with monkeypatch.context() as patched:
            patched.setattr(session, "time", SimpleNamespace(monotonic=much_later))
            await asyncio.wait_for(rang.wait(), 10)
        at.receive(cancel())
        await at.step(let_go(at.engine.runs[0].id))
        assert (await at.events())[-1].finished.reason == CANCEL
        assert at.host.load().failed_runs == 0


async def test_what_goes_wrong_with_a_run_that_is_over_is_no_news() -> None:
    async with stand() as at:
        run = at.start()
        await at.take()
        over = at.session._runs[1]
        at.receive(cancel())
        with capture_logs() as said:
            at.session.fail(over, ValueError("late"), "its tensors could not be published")
            await at.step(let_go(run))
            at.session.fail(over, ValueError("later still"), "its tensors could not be published")
        assert not said
        [finished] = await at.events()
        assert finished.finished.reason == CANCEL


async def test_commands_for_runs_that_are_not_there_are_no_fault() -> None:
    async with stand() as at:
        at.receive(cancel(7), given(0), end(0), credits_=(7, 8))
        at.session.receive((), {}, (1, 2, 3), ())
        assert at.session.idle


async def test_a_parameter_that_an_engine_refuses_is_named_as_the_request_names_it() -> None:
    async with stand() as at:
        at.engine.refusal = invalid(FieldViolation("params.voice", "unknown voice 'x'; there are a, b"))
        at.receive(stage_pb2.RunCommand(run=1, start=stage_pb2.StartRun(request_id="req-1")))
        error = OmniError.from_status((await at.events())[0].failed)
        assert error.fields[0].field == 'params["b"].voice'
        assert error.message == "params[\"b\"].voice: unknown voice 'x'; there are a, b"
        assert at.session.idle
