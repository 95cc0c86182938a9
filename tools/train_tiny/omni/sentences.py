"""Sentences for the voice: a third of them words in random order, so that words are learned and not sentences."""

from __future__ import annotations

import random

from tools.train_tiny.omni.vocabulary import (
    ADJECTIVES,
    ANIMALS,
    CAPITALS,
    COLORS,
    DAYS,
    FOODS,
    FRUITS,
    FURTHER,
    GOING,
    HELD_OUT_SENTENCES,
    LETTERS,
    MONTHS,
    NOUNS,
    ONES,
    PLURALS,
    VERBS,
    WORDS,
    spoken,
)

_LISTS = {
    "adjective": ADJECTIVES,
    "animal": ANIMALS,
    "color": COLORS,
    "day": DAYS,
    "food": FOODS,
    "fruit": FRUITS,
    "further": FURTHER,
    "going": GOING,
    "month": MONTHS,
    "noun": NOUNS,
    "one": ONES,
    "plural": PLURALS,
    "verb": VERBS,
    "country": list(CAPITALS),
}

_FORMS = """
the {noun} is {color}
a {color} {noun} and a {color} {animal}
my {fruit} is {adjective} and {color}
{day} comes after {day}
{month} comes before {month}
{month} is a {adjective} month
today is {day} the {one} of {month}
a {animal} is an animal
yes the {fruit} is a fruit
no a {animal} is not a {fruit}
the opposite of {adjective} is {adjective}
the plural of {noun} is {plural}
hello my {noun} how are you today
good morning {noun}
good evening everybody
thank you for the {food}
you are welcome my {noun}
sorry i am too {adjective} to know that
my name is {noun} and i am a {adjective} {noun}
i can {verb} and {verb}
please {verb} the {noun} now
goodbye and {verb} well
the {adjective} {noun} is near the {noun}
the {noun} is under the {adjective} {noun}
we {verb} the {adjective} {plural}
they are {going} with many {plural}
do you {verb} {food} or {food}
the {animal} and the {animal} {verb} in the {noun}
she was {going} when he found the {noun}
there are {number} {plural} in the {noun}
i want to {verb} your {adjective} {further}
every {further} has a {adjective} {further}
where is the {noun} of my {noun}
{number} plus {number} equals {number}
{number} minus {number} equals {number}
{number} times {number} equals {number}
half of {number} is {number}
{number} {number} {number} {number}
the capital of {country} is {city}
{city} is the capital of {country}
""".strip().split("\n")


def soup(rng: random.Random, shortest: int, longest: int) -> str:
    """Words of the vocabulary in random order."""
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(shortest, longest)))


def sentence(rng: random.Random) -> str:
    """A sentence that is none of those held out."""
    while (made := _make(rng)) in HELD_OUT_SENTENCES:
        pass
    return made


def _make(rng: random.Random) -> str:
    kind = rng.random()
    if kind < 0.36:
        return soup(rng, 2, 9)
    if kind < 0.42:
        word = rng.choice([each for each in (rng.choice(WORDS) for _ in range(4)) if len(each) < 9] or ["cat"])
        return f"{word} is spelled {' '.join(word)}"
    if kind < 0.45:
        return " ".join(rng.choice(LETTERS) for _ in range(rng.randint(3, 8)))
    if kind < 0.49:
        first = rng.randrange(92)
        run = [spoken(number) for number in range(first, first + rng.randint(3, 8))]
        return " ".join(run if rng.random() < 0.7 else run[::-1])
    form = rng.choice(_FORMS)
    country = rng.choice(list(CAPITALS))
    while "{" in form:
        before, _, rest = form.partition("{")
        name, _, after = rest.partition("}")
        if name == "number":
            chosen = spoken(rng.randrange(100) if rng.random() < 0.85 else rng.randrange(199))
        elif name == "city":
            chosen = CAPITALS[country]
        elif name == "country":
            chosen = country
        else:
            chosen = rng.choice(_LISTS[name])
        form = before + chosen + after
    return form
