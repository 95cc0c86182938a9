"""The tokenizer, and captions composed as token ids where the pictures are drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tools.train_tiny.image import grammar as g

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from tools.train_tiny.image.sampling import Draws

LENGTH = 32
"""Tokens of a caption: Z-Image pads each to a multiple of 32 with a learned token, so all captions have one shape."""
_WIDTH = 7
"""Tokens of a phrase at most."""
DROPPED = 0.1
"""Share of captions that are empty, for guidance."""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE in lower case in which every word of the grammar is one token; Qwen's chat markers around it."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    made = Tokenizer(models.BPE())
    made.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1024,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        min_frequency=1,
        show_progress=False,
    )
    made.train_from_iterator([" ".join(g.words())] * 4, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token=special[0],
        eos_token=special[2],
        padding_side="right",
        model_max_length=512,
    )
    tokenizer.add_special_tokens({"additional_special_tokens": special[1:2]})
    tokenizer.chat_template = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
    return tokenizer


def tokenize(tokenizer: PreTrainedTokenizerFast, texts: list[str], device: torch.device) -> tuple[Tensor, Tensor]:
    """As the pipeline does: ids [n, LENGTH] and which of them are text, bool."""
    turns = [
        tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True)
        for text in texts
    ]
    found = tokenizer(turns, padding="max_length", max_length=LENGTH, truncation=True, return_tensors="pt")
    return found.input_ids.to(device), found.attention_mask.bool().to(device)


class Captions:
    """Composes token ids from tables, so that a batch needs no tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, device: torch.device) -> None:
        self._tokenizer = tokenizer
        self._device = device
        self._rows: list[list[int]] = []
        self._base: dict[str, int] = {}
        nothing = self._add([])
        articles = self._table("article", [["a"], ["an"]])
        assert articles is not None
        for name, table in (
            ("colour", [[word] for word in g.COLOURS]),
            ("background", [[word] for word in g.BACKGROUNDS]),
            ("shape", g.SHAPES),
            ("plural", g.PLURALS),
            ("size", g.SIZES),
            ("relation", g.RELATIONS),
            ("count", g.COUNTS),
            ("digit", g.DIGITS),
            ("thing", [[g.thing_phrase(i, c)] for i in range(len(g.THINGS)) for c in range(len(g.COLOURS))]),
            ("light", [[g.light_phrase(i)] for i in range(len(g.LIGHTS))]),
        ):
            self._table(name, table)
        literal = {"": nothing}
        markers = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
        begin, end = self._add([markers[0]]), self._add([markers[1]])
        longest = max(len(text.split()) for texts in g.TEMPLATES for text in texts) + 2
        self._codes: list[Tensor] = []
        for texts in [*g.TEMPLATES, [""]]:
            codes = []
            for text in texts:
                code = [len(g.SLOTS) + begin]
                for word in text.split():
                    if word in g.SLOTS:
                        code.append(g.SLOTS.index(word))
                        continue
                    if word not in literal:
                        literal[word] = self._add(self._ids(word))
                    code.append(len(g.SLOTS) + literal[word])
                code.append(len(g.SLOTS) + end)
                codes.append(code + [len(g.SLOTS) + nothing] * (longest - len(code)))
            self._codes.append(torch.tensor(codes, device=device))
        self._phrases = torch.tensor([row + [-1] * (_WIDTH - len(row)) for row in self._rows], device=device)
        self._nothing = nothing

    def __call__(self, draws: Draws, *, dropped: float = DROPPED) -> tuple[Tensor, Tensor]:
        """Ids [n, LENGTH] and which of them are text, for pictures of one kind."""
        count = len(draws.template)
        code = self._codes[draws.kind][draws.template]
        empty = self._codes[-1][0]
        code = torch.where(torch.rand(count, 1, device=self._device) < dropped, empty, code)
        values = torch.stack([self._value(slot, draws, count) for slot in g.SLOTS], 1)
        slots = len(g.SLOTS)
        phrase = torch.where(code < slots, values.gather(1, code.clamp(max=slots - 1)), code - slots)
        tokens = self._phrases[phrase].flatten(1)
        order = (tokens < 0).long() * tokens.shape[1] + torch.arange(tokens.shape[1], device=self._device)
        tokens = tokens.gather(1, order.argsort(1)[:, :LENGTH])
        return torch.where(tokens < 0, self._tokenizer.pad_token_id, tokens), tokens >= 0

    def _value(self, slot: str, draws: Draws, count: int) -> Tensor:
        """The phrase that fills a slot, for each picture."""
        variant = draws.variant if draws.variant is not None else torch.randint(0, 3, (count,), device=self._device)
        place = int(slot[1]) - 1 if slot[1].isdigit() else 0
        at = self._base
        if slot[0] == "A":
            vowel = draws.colour[:, place] == g.COLOURS.index("orange")
            return at["article"] + (vowel & (draws.size[:, place] == 0)).long()
        if slot == "TH":
            return at["thing"] + draws.thing * len(g.COLOURS) + draws.colour[:, 0]
        single = {
            "C": ("colour", draws.colour[:, place]),
            "BG": ("background", draws.background),
            "LI": ("light", draws.light),
        }
        triple = {
            "S": ("size", draws.size[:, place]),
            "K": ("shape", draws.shape[:, place]),
            "RR": ("relation", draws.relation),
            "NN": ("count", draws.count),
            "KP": ("plural", draws.shape[:, 0]),
            "DD": ("digit", draws.digit),
        }
        key = slot if slot in {**single, **triple} else slot[0]
        if key in single:
            name, value = single[key]
            return at[name] + value
        name, value = triple[key]
        return at[name] + value * 3 + variant

    def _table(self, name: str, table: list[list[str]]) -> int:
        self._base[name] = len(self._rows)
        for row in table:
            for phrase in row:
                self._add(self._ids(phrase))
        return self._base[name]

    def _ids(self, phrase: str) -> list[int]:
        if phrase in (",", "."):  # written without a space before it
            return [self._tokenizer.convert_tokens_to_ids(phrase)]
        return list(self._tokenizer(phrase, add_special_tokens=False).input_ids) if phrase else []

    def _add(self, row: list[int]) -> int:
        assert len(row) <= _WIDTH, row
        self._rows.append(row)
        return len(self._rows) - 1
