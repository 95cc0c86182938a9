"""What the thinker is asked: nothing that is held out is ever trained on, and all of it can be spoken."""

from __future__ import annotations

import random

from tools.train_tiny.omni import language, speech, tokenizer
from tools.train_tiny.omni.thinker import conversations
from tools.train_tiny.omni.vocabulary import HELD_OUT_SENTENCES, WORDS


def test_the_held_out_questions_are_200_and_no_training_asks_one() -> None:
    held = {each.question for each in language.held_out()}
    rng = random.Random(1)
    asked = {language.exchange(rng).question for _ in range(30_000)}
    assert len(held) == 200
    assert not held & asked


def test_a_held_out_sum_is_held_out_in_any_form_and_order() -> None:
    rng = random.Random(2)
    pairs = {each.key for each in language.held_out() if each.skill == "plus"}
    trained = (language.exchange(rng) for _ in range(30_000))
    assert pairs.isdisjoint(each.key for each in trained if each.skill == "plus")


def test_every_answer_is_made_of_known_words() -> None:
    rng = random.Random(3)
    known = set(WORDS)
    assert all(set(language.exchange(rng).answer.split()) <= known for _ in range(5_000))


def test_one_question_has_one_answer() -> None:
    rng = random.Random(4)
    answers: dict[str, str] = {}
    for _ in range(20_000):
        found = language.exchange(rng)
        assert answers.setdefault(found.question, found.answer) == found.answer


def test_the_voice_is_never_trained_on_a_held_out_sentence() -> None:
    spoken = [text for shard in range(20) for text in speech.texts(shard, 250)]
    assert not set(spoken) & set(HELD_OUT_SENTENCES)
    assert spoken[:250] == speech.texts(0, 250)


def test_shards_of_conversations_are_reproducible_and_differ() -> None:
    assert conversations(3, 20) == conversations(3, 20)
    assert conversations(3, 20) != conversations(4, 20)


def test_a_word_is_one_token_wherever_it_stands_and_however_it_is_written() -> None:
    tokens = tokenizer.make()
    first = tokens("user\nHello, my friend!").input_ids
    second = tokens("user\nmy friend says: hello").input_ids
    assert len(first) == 5
    assert first[2] == second[-1]
    assert tokens("what's twelve?").input_ids == tokens("What is  twelve").input_ids


def test_an_unknown_word_and_digits_fall_into_characters() -> None:
    tokens = tokenizer.make()
    assert tokens.convert_ids_to_tokens(tokens("42 zyx").input_ids) == ["4", "2", "\u0120", "z", "y", "x"]


def test_an_answer_is_decoded_without_the_blank_before_its_first_word() -> None:
    tokens = tokenizer.make()
    assert tokens.decode(tokens("\ntwo plus two").input_ids[1:]) == "two plus two"
