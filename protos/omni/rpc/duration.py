"""Durations of the contract as seconds, and back."""

from google.protobuf.duration_pb2 import Duration


def seconds_of(duration: Duration) -> float:
    """The length of `duration`, in seconds; 0 for one that is not set."""
    return duration.ToNanoseconds() / 1e9


def duration_of(seconds: float) -> Duration:
    """A duration of so many seconds, to the nanosecond."""
    duration = Duration()
    duration.FromNanoseconds(round(seconds * 1e9))
    return duration
