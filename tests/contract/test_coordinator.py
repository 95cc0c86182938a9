"""The coordinator over real gRPC: what clients, stages and operators see of it."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from coordinator_cluster import BOUND_S, Stage, cluster, handle, pipeline

from omni.rpc.errors import OmniError, Reason
from omni.rpc.options import MAX_REQUEST_BYTES
from omni.v1 import config_pb2, content_pb2, generate_pb2, stage_pb2


def ask(**changes: Any) -> generate_pb2.GenerateRequest:
    return generate_pb2.GenerateRequest(**{"model": "m", "prompt": content_pb2.Prompt(text="hello")} | changes)


def echo(tokens: int) -> Any:
    """A script: so many tokens, then the end; a cancelled run lets go."""

    def script(stage: Stage, command: stage_pb2.RunCommand) -> None:
        kind = command.WhichOneof("command")
        if kind == "start":
            for number in range(tokens):
                stage.output(command.run, number, content_pb2.Payload(text=f"t{number} ", token_ids=[number]))
            stage.finish(command.run, tokens)
        elif kind == "cancel":
            stage.finish(command.run, 0, content_pb2.FINISH_REASON_CANCELLED)

    return script


def silent(stage: Stage, command: stage_pb2.RunCommand) -> None:
    """A script: makes nothing, and lets go when told to."""
    if command.WhichOneof("command") == "cancel":
        stage.finish(command.run, 0, content_pb2.FINISH_REASON_CANCELLED)


async def collect(call: Any) -> list[generate_pb2.RequestEvent]:
    events: list[generate_pb2.RequestEvent] = []
    async with asyncio.timeout(BOUND_S):
        while (response := await call.read()) is not grpc.aio.EOF:
            events.extend(response.events)
    return events


async def error_of(call: Any) -> OmniError:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await collect(call)
    return OmniError.from_rpc_error(raised.value)


async def test_generate_gives_every_output_in_one_total_order() -> None:
    async with cluster(pipeline("a"), Stage("a", echo(20))) as up:
        events = await collect(up.stub.Generate(ask()))
    assert [event.index for event in events] == list(range(len(events)))
    assert events[0].accepted.request_id.startswith("req-")
    text = "".join(event.output.payload.text for event in events if event.HasField("output"))
    assert text == "".join(f"t{number} " for number in range(20))
    assert events[-2].stage_finished.stage == "a"
    assert events[-1].finished.reason == content_pb2.FINISH_REASON_STOP


async def test_a_chain_hands_chunks_on_and_gives_every_tensor_back() -> None:
    def first(stage: Stage, command: stage_pb2.RunCommand) -> None:
        if command.WhichOneof("command") == "start":
            for number in range(5):
                stage.output(command.run, number, handle(stage.replica, 100 + number))
            stage.finish(command.run, 5)

    def last(stage: Stage, command: stage_pb2.RunCommand) -> None:
        kind = command.WhichOneof("command")
        if kind == "input":
            stage.took(command.run, "m/a/0", [each.handle.lease for each in command.input.payload.tensors])
        elif kind == "input_end":
            piece = content_pb2.MediaPiece(modality=content_pb2.MODALITY_AUDIO, data=b"pcm", last=True)
            stage.output(command.run, 0, content_pb2.Payload(media=[piece]))
            stage.finish(command.run, 1)

    a, b = Stage("a", first), Stage("b", last)
    async with cluster(pipeline("a", "b"), a, b) as up:
        events = await collect(up.stub.Generate(ask()))
        await a.until(lambda: sorted(a.released) == [100, 101, 102, 103, 104])
    assert b.kinds() == ["start", *["input"] * 5, "input_end"]
    assert b.commands[-1].input_end.count == 5
    assert b.replicas == ["m/a/0"]
    outputs = [event.output for event in events if event.HasField("output")]
    assert [output.stage for output in outputs] == ["b"]
    assert outputs[0].payload.media[0].data == b"pcm"
    assert [each.stage for each in events[-1].finished.stages] == ["a", "b"]


async def test_a_failed_stage_cancels_the_others_and_is_named() -> None:
    def feeding(stage: Stage, command: stage_pb2.RunCommand) -> None:
        if command.WhichOneof("command") == "start":
            stage.output(command.run, 0, handle(stage.replica, 7))
        silent(stage, command)

    def failing(stage: Stage, command: stage_pb2.RunCommand) -> None:
        if command.WhichOneof("command") == "start":
            stage.fail(command.run, "out of memory")

    a = Stage("a", feeding)
    async with cluster(pipeline("a", "b"), a, Stage("b", failing)) as up:
        error = await error_of(up.stub.Generate(ask()))
        assert "cancel" in a.kinds()
    assert (error.reason, error.stage, error.replica) == (Reason.STAGE_FAILED, "b", "m/b/0")
    assert "out of memory" in error.message


async def test_a_lost_chunk_fails_the_request_and_names_the_edge() -> None:
    def skipping(stage: Stage, command: stage_pb2.RunCommand) -> None:
        if command.WhichOneof("command") == "start":
            stage.output(command.run, 0, content_pb2.Payload(text="x"))
            stage.output(command.run, 2, content_pb2.Payload(text="z"))
        silent(stage, command)

    async with cluster(pipeline("a"), Stage("a", skipping)) as up:
        error = await error_of(up.stub.Generate(ask()))
    assert (error.reason, error.stage) == (Reason.SEQUENCE_BROKEN, "a")
    assert "a->client" in error.message


async def test_a_client_that_goes_away_cancels_its_request() -> None:
    stage = Stage("a", silent)
    async with cluster(pipeline("a"), stage) as up:
        call = up.stub.Generate(ask())
        await stage.until(lambda: "start" in stage.kinds())
        call.cancel()
        await stage.until(lambda: "cancel" in stage.kinds())


async def test_cancel_answers_when_the_stage_has_let_go() -> None:
    stage = Stage("a", silent)
    async with cluster(pipeline("a"), stage) as up:
        call = up.stub.Generate(ask())
        accepted = await call.read()
        request_id = accepted.events[0].accepted.request_id
        await stage.until(lambda: "start" in stage.kinds())
        answer = await up.stub.Cancel(generate_pb2.CancelRequest(request_id=request_id))
        again = await up.stub.Cancel(generate_pb2.CancelRequest(request_id=request_id))
        events = await collect(call)
    assert answer.found
    assert [(run.stage, run.replica, run.acknowledged) for run in answer.runs] == [("a", "m/a/0", True)]
    assert not again.found
    assert events[-1].finished.reason == content_pb2.FINISH_REASON_CANCELLED


async def test_a_cancel_that_is_never_acknowledged_ends_at_its_bound() -> None:
    stage = Stage("a", lambda _stage, _command: None)
    async with cluster(pipeline("a", cancel=0.1), stage) as up:
        call = up.stub.Generate(ask())
        accepted = await call.read()
        await stage.until(lambda: "start" in stage.kinds())
        wanted = generate_pb2.CancelRequest(request_id=accepted.events[0].accepted.request_id)
        answer = await up.stub.Cancel(wanted, timeout=BOUND_S)
        call.cancel()
    assert [run.acknowledged for run in answer.runs] == [False]


async def test_a_deadline_reaches_the_stage() -> None:
    stage = Stage("a", silent)
    async with cluster(pipeline("a"), stage) as up:
        request = ask()
        request.timeout.FromMilliseconds(100)
        error = await error_of(up.stub.Generate(request))
        assert "cancel" in stage.kinds()
    assert error.reason == Reason.DEADLINE


async def test_a_silent_stage_fails_at_its_bound_and_is_named() -> None:
    async with cluster(pipeline("a", first_output=0.1), Stage("a", silent)) as up:
        error = await error_of(up.stub.Generate(ask()))
    assert (error.reason, error.stage) == (Reason.STAGE_TIMEOUT, "a")
    assert "first_output" in error.message


async def test_nobody_joined_says_what_is_missing_and_how_to_start_it() -> None:
    async with cluster(pipeline("a", queue=0.1)) as up:
        error = await error_of(up.stub.Generate(ask()))
        with pytest.raises(OmniError, match="m/a/0 has not joined"):
            await up.daemon.cluster.wait_ready(0.05)
    assert (error.reason, error.stage) == (Reason.NO_REPLICA, "a")
    assert "stage-server --coordinator" in error.message


async def test_attach_serves_many_and_a_bad_one_fails_alone() -> None:
    async with cluster(pipeline("a"), Stage("a", echo(6))) as up:
        call = up.stub.Attach()
        commands = [generate_pb2.RequestCommand(request=number, start=ask()) for number in (1, 2)]
        commands.append(generate_pb2.RequestCommand(request=3, start=ask(model="n")))
        await call.write(generate_pb2.OmniServiceAttachRequest(commands=commands))
        ended: dict[int, str] = {}
        texts = {1: "", 2: "", 3: ""}
        async with asyncio.timeout(BOUND_S):
            while len(ended) < 3:
                response = await call.read()
                for event in response.events:
                    kind = event.WhichOneof("event")
                    texts[event.request] += event.output.payload.text
                    if kind in ("finished", "failed"):
                        ended[event.request] = kind
                    if kind == "output":
                        await call.write(generate_pb2.OmniServiceAttachRequest(credits=[event.request]))
        call.cancel()
    assert ended == {1: "finished", 2: "finished", 3: "failed"}
    assert texts[1] == texts[2] == "t0 t1 t2 t3 t4 t5 "


async def test_without_credits_a_client_gets_two_outputs_and_no_more() -> None:
    async with cluster(pipeline("a"), Stage("a", echo(6))) as up:
        call = up.stub.Attach()
        start = generate_pb2.RequestCommand(request=1, start=ask())
        await call.write(generate_pb2.OmniServiceAttachRequest(commands=[start]))
        outputs = 0
        async with asyncio.timeout(BOUND_S):
            while outputs < 2:
                outputs += sum(event.HasField("output") for event in (await call.read()).events)
            # Another request's whole life on the same stream comes through meanwhile.
            other = generate_pb2.RequestCommand(request=2, start=ask(model="n"))
            await call.write(generate_pb2.OmniServiceAttachRequest(commands=[other]))
            events = list((await call.read()).events)
        call.cancel()
    assert [event.request for event in events] == [2]
    assert outputs == 2


@pytest.mark.parametrize(
    ("request_", "reason", "field"),
    [
        (ask(model="n"), Reason.UNKNOWN_MODEL, "model"),
        (ask(outputs=[content_pb2.MODALITY_VIDEO]), Reason.UNSUPPORTED_MODALITY, "outputs[0]"),
        (ask(params={"aa": {}}), Reason.UNKNOWN_PARAMETER, 'params["aa"]'),
        (ask(prompt=content_pb2.Prompt(text="")), Reason.BAD_REQUEST, "prompt.text"),
        (
            ask(params={"b": {"format": config_pb2.MEDIA_FORMAT_PNG}}),
            Reason.BAD_REQUEST,
            'params["b"].format',
        ),
    ],
)
async def test_what_is_wrong_with_a_request_is_named(
    request_: generate_pb2.GenerateRequest, reason: Reason, field: str
) -> None:
    async with cluster(pipeline("a", "b"), Stage("a", silent), Stage("b", silent)) as up:
        error = await error_of(up.stub.Generate(request_))
    assert error.reason == reason
    assert [each.field for each in error.fields] == [field]


async def test_media_beyond_the_limits_is_refused_before_it_is_decoded() -> None:
    media = content_pb2.Media(modality=content_pb2.MODALITY_IMAGE, data=b"123456789")
    turn = content_pb2.ChatMessage(role=content_pb2.CHAT_ROLE_USER, content=[content_pb2.ContentPart(media=media)])
    prompt = content_pb2.Prompt(conversation=content_pb2.Conversation(messages=[turn]))
    async with cluster(pipeline("a"), Stage("a", silent)) as up:
        error = await error_of(up.stub.Generate(ask(prompt=prompt)))
    assert error.reason == Reason.MEDIA_TOO_LARGE
    assert error.fields[0].field == "prompt.conversation.messages[0].content[0].media.data"


async def test_a_lost_replica_that_had_begun_fails_its_request_and_the_next_one_succeeds() -> None:
    def begun(stage: Stage, command: stage_pb2.RunCommand) -> None:
        if command.WhichOneof("command") == "start":
            stage.output(command.run, 0, content_pb2.Payload(text="x"))

    stage = Stage("a", begun)
    async with cluster(pipeline("a")) as up:
        async with stage.joined(up.address):
            await up.daemon.cluster.wait_ready(BOUND_S)
            call = up.stub.Generate(ask())
            async with asyncio.timeout(BOUND_S):
                while not any(event.HasField("output") for event in (await call.read()).events):
                    pass
        error = await error_of(call)
        assert (error.reason, error.stage) == (Reason.REPLICA_LOST, "a")
        async with Stage("a", echo(1)).joined(up.address):
            events = await collect(up.stub.Generate(ask()))
    assert events[-1].HasField("finished")


async def test_a_run_that_had_not_begun_moves_to_the_replica_that_comes_back() -> None:
    first = Stage("a", silent)
    async with cluster(pipeline("a")) as up:
        async with first.joined(up.address):
            call = up.stub.Generate(ask())
            await first.until(lambda: "start" in first.kinds())
        async with Stage("a", echo(3)).joined(up.address):
            events = await collect(call)
    assert events[-1].finished.reason == content_pb2.FINISH_REASON_STOP


async def test_a_coordinator_that_stops_ends_its_requests_on_every_stage_and_takes_no_more() -> None:
    def stubborn(stage: Stage, command: stage_pb2.RunCommand) -> None:
        """Lets go only when the test says so."""

    stage = Stage("a", stubborn)
    async with cluster(pipeline("a"), stage) as up:
        call = up.stub.Generate(ask())
        await stage.until(lambda: "start" in stage.kinds())
        stopping = asyncio.create_task(up.daemon.stop())
        await stage.until(lambda: "cancel" in stage.kinds())
        assert (await error_of(up.stub.Generate(ask()))).reason is Reason.DRAINING
        stage.finish(stage.commands[0].run, 0, content_pb2.FINISH_REASON_CANCELLED)
        error = await error_of(call)
        await stopping
    assert (error.reason, error.message) == (Reason.DRAINING, "the coordinator stops")
    assert stage.kinds() == ["start", "cancel"]


async def test_a_wrong_command_and_a_number_used_twice_fail_their_own_requests_once() -> None:
    async with cluster(pipeline("a"), Stage("a", silent)) as up:
        call = up.stub.Attach()
        good = generate_pb2.RequestCommand(request=3, start=ask())
        nothing = generate_pb2.RequestCommand(request=1)
        twice = generate_pb2.RequestCommand(request=2, start=ask())
        await call.write(generate_pb2.OmniServiceAttachRequest(commands=[nothing, twice, good, twice]))
        failed: list[tuple[int, Reason]] = []
        async with asyncio.timeout(BOUND_S):
            while len(failed) < 2:
                failed += [
                    (event.request, OmniError.from_status(event.failed).reason)
                    for event in (await call.read()).events
                    if event.HasField("failed")
                ]
            await call.write(
                generate_pb2.OmniServiceAttachRequest(
                    commands=[generate_pb2.RequestCommand(request=3, cancel=generate_pb2.CancelReason())]
                )
            )
            await call.done_writing()
        last = (await collect(call))[-1]
        assert sorted(failed) == [(1, Reason.BAD_REQUEST), (2, Reason.BAD_REQUEST)]
        assert (last.request, last.finished.reason) == (3, content_pb2.FINISH_REASON_CANCELLED)


async def test_a_request_too_large_to_travel_on_is_refused_and_hurts_nobody() -> None:
    async with cluster(pipeline("a"), Stage("a", echo(1))) as up:
        large = ask(prompt=content_pb2.Prompt(text="x" * (MAX_REQUEST_BYTES - 10)))
        assert (await error_of(up.stub.Generate(large))).reason is Reason.MESSAGE_TOO_LARGE
        largest = ask(prompt=content_pb2.Prompt(text="x" * (MAX_REQUEST_BYTES - 100)))
        assert (await collect(up.stub.Generate(largest)))[-1].HasField("finished")


async def test_credits_for_what_was_not_written_make_nothing_more_be_made() -> None:
    """The client's credits come before the coordinator could write anything: only outputs count that it wrote."""
    stage = Stage("a", silent)
    async with cluster(pipeline("a"), stage) as up:
        call = up.stub.Attach()
        start = generate_pb2.RequestCommand(request=1, start=ask())
        await call.write(generate_pb2.OmniServiceAttachRequest(commands=[start], credits=[1] * 50))
        await call.write(generate_pb2.OmniServiceAttachRequest(credits=[1] * 50))
        await stage.until(lambda: "start" in stage.kinds())
        run = stage.commands[0].run
        for number in range(6):
            stage.output(run, number, content_pb2.Payload(text=f"t{number}"))
        outputs = 0
        async with asyncio.timeout(BOUND_S):
            while outputs < 2:
                outputs += sum(event.HasField("output") for event in (await call.read()).events)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await call.read()
        call.cancel()


async def test_a_voice_that_a_later_stage_does_not_have_is_refused_before_anything_begins() -> None:
    first = Stage("a", echo(1))
    async with cluster(pipeline("a", "b"), first, Stage("b", silent, voices=["Anna", "bo"])) as up:
        model = (await up.stub.GetModel(generate_pb2.GetModelRequest(model="m"))).model
        error = await error_of(up.stub.Generate(ask(params={"b": {"voice": "carl"}})))
        begun = list(first.commands)
        call = up.stub.Generate(ask(params={"b": {"voice": "ANNA"}}))
        await first.until(lambda: "start" in first.kinds())
        call.cancel()
    assert model.voices == ["Anna", "bo"]
    assert [str(each) for each in error.fields] == ["params[\"b\"].voice: must be one of Anna, bo, got 'carl'"]
    assert begun == []


async def test_a_replica_whose_link_cannot_be_written_is_no_member_any_more_and_may_join_anew() -> None:
    stage = Stage("a", silent)
    async with cluster(pipeline("a", queue=0.5), stage) as up:
        call = up.stub.Generate(ask())
        await stage.until(lambda: "start" in stage.kinds())
        link = up.daemon.cluster._by_name["m/a/0"].link
        link.credits.append(-1)  # What no message can hold.
        link.wake()
        error = await error_of(call)
    assert error.reason is Reason.NO_REPLICA
    assert "has left" in error.message
