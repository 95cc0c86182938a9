"""The diffusion engine: one thread, one denoising step of one run at a time.

The server's loop talks to the thread through a mailbox that is read before every step, so a cancel takes effect at the
next one. Finished pictures go to a pool of encoders, which deliver them, and the run's end, themselves: a picture never
waits for somebody else's step.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Generic

from omni.rpc import logs
from omni.rpc.errors import OmniError, Reason
from omni.v1 import content_pb2
from stage_server.engines.base import Deliver, Event, Failed, Feed, Finished, Load, Output, Run
from stage_server.engines.diffusion.model import ConditioningT, DiffusionModel, SampleT
from stage_server.engines.diffusion.params import picture_request
from stage_server.engines.diffusion.task import Schedule, Task
from stage_server.engines.errors import as_error
from stage_server.engines.thread import EngineThread
from stage_server.output.image import encode_image, mime_type
from stage_server.output.pieces import split
from stage_server.output.pool import EncodePool

if TYPE_CHECKING:
    from numpy.typing import NDArray

_log = logs.get(__name__)


class DiffusionEngine(Generic[ConditioningT, SampleT]):
    """An `Engine` (see engines/base.py) for diffusion stages."""

    def __init__(self, model: DiffusionModel[ConditioningT, SampleT], *, max_running: int) -> None:
        self._model = model
        self._thread = EngineThread("diffusion-engine", self._turn)
        self._encoders = EncodePool()
        # Owned by the engine's thread from here on; `load` only reads lengths and counters.
        self._schedule: Schedule[ConditioningT, SampleT] = Schedule(max_running)
        self._tasks: dict[int, Task[ConditioningT, SampleT]] = {}
        """Every run that has not ended, those whose pictures are being encoded too."""
        self._events: list[Event] = []
        self._steps = 0
        self._units = 0

    def start(self, deliver: Deliver) -> None:
        """Loads the model, then begins to step."""
        self._limits = self._model.load()
        self._deliver = deliver
        self._thread.start()

    def submit(self, run: Run) -> None:
        """Takes a run in, behind those that wait."""
        if run.tensors:
            raise OmniError(Reason.BAD_REQUEST, f"this stage publishes no tensors, asked: {sorted(run.tensors)}")
        request = picture_request(run, self._limits)
        task: Task[ConditioningT, SampleT] = Task(run, request, self._encoders.lane())
        self._thread.put(lambda: self._take(task))

    def feed(self, run: int, feed: Feed) -> None:
        """Lets go of the input at once: a picture is drawn from its prompt."""
        feed.discard()

    def cancel(self, run: int) -> None:
        self._thread.put(lambda: self._cancel(run))

    def hold(self, run: int, held: bool) -> None:
        self._thread.put(lambda: self._hold(run, held))

    def load(self) -> Load:
        waiting = self._schedule.waiting
        return Load(len(self._tasks) - waiting, waiting, self._steps, self._units, not self._thread.idle)

    def stop(self) -> None:
        """Ends stepping; runs at work are dropped."""
        loaded = self._thread.stop()
        self._encoders.stop()
        if loaded:
            self._model.unload()

    # In the engine's thread.

    def _turn(self) -> None:
        self._thread.read(wait=not self._schedule.ready)
        if (task := self._schedule.next()) is not None:
            self._step(task)
        if self._events:
            events, self._events = self._events, []
            self._deliver(events)

    def _take(self, task: Task[ConditioningT, SampleT]) -> None:
        self._tasks[task.run.id] = task
        self._schedule.add(task)

    def _cancel(self, run: int) -> None:
        if (task := self._tasks.get(run)) is not None:
            self._drop(task)
            if task.end():
                cancelled = content_pb2.FINISH_REASON_CANCELLED
                self._events.append(Finished(run, cancelled, task.usage(task.picture), task.queued))

    def _hold(self, run: int, held: bool) -> None:
        if (task := self._tasks.get(run)) is not None:
            task.held = held

    def _step(self, task: Task[ConditioningT, SampleT]) -> None:
        """Does the run's next piece of work: prompt, one denoising step, or decoding."""
        try:
            self._work(task)
        except Exception as error:
            self._fail(task, error)
        self._steps += 1

    def _work(self, task: Task[ConditioningT, SampleT]) -> None:
        if task.conditioning is None:
            task.queued = time.monotonic() - task.submitted
            task.conditioning = self._model.encode(task.request)
            self._events.append(Output(task.run.id, progress=task.progress()))
        elif task.sample is None:
            task.sample = self._model.begin(task.conditioning, task.request, task.picture)
            self._advance(task, task.sample)
        elif task.sample.step < task.sample.steps:
            self._advance(task, task.sample)
        else:
            picture = self._model.decode(task.sample)
            task.sample = None
            self._finish_picture(task, picture)

    def _advance(self, task: Task[ConditioningT, SampleT], sample: SampleT) -> None:
        self._model.advance(sample)
        task.steps += 1
        self._units += 1
        self._events.append(Output(task.run.id, progress=task.progress()))

    def _finish_picture(self, task: Task[ConditioningT, SampleT], picture: NDArray[Any]) -> None:
        """Hands a picture to the encoders. The run's earlier events have been delivered, so theirs come after."""
        index = task.picture
        task.picture += 1
        if task.drawn:
            task.conditioning = None
            self._schedule.remove(task)
        task.lane.submit(lambda: self._encode(task, index, picture))

    def _fail(self, task: Task[ConditioningT, SampleT], error: Exception) -> None:
        self._drop(task)
        if task.end():
            self._events.append(Failed(task.run.id, as_error(error, "the picture could not be drawn", task.run)))

    def _drop(self, task: Task[ConditioningT, SampleT]) -> None:
        self._tasks.pop(task.run.id, None)
        self._schedule.remove(task)
        task.conditioning = None
        task.sample = None

    # In an encoder's thread.

    def _encode(self, task: Task[ConditioningT, SampleT], index: int, picture: NDArray[Any]) -> None:
        """Delivers a picture, and the run's end after its last one."""
        run, events = task.run, list[Event]()
        last = index + 1 == task.request.outputs
        try:
            if run.output:
                events.append(Output(run.id, media=self._pieces(task, index, picture)))
            if last:
                usage = task.usage(task.request.outputs)
                events.append(Finished(run.id, content_pb2.FINISH_REASON_STOP, usage, task.queued))
        except Exception as error:
            last, events = True, [Failed(run.id, as_error(error, "the picture could not be encoded", run))]
        with task.gate:
            if task.ended:
                return
            task.ended = last
            self._deliver(events)
        if last:
            self._thread.put(lambda: self._drop(task))

    def _pieces(
        self, task: Task[ConditioningT, SampleT], index: int, picture: NDArray[Any]
    ) -> list[content_pb2.MediaPiece]:
        media_format = task.request.media_format
        return split(
            encode_image(picture, media_format),
            modality=content_pb2.MODALITY_IMAGE,
            mime_type=mime_type(media_format),
            artifact=index,
        )
