"""What libraries say goes where our own logs go, without what is known to mean nothing."""

from __future__ import annotations

import logging

import pytest

from stage_server.libraries import take_over


@pytest.mark.parametrize("library", ["transformers", "diffusers"])
def test_a_warning_of_a_library_goes_through_our_logs_once(library: str, caplog: pytest.LogCaptureFixture) -> None:
    take_over(library)
    take_over(library)
    logging.getLogger(f"{library}.loading").warning("a weight is missing")
    assert [record.getMessage() for record in caplog.records] == ["a weight is missing"]
    assert not logging.getLogger(library).handlers


def test_what_is_known_to_mean_nothing_is_not_said(caplog: pytest.LogCaptureFixture) -> None:
    take_over("transformers")
    rope = logging.getLogger("transformers.modeling_rope_utils")
    rope.warning("Unrecognized keys in `rope_parameters` for 'rope_type'='default': {'mrope_section'}")
    rope.warning("Missing required keys")
    assert [record.getMessage() for record in caplog.records] == ["Missing required keys"]
