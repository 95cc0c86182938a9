"""Trains the talker and its code predictor: the thinker's words in, frames of codes out.

Each position of the talker's input is the sum of one text token (a word, a role, a marker) and of the codes of one
frame or a control code, so a sequence is written down as ids: exactly those from which transformers' generate builds
its embeddings. The user's turns come first, then the head of the assistant's turn, the speaker, and one word a frame;
after the last word its end marker, then padding, until the talker ends by itself.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import Qwen3OmniMoeConfig

from tools.train_tiny.omni import language, network
from tools.train_tiny.omni.model import CODE_GROUPS, CODEBOOK, SPEAKER
from tools.train_tiny.omni.packing import Batch, Ragged
from tools.train_tiny.omni.tokenizer import chat
from tools.train_tiny.optimize import Losses

GROUP_WEIGHTS = (1.0, 1.0, 0.5, 0.3)
"""Of the codebooks in the loss: the first two carry the words."""
NOISE = 0.4
"""Share of frames whose codes the talker is given wrong, so that it goes by the words and recovers from its own
mistakes: in each row of a batch any share from none to this."""
_UNEVEN = 0.01
_SPOKEN = 0.65
"""Of all places in a batch, at most so many make a frame."""
NONE = -1


class Layout:
    """Writes sequences down as ids."""

    def __init__(self, config: Qwen3OmniMoeConfig, tokenizer: Any) -> None:
        self._config, self._backend = config, tokenizer.backend_tokenizer

    def prompts(self, questions: Sequence[str]) -> list[list[int]]:
        """Token ids of prompts that have one user turn."""
        encoded = self._backend.encode_batch([chat(question) for question in questions], add_special_tokens=False)
        return [each.ids for each in encoded]

    def words(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of answers."""
        encoded = self._backend.encode_batch([f"\n{text}" for text in texts], add_special_tokens=False)
        return [each.ids[1:] for each in encoded]

    def sequence(self, prompt: Sequence[int], words: Sequence[int], codes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What the talker is given and what it shall say.

        Args:
            prompt: user turn and head of the assistant's turn, as `prompts` gives them.
            words: of the answer, at least one.
            codes: its frames, [T, groups].

        Returns:
            Text ids [n], codes [n, groups] with -1 for none (control codes stand in the first column), and labels [n]:
            the first code of the frame that follows, the end, or -100.
        """
        config, talker = self._config, self._config.talker_config
        pad, begin, end = config.tts_pad_token_id, config.tts_bos_token_id, config.tts_eos_token_id
        head = [*prompt, pad, pad, pad, pad, begin, words[0]]
        frames = len(codes)
        trailing = [*words[1:], end][:frames]
        text = torch.tensor(head + trailing + [pad] * (frames - len(trailing)))
        control = [talker.codec_nothink_id, talker.codec_think_bos_id, talker.codec_think_eos_id]
        control += [talker.speaker_id[SPEAKER], talker.codec_pad_id, talker.codec_bos_id]
        given = torch.full((len(text), codes.shape[1]), NONE)
        given[len(prompt) : len(head), 0] = torch.tensor(control)
        given[len(head) :] = codes
        labels = torch.full((len(text),), -100)
        labels[len(head) - 1 : -1] = codes[:, 0]
        labels[-1] = talker.codec_eos_token_id
        return text, given, labels


def prompts_for(texts: Sequence[str], seed: int) -> list[str]:
    """A question for each text to be spoken: "say ..." for some, for most one that has nothing to do with it, so that
    the voice goes by the answer and not by the question."""
    rng = random.Random(seed)
    found = []
    for text in texts:
        if rng.random() < 0.3:
            found.append(rng.choice(("say {}", "please say {}", "repeat {}")).format(text))
        else:
            found.append(language.exchange(rng).question)
    return found


def data(
    layout: Layout, texts: Sequence[str], questions: Sequence[str], codes: Sequence[Tensor], device: torch.device
) -> Ragged:
    """All sequences, flat: fields `text`, `codes`, `labels` and `next`, the whole frame that follows (-1: none)."""
    parts: tuple[list[Tensor], ...] = ([], [], [], [])
    lengths = []
    for prompt, words, frames in zip(layout.prompts(questions), layout.words(texts), codes, strict=True):
        text, given, labels = layout.sequence(prompt, words, frames)
        follows = torch.full_like(given, NONE)
        follows[-1 - len(frames) : -1] = frames
        for part, made in zip(parts, (text, given, labels, follows), strict=True):
            part.append(made.short())
        lengths.append(len(text))
    names = ("text", "codes", "labels", "next")
    return Ragged(lengths, {name: torch.cat(part) for name, part in zip(names, parts, strict=True)}, device)


def inputs(talker: nn.Module, words: Tensor, text: Tensor, codes: Tensor) -> Tensor:
    """The talker's input embeddings [B, L, h].

    Args:
        talker: the talker.
        words: the thinker's embeddings of its whole vocabulary, [V, H].
        text: ids, [B, L].
        codes: of each group, -1 for none, [B, L, groups].
    """
    total: Tensor = functional.embedding(text, talker.text_projection(words))
    tables = [talker.model.codec_embedding, *talker.code_predictor.model.codec_embedding]
    for group, table in enumerate(tables):
        ids = codes[..., group]
        total = total + table(ids.clamp(min=0)) * (ids >= 0).unsqueeze(-1)
    return total


def predicted(
    talker: nn.Module, hidden: Tensor, frames: Tensor, layer: network.Layer = network.decoder_layer
) -> list[Tensor]:
    """Logits [n, codebook] of the second and each further code of frames [n, groups], from hidden states [n, h]."""
    predictor = talker.code_predictor
    given = [hidden, talker.model.codec_embedding(frames[:, 0])]
    given += [table(frames[:, group + 1]) for group, table in enumerate(predictor.model.codec_embedding[:-1])]
    embeds = torch.stack(given, dim=1)
    positions = torch.arange(embeds.shape[1], device=embeds.device).unsqueeze(0)
    output, _ = network.backbone(predictor.model, embeds, positions, None, layer)
    return [head(output[:, group + 1]) for group, head in enumerate(predictor.lm_head)]


class TalkerLoss:
    """Cross-entropy of all codes and of the end; what is given is partly wrong."""

    def __init__(self, words: Tensor, layer: network.Layer, noise: float = NOISE, seed: int = 0) -> None:
        self._words, self._layer, self._noise = words, layer, noise
        self._random = torch.Generator(device=words.device).manual_seed(seed)

    def __call__(self, talker: nn.Module, batch: Batch) -> tuple[Tensor, Losses]:
        fields = {name: field.long() for name, field in batch.fields.items()}
        there = batch.segments > 0
        labels = torch.where(there, fields["labels"], -100)
        given = self._disturbed(fields["codes"])
        embeds = inputs(talker, self._words, fields["text"], given)
        mask = network.segment_mask(batch.segments)
        hidden, uneven = network.backbone(talker.model, embeds, batch.positions.expand(3, -1, -1), mask, self._layer)
        first = functional.cross_entropy(talker.codec_head(hidden).float().flatten(0, 1), labels.flatten())
        speaks = (there & (fields["next"][..., 0] >= 0)).flatten()
        # As many places as frames can be expected, those of frames before all others: the shape never changes.
        places = torch.argsort(speaks.int(), descending=True, stable=True)[: int(_SPOKEN * len(speaks))]
        weight, frames = speaks[places].float(), fields["next"].flatten(0, 1)[places].clamp(min=0)
        losses = [first]
        for group, logits in enumerate(predicted(talker, hidden.flatten(0, 1)[places], frames, self._layer)):
            each = functional.cross_entropy(logits.float(), frames[:, group + 1], reduction="none")
            losses.append((each * weight).sum() / weight.sum())
        total = sum(weight * loss for weight, loss in zip(GROUP_WEIGHTS, losses, strict=True)) + _UNEVEN * uneven
        parts = {f"code{group}": loss for group, loss in enumerate(losses)}
        return total, {**parts, "uneven": uneven}

    def _disturbed(self, codes: Tensor) -> Tensor:
        """Codes with some of them wrong: half of the disturbed frames in all groups, half in one."""
        if not self._noise:
            return codes
        share = self._noise * torch.rand(len(codes), 1, generator=self._random, device=codes.device)
        chance = torch.rand(codes.shape[:2], generator=self._random, device=codes.device)
        which = torch.randint(CODE_GROUPS, codes.shape[:2], generator=self._random, device=codes.device)
        other = torch.randint(CODEBOOK, codes.shape, generator=self._random, device=codes.device)
        one = which.unsqueeze(-1) == torch.arange(CODE_GROUPS, device=codes.device)
        wrong = (chance < share / 2).unsqueeze(-1) | ((chance < share).unsqueeze(-1) & one)
        return torch.where(wrong & (codes >= 0) & (codes < CODEBOOK), other, codes)
