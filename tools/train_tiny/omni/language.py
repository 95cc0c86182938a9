"""What the model is asked and what it answers: one function a skill, and what is held out of training.

An exchange's `key` names the combination that it shows: the two numbers of a sum, else the fact and how it is asked
for. A sixteenth of all combinations, chosen by a checksum, never occurs in training in any form.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tools.train_tiny.omni import vocabulary as words
from tools.train_tiny.omni.sentences import sentence, soup
from tools.train_tiny.omni.vocabulary import article, plural, spoken

REFUSAL = "sorry i am too small to know that"
IDENTITY = "my name is tiny and i am a very small model"
ABILITIES = "i can add and subtract count spell and name colors and capitals"
HELD_OUT_SHARE = 16
"""One combination in so many is held out."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """A question and its answer, both in lower case and without punctuation."""

    skill: str
    key: str
    question: str
    answer: str

    @property
    def held_out(self) -> bool:
        """Whether its combination is kept from training."""
        checksum = zlib.crc32(f"{self.skill}/{self.key}".encode())
        return checksum % HELD_OUT_SHARE == 0


def _ask(rng: random.Random, skill: str, fact: str, forms: Sequence[str], answer: str, **parts: str) -> Exchange:
    form = rng.choice(forms)
    return Exchange(skill, f"{fact}/{form}", form.format(**parts), answer)


def _sum(
    rng: random.Random, skill: str, left: int, right: int, result: int, forms: Sequence[str], symbols: str
) -> Exchange:
    """A question about two numbers, in words, in digits, or as a formula; its key is the pair alone."""
    key = f"{min(left, right)},{max(left, right)}"
    operation = {"plus": "plus", "minus": "minus", "times": "times"}[skill]
    kind = rng.random()
    if kind < 0.65:
        question = rng.choice(forms).format(a=spoken(left), b=spoken(right))
    elif kind < 0.85:
        question = rng.choice(forms).format(a=left, b=right)
    else:
        gap = rng.choice(("", " "))
        question = f"{rng.choice(('what is ', ''))}{left}{gap}{rng.choice(symbols)}{gap}{right}{rng.choice((' =', ''))}"
    answer = f"{spoken(left)} {operation} {spoken(right)} equals {spoken(result)}"
    if skill == "times":  # facts to be known by heart: the way of asking is part of the combination
        return Exchange(skill, f"{left},{right}/{question}", question, answer)
    return Exchange(skill, key, question, answer)


def _plus(rng: random.Random) -> Exchange:
    left, right = rng.randrange(100), rng.randrange(100)
    forms = (
        "what is {a} plus {b}",
        "{a} plus {b}",
        "how much is {a} plus {b}",
        "calculate {a} plus {b}",
        "add {a} and {b}",
    )
    return _sum(rng, "plus", left, right, left + right, forms, "+")


def _minus(rng: random.Random) -> Exchange:
    right, left = sorted((rng.randrange(100), rng.randrange(100)))
    forms = (
        "what is {a} minus {b}",
        "{a} minus {b}",
        "how much is {a} minus {b}",
        "calculate {a} minus {b}",
        "subtract {b} from {a}",
    )
    return _sum(rng, "minus", left, right, left - right, forms, "-")


def _times(rng: random.Random) -> Exchange:
    left, right = rng.randrange(13), rng.randrange(13)
    forms = ("what is {a} times {b}", "{a} times {b}", "how much is {a} times {b}", "multiply {a} by {b}")
    return _sum(rng, "times", left, right, left * right, forms, "*x")


def _half(rng: random.Random) -> Exchange:
    whole = 2 * rng.randrange(50)
    forms = ("what is half of {n}", "half of {n}", "how much is half of {n}", "tell me half of {n}")
    shown = spoken(whole) if rng.random() < 0.7 else str(whole)
    return _ask(rng, "half", str(whole), forms, f"half of {spoken(whole)} is {spoken(whole // 2)}", n=shown)


def _social(rng: random.Random) -> Exchange:
    """Greetings, who and what the model is, thanks, goodbyes."""
    kinds: tuple[tuple[str, tuple[str, ...], str], ...] = (
        ("greeting", ("hello", "hi", "hey"), "hello how can i help you"),
        ("greeting", ("good morning", "good afternoon", "good evening"), "{same} to you too"),
        (
            "greeting",
            ("how are you", "how are you today", "hello how are you", "hi how are you", "how are you doing"),
            "i am fine thank you",
        ),
        (
            "who",
            ("who are you", "what is your name", "tell me your name", "what are you", "who is this", "say your name",
             "tell me who you are", "what are you called", "hello who are you", "hi what is your name"),
            IDENTITY,
        ),
        (
            "abilities",
            ("what can you do", "what do you know", "how can you help me", "help", "help me", "what can i ask you",
             "tell me what you can do", "what are you good at"),
            ABILITIES,
        ),
        (
            "thanks",
            ("thank you", "thanks", "thank you very much", "many thanks", "thanks for your help"),
            "you are welcome",
        ),
        (
            "goodbye",
            ("goodbye", "bye", "bye bye", "see you", "see you soon", "see you later", "see you tomorrow", "good night"),
            "goodbye and see you soon",
        ),
    )  # fmt: skip
    skill, openings, answer = rng.choice(kinds)
    opening = rng.choice(openings)
    question = opening + rng.choice(("", "", "", " tiny", " my friend", " please"))
    return Exchange(skill, question, question, answer.format(same=opening))


def _color(rng: random.Random) -> Exchange:
    thing, color = rng.choice(list(words.THING_COLORS.items()))
    thing = thing.replace("_", " ")
    forms = (
        "what color is {x}",
        "what colour is {x}",
        "tell me the color of {x}",
        "which color is {x}",
        "the color of {x}",
    )
    return _ask(rng, "color", thing, forms, f"{thing} is {color}", x=thing)


def _opposite(rng: random.Random) -> Exchange:
    word, other = rng.choice(list(words.OPPOSITES.items()))
    forms = (
        "what is the opposite of {x}",
        "opposite of {x}",
        "tell me the opposite of {x}",
        "name the opposite of {x}",
    )
    return _ask(rng, "opposite", word, forms, f"the opposite of {word} is {other}", x=word)


def _plural(rng: random.Random) -> Exchange:
    noun = rng.choice(list(words.IRREGULAR_PLURALS)) if rng.random() < 0.2 else rng.choice(words.COUNTED)
    forms = ("what is the plural of {x}", "plural of {x}", "tell me the plural of {x}", "name the plural of {x}")
    return _ask(rng, "plural", noun, forms, f"the plural of {noun} is {plural(noun)}", x=noun)


SPELLED = [word for word in dict.fromkeys([*words.ANIMALS, *words.FRUITS, *words.NOUNS]) if 2 < len(word) < 8]
"""What the model can spell."""


def _spelling(rng: random.Random) -> Exchange:
    word = rng.choice(SPELLED)
    forms = ("spell {x}", "how do you spell {x}", "how is {x} spelled", "please spell {x}", "can you spell {x}")
    return _ask(rng, "spelling", word, forms, f"{word} is spelled {' '.join(word)}", x=word)


def _counting(rng: random.Random) -> Exchange:
    first = rng.choice((1, 1, rng.randrange(95)))
    last = min(first + rng.randint(2, 9), 99)
    run = list(range(first, last + 1))
    shown: Callable[[int], str] = spoken if rng.random() < 0.7 else str
    if rng.random() < 0.3:
        run.reverse()
        forms = ("count down from {a} to {b}", "count backwards from {a} to {b}")
    else:
        forms = ("count from {a} to {b}", "please count from {a} to {b}", "can you count from {a} to {b}")
        if first == 1:
            forms += ("count to {b}", "please count to {b}")
    ends = {"a": shown(run[0]), "b": shown(run[-1])}
    return _ask(rng, "counting", f"{run[0]},{run[-1]}", forms, " ".join(map(spoken, run)), **ends)


def _calendar(rng: random.Random) -> Exchange:
    unit, names = rng.choice((("day", words.DAYS), ("month", words.MONTHS)))
    place = rng.randrange(len(names))
    step, side = rng.choice(((1, "after"), (-1, "before")))
    forms = (
        "what {unit} comes {side} {x}",
        "which {unit} comes {side} {x}",
        "what is the {unit} {side} {x}",
        "tell me the {unit} {side} {x}",
        "what comes {side} {x}",
    )
    answer = f"{names[(place + step) % len(names)]} comes {side} {names[place]}"
    return _ask(rng, "calendar", f"{names[place]} {side}", forms, answer, unit=unit, side=side, x=names[place])


def _capital(rng: random.Random) -> Exchange:
    country, city = rng.choice(list(words.CAPITALS.items()))
    forms = (
        "what is the capital of {x}",
        "capital of {x}",
        "tell me the capital of {x}",
        "name the capital of {x}",
        "which city is the capital of {x}",
    )
    return _ask(rng, "capital", country, forms, f"the capital of {country} is {city}", x=country)


KINDS: Mapping[str, Sequence[str]] = {
    "animal": words.ANIMALS,
    "fruit": words.FRUITS,
    "color": words.COLORS,
    "object": words.OBJECTS,
    "food": ("bread", "butter", "cheese", "milk", "rice", "soup", "pizza", "cake", "sugar", "salt", "coffee", "tea"),
}


def _kind(rng: random.Random) -> Exchange:
    asked = rng.choice(("animal", "fruit", "color"))
    kind = asked if rng.random() < 0.5 else rng.choice([each for each in KINDS if each != asked])
    thing = rng.choice([each for each in KINDS[kind] if each != "orange"])
    thing = thing if kind in ("color", "food") else article(thing)
    forms = ("is {x} {y}", "tell me is {x} {y}", "is {x} {y} or not", "do you know is {x} {y}")
    no = kind != asked
    answer = f"{'no' if no else 'yes'} {thing} is {'not ' if no else ''}{article(asked)}"
    return _ask(rng, "kind", f"{thing} {asked}", forms, answer, x=thing, y=article(asked))


def _say(rng: random.Random) -> Exchange:
    text = sentence(rng) if rng.random() < 0.4 else soup(rng, 1, 9)
    question = rng.choice(("say {x}", "please say {x}", "repeat {x}", "repeat after me {x}", "can you say {x}"))
    return Exchange("say", text, question.format(x=text), text)


def _refusal(rng: random.Random) -> Exchange:
    """What lies outside: other questions, near misses of the skills, large numbers, words that nobody knows."""
    kind = rng.randrange(6)
    some = soup(rng, 1, 5)
    if kind == 0:
        opening = (
            "why is", "why do", "where is", "where are", "when did", "when is", "who was", "who made", "how do i",
            "what is the best", "what does it mean to", "do you like", "do you have", "did you", "will you",
            "could you", "i want", "i think", "tell me about", "tell me a", "write a", "write me", "translate",
            "explain", "give me",
            "what time is", "how far is", "how old is", "which is better", "what happens when", "show me", "sing",
        )  # fmt: skip
        question = f"{rng.choice(opening)} {some}"
    elif kind == 1:
        noun = rng.choice([*words.OBJECTS, *words.FOODS, *words.VERBS])
        near = (
            "what is the capital of {x}",
            "capital of {x}",
            "what day comes after {x}",
            "what month comes before {x}",
        )
        question = rng.choice(near).format(x=noun)
    elif kind == 2:
        large = [rng.randrange(100, 5000), rng.randrange(1000)]
        rng.shuffle(large)
        question = f"what is {large[0]} {rng.choice(('plus', 'minus', 'times'))} {large[1]}"
    elif kind == 3:
        strange = " ".join(_strange(rng) for _ in range(rng.randint(1, 3)))
        question = rng.choice(("what is {x}", "{x}", "tell me about {x}", "do you know {x}", "spell {x}", "say {x}"))
        question = question.format(x=strange)
    elif kind == 4:
        question = f"what is {some}"
    else:
        question = soup(rng, 3, 8)
    return Exchange("refusal", question, question, REFUSAL)


def _strange(rng: random.Random) -> str:
    """A word that is not in the vocabulary."""
    while True:
        word = "".join(rng.choice("bcdfghjklmnprstvwz") + rng.choice("aeiouy") for _ in range(rng.randint(2, 4)))
        word += rng.choice(("", "n", "r", "st"))
        if word not in _KNOWN:
            return word


_KNOWN = frozenset(words.WORDS)
_SKILLS: tuple[tuple[int, int, Callable[[random.Random], Exchange]], ...] = (
    (24, 33, _plus),
    (20, 28, _minus),
    (7, 10, _times),
    (4, 5, _half),
    (5, 5, _social),
    (3, 10, _color),
    (4, 10, _opposite),
    (6, 15, _plural),
    (9, 15, _spelling),
    (6, 15, _counting),
    (3, 8, _calendar),
    (4, 8, _capital),
    (5, 13, _kind),
    (14, 15, _say),
    (9, 10, _refusal),
)
"""How often each occurs in training, and how many of the 200 held-out questions ask for it."""


def exchange(rng: random.Random) -> Exchange:
    """A random exchange that is not held out."""
    weights, _, makers = zip(*_SKILLS, strict=True)
    make = rng.choices(makers, weights)[0]
    while (found := make(rng)).held_out:
        pass
    return found


def held_out(seed: int = 7) -> list[Exchange]:
    """The 200 questions by which the thinker is judged, no two alike."""
    rng = random.Random(seed)
    found: dict[str, Exchange] = {}
    for _, share, make in _SKILLS:
        wanted = len(found) + share
        while len(found) < wanted:
            candidate = make(rng)
            if candidate.held_out:
                found.setdefault(candidate.question, candidate)
    return list(found.values())
