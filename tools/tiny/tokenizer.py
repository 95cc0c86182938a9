"""A small byte-level tokenizer with Qwen's special tokens and chat layout."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEXT = """
system user assistant You are a helpful assistant that sees, hears, writes and speaks.
The quick brown fox jumps over the lazy dog while a small cat watches from the window of the house.
Tell me what is in this picture and say it in one short sentence. There is a red circle above a blue square.
How are you today? I am well, thank you. What time is it now? It is half past ten in the morning.
Stages, requests, replicas, edges and chunks: each has a name, and each name says what the thing is.
One two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen.
Où est la bibliothèque? Die Katze sitzt auf dem Dach. El perro corre por la calle. 你好，世界。 こんにちは。
"""

SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<|audio_start|>",
    "<|audio_end|>",
    "<|audio_pad|>",
    "<tts_pad>",
    "<tts_text_bos>",
    "<tts_text_eod>",
)

CHAT_TEMPLATE = """{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.content is string -%}{{- message.content -}}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'text' -%}{{- part.text -}}
{%- elif part.type == 'image' -%}{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- elif part.type == 'video' -%}{{- '<|vision_start|><|video_pad|><|vision_end|>' -}}
{%- elif part.type == 'audio' -%}{{- '<|audio_start|><|audio_pad|><|audio_end|>' -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


def make(size: int) -> Any:
    """A tokenizer of exactly `size` tokens, the special ones last."""
    plain = Tokenizer(models.BPE())
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size - len(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    plain.train_from_iterator([TEXT], trainer)
    filler = 0
    while plain.get_vocab_size() < size - len(SPECIAL):
        plain.add_tokens([f"[unused{filler}]"])
        filler += 1
    plain.add_special_tokens(list(SPECIAL))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=plain,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=4096,
        chat_template=CHAT_TEMPLATE,
    )
    assert len(tokenizer) == size
    return tokenizer
