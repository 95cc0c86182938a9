"""The tokenizer: each word of the vocabulary one token, everything else bytes, Qwen's chat layout around it.

It reads text as it would be spoken: lower case, no punctuation. A word is the same token at the begin of a turn as
within it, so that the talker has one embedding a word to learn a pronunciation for.
"""

from __future__ import annotations

from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tools.tiny.tokenizer import CHAT_TEMPLATE, SPECIAL
from tools.train_tiny.omni.vocabulary import WORDS

SIZE = 2048
ROLES = ("system", "user", "assistant")
NAMED = {
    "image_token": "<|image_pad|>",
    "audio_token": "<|audio_pad|>",
    "video_token": "<|video_pad|>",
    "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
    "audio_bos_token": "<|audio_start|>",
    "audio_eos_token": "<|audio_end|>",
}
_SPACE = "\u0120"
"""How a blank is written in a byte-level vocabulary."""


def make() -> Any:
    """The tokenizer, of exactly `SIZE` tokens, the special ones last."""
    entries = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *ROLES, *(_SPACE + word for word in WORDS)]
    room = SIZE - len(SPECIAL) - len(entries)
    if room < 0:
        raise ValueError(f"{len(WORDS)} words do not fit into {SIZE} tokens: {-room} too many")
    entries += [f"[unused{place}]" for place in range(room)]
    plain = Tokenizer(models.BPE({entry: place for place, entry in enumerate(entries)}, [], ignore_merges=True))
    plain.normalizer = normalizers.Sequence(
        [
            normalizers.Lowercase(),
            normalizers.Replace(Regex("['\u2019]s\\b"), " is"),
            normalizers.Replace(Regex("[?!.,:;\"'\u2019\u201c\u201d()]"), ""),
            normalizers.Replace(Regex(" +"), " "),
            normalizers.Replace(Regex(" +(?=$|\\n)"), ""),
            normalizers.Replace(Regex("\\n *(?=[^\\s])"), "\n "),
        ]
    )
    plain.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    plain.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    plain.add_special_tokens(list(SPECIAL))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=plain,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=dict(NAMED),
        model_max_length=1024,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )
    assert len(tokenizer) == SIZE
    for word in (*ROLES, "\n"):
        assert len(tokenizer.encode(word)) == 1, word
    return tokenizer


def chat(question: str, earlier: tuple[tuple[str, str], ...] = ()) -> str:
    """A prompt in the chat layout that ends where the answer begins; `earlier` turns are (role, text)."""
    turns = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in (*earlier, ("user", question)))
    return f"{turns}<|im_start|>assistant\n"
