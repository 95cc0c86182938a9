"""A stage that follows a script instead of a model: rates, sizes and faults of the request's choosing.

A run without sources makes `tokens` outputs at `rate`; a run with sources makes one output for each input it is fed.
All runs whose next output is due make it in the same step, as a batch of a model would.
"""

from __future__ import annotations

import heapq
import itertools
import os
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from omni.rpc.errors import OmniError, Reason
from omni.v1 import config_pb2, content_pb2, stage_pb2
from stage_server.engines.arguments import Arguments
from stage_server.engines.base import Deliver, Event, Failed, Feed, Finished, Load, Output, Run

NEVER = -1
_TOGETHER = 0.0005
"""Seconds by which an output may be early, so that runs of equal pace share a step."""
SAMPLE_RATE = 24000


@dataclass(frozen=True, slots=True)
class Script:
    """What a run does; numbers of outputs count from 0, NEVER: it does not."""

    tokens: int
    rate: float
    """Outputs a second; 0: as fast as the reader takes them."""
    stamp: bool
    """The text of each output is the monotonic clock in nanoseconds, twenty digits."""
    text_bytes: int
    rows: int
    """Rows of 64 float32 of each tensor that is asked for."""
    media_bytes: int
    lose_at: int
    double_at: int
    stall_at: int
    delay_at: int
    delay: float
    short_by: int
    fail_at: int
    crash_at: int

    @classmethod
    def of(cls, params: config_pb2.StageParams, outputs: Sequence[int]) -> Script:
        """Reads a script from `extra`.

        Raises:
            OmniError: BAD_REQUEST or UNKNOWN_PARAMETER, with the field.
        """
        given = Arguments(params.extra, "params.extra")
        most = 1 << 30
        at = {
            name: given.integer(name, NEVER, NEVER, most)
            for name in ("lose_at", "double_at", "stall_at", "delay_at", "fail_at", "crash_at")
        }
        sound = content_pb2.MODALITY_AUDIO in outputs
        script = cls(
            tokens=given.integer("tokens", 16, 0, most),
            rate=given.number("rate", 0.0, 0.0, 1e6),
            stamp=bool(given.flag("stamp", False)),
            text_bytes=given.integer("text_bytes", 4, 0, 1 << 20),
            rows=given.integer("rows", 1, 0, 1 << 20),
            media_bytes=given.integer("media_bytes", 960 if sound else 0, 0, 1 << 24),
            delay=given.number("delay", 0.0, 0.0, 3600.0),
            short_by=given.integer("short_by", 0, 0, most),
            **at,
        )
        given.done()
        return script


@dataclass(slots=True, eq=False)
class _State:
    run: Run
    script: Script
    submitted: float
    due: float
    queued: float = -1.0
    made: int = 0
    backlog: int = 0
    """Inputs that it has not answered yet."""
    open_sources: int = 0
    held: bool = False
    stalled: bool = False
    delayed: bool = False
    waiting: bool = False
    """In the queue of runs whose time comes."""
    rows_read: int = 0
    """Rows of tensors that its sources fed it."""


class Wire:
    """Plays a faulty network for the runs whose scripts ask for one; implements `service.host.Wire`."""

    def __init__(self) -> None:
        self.scripts: dict[int, Script] = {}

    def pass_on(self, run: int, event: stage_pb2.RunEvent) -> Sequence[stage_pb2.RunEvent]:
        """The event, or nothing, or the event twice, or one with a false count."""
        script = self.scripts.get(run)
        if script is None:
            return (event,)
        if event.HasField("output"):
            span = event.output.range
            if span.first <= script.lose_at < span.first + span.count:
                return ()
            if span.first <= script.double_at < span.first + span.count:
                return event, event
        elif event.HasField("finished"):
            del self.scripts[run]
            event.finished.count += script.short_by
        elif event.HasField("failed"):
            del self.scripts[run]
        return (event,)


@dataclass(slots=True)
class _Counters:
    steps: int = 0
    units: int = 0


class SyntheticEngine:
    """Implements `engines.base.Engine`. Its thread sleeps until the next output is due."""

    def __init__(self, spec: config_pb2.StageSpec) -> None:
        given = Arguments(spec.engine, "engine")
        self._start_seconds = given.number("start_seconds", 0.0, 0.0, 600.0)
        self._fail_start = given.flag("fail_start", False)
        given.done()
        self._outputs = list(spec.outputs)
        self.wire = Wire()
        self._runs: dict[int, _State] = {}
        self._queue: list[tuple[float, int, _State]] = []
        self._order = itertools.count()
        self._ended: list[Event] = []
        self._counters = _Counters()
        self._changed = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._loop, name="synthetic", daemon=True)
        self._deliver: Deliver = lambda _events: None

    def start(self, deliver: Deliver) -> None:
        if self._start_seconds:
            with self._changed:
                self._changed.wait_for(lambda: self._stopping, self._start_seconds)
        if self._fail_start:
            raise OmniError(Reason.STAGE_FAILED, "the script says that this stage cannot start")
        self._deliver = deliver
        self._thread.start()

    def submit(self, run: Run) -> None:
        script = Script.of(run.params, self._outputs)
        now = time.monotonic()
        state = _State(run, script, now, now, open_sources=len(run.sources))
        with self._changed:
            self._runs[run.id] = state
            if script.lose_at >= 0 or script.double_at >= 0 or script.short_by:
                self.wire.scripts[run.id] = script
            self._schedule(state)

    def feed(self, run: int, feed: Feed) -> None:
        rows = sum(part.shape[0] for parts in feed.tensors.values() for part in parts)
        if not feed.end:
            try:
                feed.release()
            except OmniError as error:
                with self._changed:
                    if self._runs.pop(run, None) is not None:
                        self._ended.append(Failed(run, error))
                        self._changed.notify()
                return
        with self._changed:
            state = self._runs.get(run)
            if state is None:
                return
            state.rows_read += rows
            if feed.end:
                state.open_sources -= 1
            else:
                state.backlog += 1
            self._schedule(state)

    def cancel(self, run: int) -> None:
        with self._changed:
            state = self._runs.pop(run, None)
            if state is not None:
                self._ended.append(self._finish(state, content_pb2.FINISH_REASON_CANCELLED))
                self._changed.notify()

    def hold(self, run: int, held: bool) -> None:
        with self._changed:
            state = self._runs.get(run)
            if state is not None:
                state.held = held
                if not held:
                    self._schedule(state)

    def load(self) -> Load:
        with self._changed:
            waiting = sum(1 for state in self._runs.values() if state.queued < 0)
            busy = any(state.waiting or state.stalled for state in self._runs.values())
            return Load(len(self._runs) - waiting, waiting, self._counters.steps, self._counters.units, busy)

    def stop(self) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()

    def _schedule(self, state: _State) -> None:
        """Queues the run's next output, if there is something to do; holds the lock."""
        idle = state.run.sources and not state.backlog and state.open_sources
        if not state.waiting and not state.held and not state.stalled and not idle:
            state.waiting = True
            heapq.heappush(self._queue, (state.due, next(self._order), state))
            self._changed.notify()

    def _loop(self) -> None:
        while True:
            with self._changed:
                while not (self._stopping or self._ended or self._is_due()):
                    self._changed.wait(self._queue[0][0] - time.monotonic() if self._queue else None)
                if self._stopping:
                    return
                events, self._ended = self._ended, []
                self._step(events)
            if events:
                self._deliver(events)

    def _is_due(self) -> bool:
        return bool(self._queue) and self._queue[0][0] <= time.monotonic()

    def _step(self, events: list[Event]) -> None:
        """One output of each run that is due; holds the lock."""
        horizon = time.monotonic() + _TOGETHER
        due: list[_State] = []
        while self._queue and self._queue[0][0] <= horizon:
            due.append(heapq.heappop(self._queue)[2])
        if due:
            self._counters.steps += 1
        for state in due:
            state.waiting = False
            if state.run.id in self._runs and not state.held:
                self._advance(state, events)

    def _advance(self, state: _State, events: list[Event]) -> None:
        script, made = state.script, state.made
        if state.queued < 0:
            state.queued = time.monotonic() - state.submitted
        over = not state.open_sources and not state.backlog if state.run.sources else made >= script.tokens
        if made == script.crash_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if made == script.fail_at:
            del self._runs[state.run.id]
            error = OmniError(Reason.STAGE_FAILED, f"the script says that output {made} fails")
            events.append(Failed(state.run.id, error))
            return
        if made == script.stall_at:
            state.stalled = True
            return
        if made == script.delay_at and not state.delayed:
            state.delayed = True
            state.due = time.monotonic() + script.delay
            self._schedule(state)
            return
        if over:
            del self._runs[state.run.id]
            events.append(self._finish(state, content_pb2.FINISH_REASON_STOP))
            return
        events.append(self._output(state))
        state.made += 1
        self._counters.units += 1
        if state.run.sources:
            state.backlog -= 1
        if script.rate:
            state.due = max(state.due + 1 / script.rate, time.monotonic() - 1.0)
        self._schedule(state)

    def _output(self, state: _State) -> Output:
        script, run = state.script, state.run
        output = Output(run.id)
        if run.output and content_pb2.MODALITY_TEXT in self._outputs:
            output.token_ids.append(state.made & 0x7FFFFFFF)
            output.text = f"{time.monotonic_ns():020d}" if script.stamp else ("x" * script.text_bytes)
        if run.output and script.media_bytes:
            samples = script.media_bytes // 2
            output.media.append(
                content_pb2.MediaPiece(
                    modality=content_pb2.MODALITY_AUDIO,
                    mime_type="" if state.made else "audio/pcm",
                    sample_rate=0 if state.made else SAMPLE_RATE,
                    data=bytes(samples * 2),
                    samples=samples,
                )
            )
        for name in run.tensors:
            output.tensors[name] = torch.full((script.rows, 64), float(state.made))
        return output

    def _finish(self, state: _State, reason: content_pb2.FinishReason.ValueType) -> Finished:
        read = state.rows_read if state.run.sources else 1
        usage = content_pb2.Usage(completion_tokens=state.made, prompt_tokens=read)
        if state.run.output and state.script.media_bytes:
            usage.audio_samples, usage.sample_rate = state.made * (state.script.media_bytes // 2), SAMPLE_RATE
        return Finished(state.run.id, reason, usage, max(0.0, state.queued))
