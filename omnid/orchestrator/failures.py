"""Why requests fail, in words that name what it is about: the stage, the edge, the replica, the bound."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omnid.orchestrator.ports import Failure

if TYPE_CHECKING:
    from omnid.orchestrator.plan import RequestPlan
    from omnid.orchestrator.run import Run


def too_many(plan: RequestPlan, at_work: int, waiting: int) -> Failure:
    """It was not taken in."""
    message = f"model {plan.model} has {at_work} requests at work and {waiting} waiting; both are its limits"
    return Failure("QUEUE_FULL", message)


def no_turn(plan: RequestPlan) -> Failure:
    """Others were at work for as long as it may wait for its turn."""
    message = f"waited {plan.queue:g} s for its turn (bound queue): {plan.max_requests} are at work"
    return Failure("STAGE_TIMEOUT", message, plan.stages[0].name)


def out_of_time(timeout: float) -> Failure:
    """The time of the whole request has passed."""
    return Failure("DEADLINE", f"the request's time of {timeout:g} s has passed")


def no_replica(run: Run, missing: str) -> Failure:
    """No replica took a run within its bound; `missing` says why, or is empty when all are full."""
    message = f"stage {run.name} found no replica within {run.stage.waits.queue:g} s (bound queue)"
    reason = "NO_REPLICA" if missing else "STAGE_TIMEOUT"
    return Failure(reason, f"{message}: {missing or 'all are full'}", run.stage.name)


def too_slow(run: Run) -> Failure:
    """A run made no output within its bound."""
    which = "gap" if run.next else "first_output"
    message = f"stage {run.name} made no output for {run.wait:g} s (bound {which})"
    return Failure("STAGE_TIMEOUT", message, run.stage.name, run.replica)


def lost(run: Run, *, begun: bool) -> Failure:
    """The replica of a run has gone: after the run had `begun`, or as an earlier one with the same run."""
    when = "after its run had begun" if begun else "like another that its run was begun on"
    message = f"replica {run.replica} of stage {run.stage.name} was lost {when}"
    return Failure("REPLICA_LOST", message, run.stage.name, run.replica)


def broken_sequence(run: Run, first: int) -> Failure:
    """Output `first` came where another one was due, or a message without any."""
    kind = "a gap" if first > run.next else "an overlap" if first < run.next else "a message of no outputs"
    message = f"{run.readers}: {kind}, output {first} of {run.name} came where {run.next} was due"
    return Failure("SEQUENCE_BROKEN", message, run.stage.name, run.replica)


def wrong_count(run: Run, count: int) -> Failure:
    """A run says that it made `count` outputs, and another number came."""
    message = f"{run.readers}: {run.name} says it made {count} outputs, {run.next} came"
    return Failure("COUNT_MISMATCH", message, run.stage.name, run.replica)


def cancelled_by_nobody(run: Run) -> Failure:
    """A run ended as cancelled of itself."""
    message = f"stage {run.name} ended its run as cancelled, though nobody cancelled it"
    return Failure("STAGE_FAILED", message, run.stage.name, run.replica)
