"""What libraries say goes where our own logs go, without what is known to mean nothing."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from stage_server.libraries import take_over


class Log(logging.Handler):
    """Where our own logs go."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


@pytest.fixture
def log() -> Iterator[Log]:
    made = Log()
    logging.getLogger().addHandler(made)
    yield made
    logging.getLogger().removeHandler(made)


@pytest.mark.parametrize("library", ["transformers", "diffusers"])
def test_a_warning_of_a_library_goes_through_our_logs_once(library: str, log: Log) -> None:
    take_over(library)
    take_over(library)
    logging.getLogger(f"{library}.loading").warning("a weight is missing")
    assert log.said == ["a weight is missing"]


def test_what_is_known_to_mean_nothing_is_not_said(log: Log) -> None:
    take_over("transformers")
    rope = logging.getLogger("transformers.modeling_rope_utils")
    rope.warning("Unrecognized keys in `rope_parameters` for 'rope_type'='default': {'mrope_section'}")
    rope.warning("Missing required keys")
    assert log.said == ["Missing required keys"]
