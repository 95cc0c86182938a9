"""Draining: nothing new, and the process is needed until the last word is written and every tensor has been read."""

from __future__ import annotations

import asyncio

import pytest
from scripted import Stand, let_go, rows, stand, stopped, text

from omni.rpc.errors import OmniError, Reason
from omni.v1 import stage_pb2
from stage_server.service.session import Session


async def turns() -> None:
    """Lets everything that can go on do so."""
    for _ in range(5):
        await asyncio.sleep(0)


async def draining(at: Stand) -> asyncio.Task[None]:
    task = asyncio.create_task(at.host.drain())
    await turns()
    return task


async def test_it_ends_when_the_last_word_is_written() -> None:
    async with stand() as at:
        run = at.start()
        await at.take()
        writer = asyncio.create_task(at.session.take())
        await at.step(text(run, "a"))
        await writer
        drained = await draining(at)
        await at.step(stopped(run))
        await turns()
        assert not drained.done()
        assert (await at.events())[-1].HasField("finished")
        await turns()
        assert not drained.done()  # It was taken; that it was written shows when the next is asked for.
        writer = asyncio.create_task(at.session.take())
        await asyncio.wait_for(drained, 10)
        writer.cancel()


async def test_it_ends_when_every_published_tensor_was_given_back() -> None:
    async with stand() as at:
        run = at.start(tensors=["rows"])
        await at.step(rows(run, 1), stopped(run))
        events = await at.events()
        writer = asyncio.create_task(at.session.take())
        drained = await draining(at)
        assert not drained.done()
        lease = events[1].output.payload.tensors[0].handle.lease
        at.session.receive((), {}, (lease,), ())
        await asyncio.wait_for(drained, 10)
        writer.cancel()


async def test_it_ends_when_the_reader_has_gone() -> None:
    async with stand() as at:
        run = at.start(tensors=["rows"])
        await at.step(rows(run, 1))
        await at.take()
        drained = await draining(at)
        at.session.close()
        await turns()
        assert not drained.done()
        await at.step(let_go(run))
        await asyncio.wait_for(drained, 10)


async def test_a_stream_ends_after_all_that_is_left_to_say() -> None:
    async with stand() as at:
        at.start()
        await at.take()
        await draining(at)
        at.start(2)
        at.host.end_sessions()
        [refused] = await at.events()
        assert OmniError.from_status(refused.failed).reason is Reason.DRAINING
        assert await at.session.take() is None


async def test_a_stream_that_begins_after_the_end_ends_at_once() -> None:
    async with stand() as at, asyncio.TaskGroup() as tasks:
        at.host.end_sessions()
        late = Session(at.host, tasks)
        assert await asyncio.wait_for(late.take(), 10) is None
        late.close()


@pytest.mark.parametrize("many", [1, 3])
async def test_a_session_that_was_closed_takes_nothing_more(many: int) -> None:
    async with stand() as at:
        at.start()
        for _ in range(many):
            at.session.close()
        assert await at.session.take() is None
        at.receive(stage_pb2.RunCommand(run=9, cancel=stage_pb2.CancelRun()))
