"""The generation engine: the next frames of many runs in one batch, step after step.

One thread owns the model and all runs; the server's loop talks to it through a mailbox. A step takes what has come of
each run, up to a chunk, and hands the samples to an encoding lane, which delivers: the next step runs meanwhile, and
everything of a run keeps its order because there is one lane.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic

import numpy as np
import torch

from omni.rpc import logs
from omni.rpc.errors import OmniError, Reason
from omni.v1 import config_pb2, content_pb2
from stage_server.engines.arguments import Arguments
from stage_server.engines.base import Deliver, Event, Failed, Feed, Finished, Load, Output, Run
from stage_server.engines.errors import as_error
from stage_server.engines.generation.decoder import ChunkDecoder, StateT
from stage_server.engines.generation.voice import Voice, check_format
from stage_server.engines.thread import EngineThread
from stage_server.output.pool import EncodePool

if TYPE_CHECKING:
    from numpy.typing import NDArray

_log = logs.get(__name__)

STEPS_AHEAD = 4
"""Steps that may wait for the encoder; then the engine waits for it."""
SILENCE = np.zeros(0, np.float32)


@dataclass(frozen=True, slots=True)
class GenerationOptions:
    """Engine arguments of a generation stage (`StageSpec.engine`)."""

    chunk_frames: int
    """Frames of one run that a step decodes at most."""
    batch: int
    """Runs that share a step at most."""

    @classmethod
    def read(cls, spec: config_pb2.StageSpec) -> GenerationOptions:
        """Checks a spec's engine arguments.

        Raises:
            OmniError: an unknown key, or a value out of its bounds.
        """
        arguments = Arguments(spec.engine, "engine")
        options = cls(
            chunk_frames=arguments.integer("chunk_frames", 25, 1, 4096),
            batch=arguments.integer("batch", 16, 1, 1024),
        )
        arguments.done()
        return options


@dataclass(slots=True, eq=False)
class _Entry(Generic[StateT]):
    """A run and where it stands."""

    run: Run
    voice: Voice
    state: StateT | None = None
    """There once the run has been let in."""
    chunks: deque[torch.Tensor] = field(default_factory=deque)
    """Frames that have come and are not decoded."""
    open_sources: set[tuple[str, str]] = field(default_factory=set)
    held: bool = False
    samples: int = 0
    last_step: int = 0
    submitted: float = field(default_factory=time.monotonic)
    queued: float = 0.0

    def pull(self, most: int) -> torch.Tensor:
        """Takes up to `most` frames."""
        taken: list[torch.Tensor] = []
        while most and self.chunks:
            chunk = self.chunks.popleft()
            taken.append(chunk[:most])
            if len(chunk) > most:
                self.chunks.appendleft(chunk[most:])
            most -= len(taken[-1])
        return taken[0] if len(taken) == 1 else torch.cat(taken)


class GenerationEngine(Generic[StateT]):
    """An `Engine` (see engines/base.py) for stages that decode chunks."""

    def __init__(self, decoder: ChunkDecoder[StateT], options: GenerationOptions, *, max_running: int) -> None:
        self._decoder = decoder
        self._options = options
        self._max_running = max_running
        self._thread = EngineThread("generation-engine", self._turn)
        self._pool = EncodePool(workers=1, pending=STEPS_AHEAD)
        self._lane = self._pool.lane()
        # Owned by the engine's thread from here on; `load` only reads lengths.
        self._entries: dict[int, _Entry[StateT]] = {}
        self._waiting: deque[_Entry[StateT]] = deque()
        self._running: list[_Entry[StateT]] = []
        self._made: list[tuple[Voice, NDArray[np.float32], Event]] = []
        """Samples of this step and the event that follows them, in order."""
        self._steps = 0
        self._units = 0

    def start(self, deliver: Deliver) -> None:
        """Loads the model, then begins to step."""
        with torch.inference_mode():
            self._decoder.load()
        self._deliver = deliver
        self._thread.start()

    def submit(self, run: Run) -> None:
        """Takes a run in."""
        media_format = check_format(run.params)
        Arguments(run.params.extra, "params.extra").done()
        if not run.sources:
            raise OmniError(Reason.BAD_REQUEST, "this stage reads another stage's output, not a prompt")
        voice = Voice(media_format, self._decoder.sample_rate, wanted=run.output)
        entry = _Entry[StateT](run, voice, open_sources=set(run.sources))
        self._thread.put(lambda: self._take(entry))

    def feed(self, run: int, feed: Feed) -> None:
        self._thread.put(lambda: self._feed(run, feed))

    def cancel(self, run: int) -> None:
        self._thread.put(lambda: self._cancel(run))

    def hold(self, run: int, held: bool) -> None:
        self._thread.put(lambda: self._hold(run, held))

    def load(self) -> Load:
        running = len(self._running)
        return Load(running, len(self._entries) - running, self._steps, self._units, not self._thread.idle)

    def stop(self) -> None:
        """Ends stepping; runs at work are dropped."""
        loaded = self._thread.stop()
        self._pool.stop()
        if loaded:
            self._decoder.unload()

    # Everything below runs in the engine's thread.

    def _turn(self) -> None:
        try:
            self._work()
        except Exception as error:
            _log.exception("engine step failed")
            for entry in list(self._running):
                self._fail(entry, error)
        if self._made:
            made, self._made = self._made, []
            self._lane.submit(lambda: self._encode(made))

    def _work(self) -> None:
        """Reads the mailbox, waiting only when there is nothing to decode, and makes one step."""
        self._thread.read(wait=not self._ready())
        while self._waiting and len(self._running) < self._max_running:
            self._admit(self._waiting[0])
        if ready := self._ready():
            self._step(ready)
        for entry in list(self._running):
            if not entry.chunks and not entry.open_sources:
                self._finish(entry, content_pb2.FINISH_REASON_STOP)

    def _ready(self) -> list[_Entry[StateT]]:
        """Runs to decode next: those without any sound yet first, then by how long they have waited."""
        ready = [entry for entry in self._running if entry.chunks and not entry.held]
        ready.sort(key=lambda entry: entry.last_step)
        return ready[: self._options.batch]

    def _take(self, entry: _Entry[StateT]) -> None:
        self._entries[entry.run.id] = entry
        self._waiting.append(entry)

    def _admit(self, entry: _Entry[StateT]) -> None:
        """Lets the oldest waiting run in."""
        try:
            entry.state = self._decoder.open()
        except Exception as error:
            self._fail(entry, error)
            return
        self._waiting.popleft()
        self._running.append(entry)

    def _feed(self, run: int, feed: Feed) -> None:
        entry = self._entries.get(run)
        if entry is None:
            feed.discard()
            return
        try:
            try:
                if entry.run.output:
                    taken = [self._decoder.take(frames) for frames in feed.tensors.get(self._decoder.input, ())]
                    entry.chunks.extend(frames for frames in taken if len(frames))
            finally:
                feed.release()
        except Exception as error:
            self._fail(entry, error)
            return
        if feed.end:
            entry.open_sources.discard((feed.stage, feed.role))

    def _cancel(self, run: int) -> None:
        if entry := self._entries.get(run):
            self._finish(entry, content_pb2.FINISH_REASON_CANCELLED)

    def _hold(self, run: int, held: bool) -> None:
        if entry := self._entries.get(run):
            entry.held = held

    def _step(self, entries: Sequence[_Entry[StateT]]) -> None:
        self._steps += 1
        rows = [(entry, entry.pull(self._options.chunk_frames)) for entry in entries]
        for entry, _ in rows:
            if not entry.last_step:
                entry.queued = time.monotonic() - entry.submitted
            entry.last_step = self._steps
        try:
            self._decode(rows)
        except Exception as error:
            if len(rows) == 1:
                self._fail(entries[0], error)
                return
            _log.warning("a step failed, its runs are decoded one by one", error=repr(error))
            for row in rows:
                try:
                    self._decode([row])
                except Exception as own:
                    self._fail(row[0], own)

    def _decode(self, rows: Sequence[tuple[_Entry[StateT], torch.Tensor]]) -> None:
        states = [(entry.state, frames) for entry, frames in rows]
        decoded = self._decoder.decode(states)  # type: ignore[arg-type]  # runs in a step have been let in
        for (entry, frames), (state, samples) in zip(rows, decoded, strict=True):
            entry.state = state
            entry.samples += len(samples)
            self._units += len(frames)
            self._made.append((entry.voice, samples, Output(entry.run.id)))

    def _finish(self, entry: _Entry[StateT], reason: content_pb2.FinishReason.ValueType) -> None:
        self._drop(entry)
        usage = content_pb2.Usage(audio_samples=entry.samples, sample_rate=self._decoder.sample_rate)
        self._made.append((entry.voice, SILENCE, Finished(entry.run.id, reason, usage, entry.queued)))

    def _fail(self, entry: _Entry[StateT], error: Exception) -> None:
        self._drop(entry)
        self._made.append(
            (entry.voice, SILENCE, Failed(entry.run.id, as_error(error, "the run failed in its engine", entry.run)))
        )

    def _drop(self, entry: _Entry[StateT]) -> None:
        """Lets go of all that a run holds."""
        del self._entries[entry.run.id]
        if entry in self._running:
            self._running.remove(entry)
        else:
            self._waiting.remove(entry)
        entry.chunks.clear()
        entry.state = None

    # In the encoding lane.

    def _encode(self, made: Sequence[tuple[Voice, NDArray[np.float32], Event]]) -> None:
        """Encodes a step's samples and delivers its events, once."""
        events: list[Event] = []
        for voice, samples, event in made:
            if voice.failed:
                continue
            try:
                events.extend(_events(voice, samples, event))
            except Exception as error:
                voice.failed = True
                _log.exception("encoding failed", run=event.run)
                message = f"the sound could not be encoded: {type(error).__name__}"
                events.append(Failed(event.run, OmniError(Reason.STAGE_FAILED, message)))
                self._thread.put(lambda run=event.run: self._cancel(run))
        if events:
            self._deliver(events)


def _events(voice: Voice, samples: NDArray[np.float32], event: Event) -> list[Event]:
    """An event with the sound that belongs to it."""
    if isinstance(event, Output):
        event.media = voice.grow(samples, last=False)
        return [event] if event.media else []
    if isinstance(event, Finished) and event.reason != content_pb2.FINISH_REASON_CANCELLED:
        media = voice.grow(samples, last=True)
        return [Output(event.run, media=media), event] if media else [event]
    return [event]
