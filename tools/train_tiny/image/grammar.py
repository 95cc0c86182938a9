"""What the tiny image model is asked for: kinds of pictures, their words, and the sentences that name them.

A sentence is a template whose slots are filled with phrases. The same tables make the sentence as text, for a person or
a test, and as token ids in a batch on the GPU (`captions.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

PALETTE = {
    "red": (220, 30, 30),
    "green": (30, 160, 50),
    "blue": (30, 60, 220),
    "yellow": (245, 215, 30),
    "purple": (140, 40, 170),
    "orange": (245, 135, 20),
    "pink": (250, 130, 190),
    "cyan": (40, 200, 220),
    "white": (250, 250, 250),
    "black": (15, 15, 15),
    "gray": (128, 128, 128),
    "brown": (110, 70, 40),
    "day": (150, 205, 245),
    "night": (25, 30, 80),
    "grass": (95, 175, 70),
    "sea": (45, 110, 190),
}
"""Red, green and blue from 0 to 255; the last four have no word of their own, scenes are painted with them."""
NAMES = list(PALETTE)
COLOURS = NAMES[:8]
BACKGROUNDS = NAMES[8:12]
WHITE = 0
"""Among the backgrounds: the one of a picture whose sentence names none."""

# Of each value all words that mean it, three a value; the first is the plain one.
SHAPES = [
    ["circle", "ball", "disc"],
    ["square", "box", "block"],
    ["triangle"] * 3,
    ["cross", "plus", "cross"],
    ["star"] * 3,
]
PLURALS = [
    ["circles", "balls", "discs"],
    ["squares", "boxes", "blocks"],
    ["triangles"] * 3,
    ["crosses"] * 3,
    ["stars"] * 3,
]
SIZES = [[""] * 3, ["small", "little", "tiny"], ["large", "big", "huge"]]
RELATIONS = [
    ["above", "over", "on top of"],
    ["below", "under", "beneath"],
    ["left of", "to the left of", "on the left of"],
    ["right of", "to the right of", "on the right of"],
]
COUNTS = [["two", "2", "two"], ["three", "3", "three"], ["four", "4", "four"], ["five", "5", "five"]]
DIGITS = [
    [str(value), word, str(value)]
    for value, word in enumerate(["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"])
]
THINGS = ["house", "boat", "tree"]
LIGHTS = [("yellow", "sun"), ("orange", "sun"), ("red", "sun"), ("white", "moon"), ("white", "cloud")]
"""What stands in the sky; by the moon it is night."""

ONE, TWO, THREE, COUNT, DIGIT, SCENE = range(6)
KINDS = ("one", "two", "three", "count", "digit", "scene")

_ONE, _TWO = "A1 S1 C1 K1", "A1 S1 C1 K1 RR A2 S2 C2 K2"
_THREE = "A1 C1 K1 , A2 C2 K2 and A3 C3 K3"
TEMPLATES: list[list[str]] = [
    [
        f"{_ONE} on a BG background",
        f"{_ONE} on a BG background .",
        "S1 C1 K1 on BG",
        "S1 C1 K1 , BG background",
        f"a picture of {_ONE} on a BG background",
        f"draw {_ONE} on a BG background",
        f"BG background with {_ONE}",
        f"there is {_ONE} on a BG background",
        "one S1 C1 K1 on a BG canvas",
        "the S1 C1 K1 on BG",
        _ONE,
        "the S1 C1 K1",
        f"draw {_ONE} .",
        f"a picture of {_ONE}",
    ],
    [
        f"{_TWO} on a BG background",
        f"{_TWO} on a BG background .",
        "S1 C1 K1 RR S2 C2 K2 on BG",
        "S1 C1 K1 RR S2 C2 K2 , BG background",
        f"a picture of {_TWO} on a BG background",
        f"draw {_TWO} on a BG background",
        f"BG background with {_TWO}",
        "the S1 C1 K1 is RR the S2 C2 K2 on a BG background",
        _TWO,
        f"a picture of {_TWO}",
        f"draw {_TWO} .",
        "the S1 C1 K1 is RR the S2 C2 K2",
    ],
    [
        f"{_THREE} on a BG background",
        f"{_THREE} on a BG background .",
        "C1 K1 , C2 K2 and C3 K3 on BG",
        f"draw {_THREE} on a BG background",
        f"BG background with {_THREE}",
        _THREE,
        f"a picture of {_THREE}",
        "C1 K1 , C2 K2 , C3 K3",
    ],
    [
        "NN C1 KP on a BG background",
        "NN C1 KP on a BG background .",
        "NN C1 KP on BG",
        "draw NN C1 KP on a BG background",
        "there are NN C1 KP on a BG background",
        "BG background with NN C1 KP",
        "NN C1 KP",
        "a picture of NN C1 KP",
        "draw NN C1 KP .",
    ],
    [
        "the digit DD in C1 on a BG background",
        "the digit DD in C1 on a BG background .",
        "the number DD in C1 on BG",
        "A1 C1 DD on a BG background",
        "digit DD , C1 , BG background",
        "the digit DD in C1",
        "the number DD in C1",
        "A1 C1 DD",
        "draw the digit DD in C1 .",
    ],
    ["TH under LI", "a picture of TH under LI", "draw TH under LI .", "LI over TH", "TH and LI", "TH under LI ."],
]
"""By kind; the first is the plain one."""
SLOTS = ["A1", "S1", "C1", "K1", "RR", "A2", "S2", "C2", "K2", "A3", "C3", "K3", "NN", "KP", "DD", "TH", "LI", "BG"]


@dataclass(frozen=True, slots=True)
class Wanted:
    """One picture as it is asked for. Values are indices into the tables above."""

    kind: int
    shapes: tuple[int, ...] = ()
    colours: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()
    """0: not said, 1: small, 2: large."""
    relation: int = 0
    count: int = 0
    """Of COUNTS."""
    digit: int = 0
    thing: int = 0
    light: int = 0
    background: int = WHITE


def held_out(first: tuple[int, int], second: tuple[int, int]) -> bool:
    """Whether a pair of (colour, shape), in either order, is kept out of every training picture; one in ten is.

    No pair of equals is.
    """
    low, high = sorted((first[0] * len(SHAPES) + first[1], second[0] * len(SHAPES) + second[1]))
    return (7 * low + 3 * high + 1) % 10 == 0


def names_background(template: str) -> bool:
    """Whether a template says what is behind the things; else it is white, or a sky."""
    return "BG" in template.split()


def thing_phrase(thing: int, colour: int) -> str:
    """A tree is green by nature; a boat needs its sea."""
    if THINGS[thing] == "tree":
        return "a tree"
    article = _article(COLOURS[colour])
    return f"{article} {COLOURS[colour]} {THINGS[thing]}" + (" on the sea" if THINGS[thing] == "boat" else "")


def light_phrase(light: int) -> str:
    """Such as: a yellow sun."""
    return f"{_article(LIGHTS[light][0])} {' '.join(LIGHTS[light])}"


def _article(word: str) -> str:
    return "an" if word == "orange" else "a"


def sentence(wanted: Wanted, template: str | None = None, variant: int = 0) -> str:
    """The words for a picture; `variant` from 0 to 2 chooses among the words that mean the same."""
    sizes = (*wanted.sizes, 0, 0, 0)
    filled: dict[str, str] = {"BG": BACKGROUNDS[wanted.background], "RR": RELATIONS[wanted.relation][variant]}
    for place, (shape, colour) in enumerate(zip(wanted.shapes, wanted.colours, strict=True)):
        said = SIZES[sizes[place]][variant]
        filled |= {
            f"A{place + 1}": _article(said or COLOURS[colour]),
            f"S{place + 1}": said,
            f"C{place + 1}": COLOURS[colour],
            f"K{place + 1}": SHAPES[shape][variant],
        }
    if wanted.kind == COUNT:
        filled |= {"NN": COUNTS[wanted.count][variant], "KP": PLURALS[wanted.shapes[0]][variant]}
    elif wanted.kind == DIGIT:
        filled |= {
            "DD": DIGITS[wanted.digit][variant],
            "A1": _article(COLOURS[wanted.colours[0]]),
            "C1": COLOURS[wanted.colours[0]],
        }
    elif wanted.kind == SCENE:
        filled |= {"TH": thing_phrase(wanted.thing, wanted.colours[0]), "LI": light_phrase(wanted.light)}
    words = [filled.get(word, word) for word in (template or TEMPLATES[wanted.kind][0]).split()]
    return " ".join(word for word in words if word).replace(" ,", ",").replace(" .", ".")


def words() -> list[str]:
    """Every word of the grammar, in order."""
    found = {*COLOURS, *BACKGROUNDS, "a", "an"}
    for table in (SHAPES, PLURALS, SIZES, RELATIONS, COUNTS, DIGITS):
        found |= {word for row in table for phrase in row for word in phrase.split()}
    found |= {word for templates in TEMPLATES for text in templates for word in text.split() if word not in SLOTS}
    phrases = [thing_phrase(thing, colour) for thing in range(len(THINGS)) for colour in range(len(COLOURS))]
    phrases += [light_phrase(light) for light in range(len(LIGHTS))]
    return sorted(found | {word for phrase in phrases for word in phrase.split()})
