"""The Python clients, on clusters of their own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from omni.rpc.errors import InvalidArgumentError, NotFoundError
from omnid.client import Generation, Omni


@pytest.fixture(scope="module")
def omni():
    with Omni("synthetic") as started:
        yield started


def test_one_prompt_gives_one_answer(omni: Omni) -> None:
    answer = omni.generate("synthetic", "go", outputs=["text", "audio"], params={"a": {"extra": {"tokens": 5}}})
    assert isinstance(answer, Generation)
    assert len(answer.token_ids) == 5
    assert [artifact.modality for artifact in answer.artifacts] == ["audio"]
    assert answer.finished.stages[0].usage.completion_tokens == 5


def test_many_prompts_are_answered_in_their_order(omni: Omni) -> None:
    answers = omni.generate("synthetic-single", [f"prompt {number}" for number in range(40)])
    assert isinstance(answers, list)
    assert len(answers) == 40
    assert all(len(answer.token_ids) == 16 for answer in answers)


def test_errors_have_their_types_and_the_cluster_goes_on(omni: Omni) -> None:
    with pytest.raises(NotFoundError, match="synthetic-single"):
        omni.generate("synthetic-singl", "go")
    with pytest.raises(InvalidArgumentError, match="tokens"):
        omni.generate("synthetic", "go", params={"a": {"extra": {"tokns": 5}}})
    with pytest.raises(InvalidArgumentError, match="outputs"):
        omni.generate("synthetic", "go", outputs=["smell"])
    assert omni.generate("synthetic", "go").text


def test_closing_ends_what_other_threads_have_at_work() -> None:
    begun = threading.Event()

    class Outputs(list[str]):
        def __iter__(self) -> Iterator[str]:
            begun.set()
            return super().__iter__()

    omni = Omni("synthetic")
    with ThreadPoolExecutor() as threads:
        endless = {"a": {"extra": {"delay": 600.0}}}
        working = threads.submit(omni.generate, "synthetic", "go", outputs=Outputs(["text"]), params=endless)
        assert begun.wait(30)
        for closing in [threads.submit(omni.close) for _ in range(3)]:
            closing.result(30)
        with pytest.raises(RuntimeError, match="the cluster is closed"):
            working.result(30)
    with pytest.raises(RuntimeError, match="the cluster is closed"):
        omni.generate("synthetic", "go")
