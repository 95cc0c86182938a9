"""A few threads that encode artifacts beside the engine's own."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

Job = Callable[[], None]

_log = logging.getLogger(__name__)


class EncodePool:
    """Runs jobs on worker threads. Jobs of one lane run one after the other in the order they came.

    At most `pending` jobs are taken in and not yet done: beyond that `submit` blocks its caller, so that an engine
    slows down to what its encoders can do instead of piling up raw pictures and sound.
    """

    def __init__(self, workers: int = 2, pending: int = 64) -> None:
        self._executor = ThreadPoolExecutor(workers, thread_name_prefix="encode")
        self._room = threading.BoundedSemaphore(pending)

    def lane(self) -> Lane:
        """A new sequence of jobs, one for each artifact that is encoded bit by bit."""
        return Lane(self._executor, self._room)

    def stop(self) -> None:
        """Waits for the jobs at work and drops those that have not begun. Called when nobody submits any more."""
        self._executor.shutdown(wait=True, cancel_futures=True)


class Lane:
    """Jobs in order. `submit` may be called from any one thread at a time."""

    def __init__(self, executor: ThreadPoolExecutor, room: threading.BoundedSemaphore) -> None:
        self._executor = executor
        self._room = room
        self._lock = threading.Lock()
        self._jobs: deque[Job] = deque()
        """Guarded by `_lock`, as is `_busy`."""
        self._busy = False

    def submit(self, job: Job) -> None:
        """Queues a job. It reports its own failures; one that it lets out is logged, and the lane goes on.

        Raises:
            RuntimeError: the pool has stopped.
        """
        self._room.acquire()
        with self._lock:
            self._jobs.append(job)
            if self._busy:
                return
            self._busy = True
        try:
            self._executor.submit(self._run)
        except RuntimeError:
            with self._lock:
                self._jobs.clear()
                self._busy = False
            self._room.release()
            raise

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._jobs:
                    self._busy = False
                    return
                job = self._jobs.popleft()
            try:
                job()
            except Exception:
                _log.exception("an encoding job failed")
            finally:
                self._room.release()
