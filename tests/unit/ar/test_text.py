"""Text as it comes: whole characters, no stop string, nothing lost."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stage_server.engines.ar.text import TextStream
from tools.tiny import tokenizer as tokens

TOKENIZER: Any = tokens.make(1024)
SENTENCE = "Où est 世界? 🙂 The cat sat on the mat."


def stream(ids: list[int], stop: tuple[str, ...] = ()) -> tuple[list[str], TextStream]:
    text = TextStream(TOKENIZER, stop)
    pieces = []
    for token in ids:
        pieces.append(text.push(token))
        if text.stopped:
            return pieces, text
    return [*pieces, text.finish()], text


def test_pieces_are_whole_characters_and_join_to_the_text() -> None:
    ids = TOKENIZER.encode(SENTENCE)
    pieces, _ = stream(ids)
    assert "".join(pieces) == SENTENCE
    assert not any("�" in piece for piece in pieces)
    assert len([piece for piece in pieces if piece]) > 5


def test_a_character_cut_off_by_the_end_is_shown_as_broken() -> None:
    ids = TOKENIZER.encode("a🙂")[:-1]
    assert "".join(stream(ids)[0]) == TOKENIZER.decode(ids)


def test_special_tokens_are_not_text() -> None:
    ids = [*TOKENIZER.encode("one"), TOKENIZER.eos_token_id, *TOKENIZER.encode(" two")]
    assert "".join(stream(ids)[0]) == "one two"


@pytest.mark.parametrize("stop", ["the mat", "T", "世", "cat sat on the mat.", "at s"])
def test_text_ends_before_the_first_stop_string_and_no_part_of_it_leaks(stop: str) -> None:
    pieces, text = stream(TOKENIZER.encode(SENTENCE), ("never there", stop))
    assert text.stopped
    assert "".join(pieces) == SENTENCE[: SENTENCE.index(stop)]
    assert text.finish() == ""


def test_what_was_held_for_a_stop_string_comes_when_it_does_not() -> None:
    ids = TOKENIZER.encode("on the ma")
    pieces, text = stream(ids, ("the mat",))
    assert not text.stopped
    assert "".join(pieces[:-1]) == "on "
    assert "".join(pieces) == "on the ma"


def test_a_stop_string_is_not_looked_for_before_min_tokens() -> None:
    text = TextStream(TOKENIZER, ("cat",))
    early = "".join(text.push(token, may_stop=False) for token in TOKENIZER.encode("cat"))
    assert early == "cat"
    late = "".join(text.push(token) for token in TOKENIZER.encode(" a cat"))
    assert text.stopped
    assert late == " a "


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=40), st.text(min_size=1, max_size=4))
def test_any_text_streams_as_it_is_up_to_any_stop_string(words: str, stop: str) -> None:
    ids = TOKENIZER.encode(words)
    whole = TOKENIZER.decode(ids, skip_special_tokens=True)
    pieces, _ = stream(ids, (stop,))
    assert "".join(pieces) == whole.split(stop)[0]
