"""The autoregressive engine: continuous batching over any `Decoder`.

One thread owns the model and all runs. The server's loop talks to it through a mailbox; preparation (tokenizing, media,
encoders) happens in a worker beside it, so that a large picture holds up nobody's tokens. Between any two steps runs
join, leave, are held or fed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Generic

import torch

from omni.rpc import logs
from omni.rpc.errors import OmniError, Reason
from omni.v1 import content_pb2
from stage_server.engines.ar.cache import SlotCache
from stage_server.engines.ar.decoder import Decoder, Slice, StateT
from stage_server.engines.ar.entry import Entry
from stage_server.engines.ar.sampling import Seen
from stage_server.engines.ar.schedule import draws, plan
from stage_server.engines.ar.step import Step, collect
from stage_server.engines.base import Deliver, Event, Failed, Feed, Finished, Load, Output, Run
from stage_server.engines.errors import as_error
from stage_server.engines.thread import EngineThread

_log = logs.get(__name__)


class ArEngine(Generic[StateT]):
    """An `Engine` (see engines/base.py) for autoregressive stages."""

    def __init__(self, decoder: Decoder[StateT], *, max_running: int, step_tokens: int) -> None:
        self._decoder = decoder
        self._max_running = max_running
        self._step_tokens = step_tokens
        self._thread = EngineThread("ar-engine", self._turn)
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ar-prepare")
        # Owned by the engine's thread from here on; `load` only reads lengths.
        self._entries: dict[int, Entry[StateT]] = {}
        self._waiting: deque[Entry[StateT]] = deque()
        self._running: list[Entry[StateT]] = []
        self._events: list[Event] = []
        self._idle = True
        self._preparing = 0
        """Runs that the worker has not begun with, or is at work on."""
        self._steps = 0
        self._units = 0

    def start(self, deliver: Deliver) -> None:
        """Loads the model, then begins to step."""
        with torch.inference_mode():
            geometry = self._decoder.load()
            self._cache = SlotCache(geometry, self._max_running)
        self._geometry = geometry
        self._deliver = deliver
        self._thread.start()

    def submit(self, run: Run) -> None:
        """Takes a run in; its preparation starts at once."""
        self._decoder.check(run)
        entry: Entry[StateT] = Entry(run)
        self._thread.put(lambda: self._take(entry))
        entry.preparation = self._worker.submit(self._prepare, entry)

    def feed(self, run: int, feed: Feed) -> None:
        self._thread.put(lambda: self._feed(run, feed))

    def cancel(self, run: int) -> None:
        self._thread.put(lambda: self._cancel(run))

    def hold(self, run: int, held: bool) -> None:
        self._thread.put(lambda: self._hold(run, held))

    def load(self) -> Load:
        running = len(self._running)
        busy = self._preparing > 0 or not self._thread.idle
        return Load(running, len(self._entries) - running, self._steps, self._units, busy, self._decoder.voices)

    def stop(self) -> None:
        """Ends stepping; runs at work are dropped."""
        self._worker.shutdown(wait=False, cancel_futures=True)
        if not self._thread.stop():
            return  # Nothing was loaded.
        for entry in list(self._entries.values()):
            self._drop(entry)
        self._decoder.unload()

    # Everything below runs in the engine's thread.

    def _turn(self) -> None:
        try:
            self._work()
        except Exception as error:
            self._idle = False
            _log.exception("an engine turn failed, and its runs with it")
            for entry in list(self._running):
                self._fail(entry, error)
        if self._events:
            events, self._events = self._events, []
            self._deliver(events)

    def _work(self) -> None:
        """Reads the mailbox, waiting only when the last turn found nothing to put through, and makes one step."""
        self._thread.read(wait=self._idle)
        self._admit()
        slices = self._slices()
        self._idle = not slices
        if slices:
            self._step(slices)

    def _slices(self) -> list[Slice[StateT]]:
        return plan((entry.ready_state for entry in self._running if not entry.held), self._step_tokens)

    def _take(self, entry: Entry[StateT]) -> None:
        self._entries[entry.run.id] = entry
        self._preparing += 1

    def _prepare(self, entry: Entry[StateT]) -> None:
        """In the worker."""
        try:
            with torch.inference_mode():
                state = self._decoder.prepare(entry.run)
                seen = Seen(state.prompt_ids, self._geometry.device) if state.sampling.penalized else None
        except Exception as error:
            failure = as_error(error, "the run could not be prepared", entry.run)
            self._thread.put(lambda: self._unprepared(entry, failure))
        else:
            self._thread.put(lambda: self._prepared(entry, state, seen))

    def _unprepared(self, entry: Entry[StateT], error: OmniError) -> None:
        self._preparing -= 1
        if entry.cancelled:
            self._finish(entry, content_pb2.FINISH_REASON_CANCELLED)
        else:
            self._fail(entry, error)

    def _prepared(self, entry: Entry[StateT], state: StateT, seen: Seen | None) -> None:
        self._preparing -= 1
        entry.state, entry.seen = state, seen
        if entry.cancelled:
            self._finish(entry, content_pb2.FINISH_REASON_CANCELLED)
            return
        self._waiting.append(entry)
        if self._fits(entry):
            feeds, entry.feeds = entry.feeds, []
            for feed in feeds:
                self._feed(entry.run.id, feed)

    def _fits(self, entry: Entry[StateT]) -> bool:
        """Fails a run whose prompt is longer than a slot."""
        state, longest = entry.ready_state, self._geometry.max_length
        length = max(state.ready, state.prompt or 0)
        if length <= longest:
            return True
        message = f"the prompt has {length} tokens; this model takes at most {longest}"
        self._fail(entry, OmniError(Reason.PROMPT_TOO_LONG, message, request_id=entry.run.request_id))
        return False

    def _feed(self, run: int, feed: Feed) -> None:
        entry = self._entries.get(run)
        if entry is None or entry.cancelled:
            feed.discard()
        elif entry.state is None:
            entry.feeds.append(feed)
        else:
            try:
                self._decoder.feed(entry.state, feed)
                if self._fits(entry) and entry.state.finished:
                    self._decoder.ended(entry.state)
                    if tensors := collect(entry.state):
                        self._events.append(Output(run, tensors=tensors))
                    self._finish(entry, content_pb2.FINISH_REASON_STOP)
            except Exception as error:
                self._fail(entry, error)

    def _cancel(self, run: int) -> None:
        entry = self._entries.get(run)
        if entry is None or entry.cancelled:
            return
        entry.cancelled = True
        entry.release_feeds()
        if entry.state is not None:
            self._finish(entry, content_pb2.FINISH_REASON_CANCELLED)
        elif entry.preparation is not None and entry.preparation.cancel():
            self._preparing -= 1
            self._finish(entry, content_pb2.FINISH_REASON_CANCELLED)

    def _hold(self, run: int, held: bool) -> None:
        if entry := self._entries.get(run):
            entry.held = held

    def _admit(self) -> None:
        while self._waiting and self._cache.free:
            entry = self._waiting.popleft()
            self._cache.acquire(entry.run.id)
            self._running.append(entry)

    def _step(self, slices: Sequence[Slice[StateT]]) -> None:
        entries = [self._entries[part.state.run.id] for part in slices]
        try:
            hidden = self._forward(slices)
        except Exception as error:
            if len(slices) == 1:
                self._fail(entries[0], error)
                return
            _log.warning("a step failed, its runs are stepped one by one", error=repr(error))
            for part in slices:
                self._step([Slice(part.state, part.start, part.stop, 0)])
            return
        try:
            self._advance(entries, slices, hidden)
        except Exception as error:
            # Some of them have taken their token: drawn once more, it would be lost or doubled.
            for entry in entries:
                self._fail(entry, error)

    def _forward(self, slices: Sequence[Slice[StateT]]) -> torch.Tensor:
        """May be made again for the same slices."""
        for part in slices:
            part.state.tensors.clear()
        self._cache.begin([(part.state.run.id, part.start, part.stop) for part in slices])
        return self._decoder.forward(slices, self._cache)

    def _advance(self, entries: Sequence[Entry[StateT]], slices: Sequence[Slice[StateT]], hidden: torch.Tensor) -> None:
        """Takes a step's result in: its positions, tokens, outputs and ends."""
        step = Step(self._decoder, entries, slices, self._geometry.max_length)
        self._steps += 1
        for entry, part in zip(entries, slices, strict=True):
            entry.stepped()
            part.state.position = part.stop
        broken = self._broken(entries, hidden)
        drawing = [row for row, part in enumerate(slices) if row not in broken and draws(part)]
        if drawing:
            self._units += len(drawing)
            step.draw(hidden if len(drawing) == len(slices) else hidden[drawing], drawing)
        self._events.extend(step.outputs())
        for entry, reason in step.ended():
            self._finish(entry, reason)

    def _broken(self, entries: Sequence[Entry[StateT]], hidden: torch.Tensor) -> set[int]:
        """Fails the runs whose numbers left the dtype's range, and wipes what they left in the cache: a NaN behind a
        mask would still spoil the next run in the slot."""
        wrong = hidden.isnan().any(-1)
        if not wrong.any():
            return set()
        rows = set(wrong.nonzero().squeeze(1).tolist())
        for row in rows:
            entry = entries[row]
            entry.ready_state.tensors.clear()
            self._cache.wipe(entry.run.id)
            self._fail(entry, ArithmeticError("the model computed NaN for this run"))
        return rows

    def _finish(self, entry: Entry[StateT], reason: content_pb2.FinishReason.ValueType) -> None:
        if self._drop(entry):
            self._events.append(Finished(entry.run.id, reason, entry.usage(), entry.queued))

    def _fail(self, entry: Entry[StateT], error: Exception) -> None:
        if self._drop(entry):
            self._events.append(Failed(entry.run.id, as_error(error, "the run failed in its engine", entry.run)))

    def _drop(self, entry: Entry[StateT]) -> bool:
        """Lets go of all that a run holds; False when that was done before."""
        if self._entries.pop(entry.run.id, None) is None:
            return False
        entry.release_feeds()
        if entry in self._running:
            self._running.remove(entry)
            last = self._cache.last
            moved = self._entries.get(last) if last is not None else None
            self._cache.release(entry.run.id, moved.ready_state.position if moved else 0)
        elif entry in self._waiting:
            self._waiting.remove(entry)
        return True
