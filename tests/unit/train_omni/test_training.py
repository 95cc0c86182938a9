"""The forward pass of training is that of transformers, and sequences are packed without loss."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tools.train_tiny.omni import model, network, packing, talker, thinker, tokenizer
from tools.train_tiny.optimize import Training

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def tokens() -> Any:
    return tokenizer.make()


@pytest.fixture(scope="module")
def whole(tokens: Any) -> Any:
    """A model whose random weights are large enough that experts and codes differ."""
    built = model.build(tokens).eval()
    generator = torch.Generator().manual_seed(1)
    for weights in built.parameters():
        if weights.ndim > 1:
            weights.data.normal_(0, 0.12, generator=generator)
    return built


def ragged(lengths: list[int]) -> packing.Ragged:
    return packing.Ragged(lengths, {"ids": torch.arange(sum(lengths))}, CPU)


def test_packing_keeps_every_sequence_whole_and_uses_each_once_a_pass() -> None:
    lengths = [5, 9, 3, 7, 8, 2, 6, 4]
    rows = packing.whole(ragged(lengths), 12)
    found = [
        rows.fields["ids"][row][rows.segments[row] == segment].tolist()
        for row in range(len(rows.segments))
        for segment in range(1, int(rows.segments[row].max()) + 1)
    ]
    begins = [sum(lengths[:place]) for place in range(len(lengths))]
    assert found == [list(range(begin, begin + size)) for begin, size in zip(begins, lengths, strict=True)]
    assert all(rows.positions[rows.segments > 0][place] >= 0 for place in range(sum(lengths)))


def test_batches_are_the_same_for_a_seed_and_can_be_taken_up() -> None:
    data = ragged([5, 9, 3, 7, 8, 2, 6, 4])
    once = [each.fields["ids"] for each in islice(packing.batches(data, 2, 12, seed=3), 6)]
    again = [each.fields["ids"] for each in islice(packing.batches(data, 2, 12, seed=3, skip=2), 4)]
    assert all(torch.equal(one, other) for one, other in zip(once[2:], again, strict=True))


def test_a_sequence_longer_than_a_row_is_refused() -> None:
    with pytest.raises(ValueError, match="13 positions does not fit into a row of 12"):
        next(packing.batches(ragged([13]), 1, 12, seed=0))


def test_packed_rows_give_the_thinkers_own_logits(whole: Any, tokens: Any) -> None:
    asked = [
        thinker.Conversation(tokenizer.chat(text), "two") for text in ("what is one plus one", "hello", "spell cat")
    ]
    rows = packing.whole(thinker.data(tokens, asked, CPU), 64)
    with torch.no_grad():
        packed, _ = thinker.logits_of(whole.thinker, rows, network.decoder_layer)
        for row in range(len(rows.segments)):
            for segment in range(1, int(rows.segments[row].max()) + 1):
                there = rows.segments[row] == segment
                alone = whole.thinker(input_ids=rows.fields["ids"][row][there][None].long()).logits[0]
                torch.testing.assert_close(packed[row][there], alone, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("question", ["say one two three", "what is the capital of france"])
def test_teacher_forcing_gives_the_logits_of_generate(whole: Any, tokens: Any, question: str) -> None:
    calls: list[tuple[Tensor, Tensor, Tensor | None]] = []

    def keep(module: Any, given: Any, named: dict[str, Any], output: Any) -> None:
        del module, given
        calls.append((named["inputs_embeds"], output.logits[0, -1], named.get("residual_codes")))

    ids = tokens(tokenizer.chat(question), return_tensors="pt").input_ids
    hook = whole.talker.register_forward_hook(keep, with_kwargs=True)
    torch.manual_seed(0)
    try:
        sequences, _ = whole.generate(
            ids,
            speaker=model.SPEAKER,
            thinker_max_new_tokens=5,
            thinker_eos_token_id=tokens.eos_token_id,
            talker_max_new_tokens=14,
            talker_repetition_penalty=1.0,
        )
    finally:
        hook.remove()
    codes = torch.stack([each[0] for _, _, each in calls if each is not None])
    words = sequences[0, ids.shape[1] : -1].tolist()
    text, given, labels = talker.Layout(whole.config, tokens).sequence(ids[0].tolist(), words, codes)
    before = len(text) - len(codes)
    with torch.no_grad():
        embeds = talker.inputs(whole.talker, whole.thinker.get_input_embeddings().weight, text[None], given[None])
        mask = network.segment_mask(torch.ones(1, len(text)))
        hidden, _ = network.backbone(whole.talker.model, embeds, torch.arange(len(text)).expand(3, 1, -1), mask)
        logits = whole.talker.codec_head(hidden)[0]
        further = talker.predicted(whole.talker, hidden[0, before - 1 : -1], codes)
        own = whole.talker.code_predictor(
            inputs_embeds=torch.stack(
                (hidden[0, before - 1 : -1], whole.talker.get_input_embeddings()(codes[:, 0])), 1
            ),
            use_cache=True,
        )
        theirs = [own.logits[:, -1]]
        for group in (1, 2):
            own = whole.talker.code_predictor(
                input_ids=codes[:, group : group + 1],
                past_key_values=own.past_key_values,
                generation_steps=group,
                use_cache=True,
            )
            theirs.append(own.logits[:, -1])
    assert len(calls) == len(codes) + 1
    torch.testing.assert_close(embeds[0, :before], calls[0][0][0], atol=1e-5, rtol=1e-4)
    for frame, (_, logit, _) in enumerate(calls):
        torch.testing.assert_close(logits[before - 1 + frame], logit, atol=2e-4, rtol=1e-3)
    for mine, other in zip(further, theirs, strict=True):
        torch.testing.assert_close(mine, other, atol=2e-4, rtol=1e-3)
    assert labels[before - 1 : -1].tolist() == codes[:, 0].tolist()
    assert labels[-1] == model.END


def test_a_training_is_taken_up_with_its_weights_and_averages(tmp_path: Path) -> None:
    def loss(module: Any, batch: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        total = module(batch).square().mean()
        return total, {"loss": total}

    def endless() -> Any:
        while True:
            yield torch.ones(2, 3)

    first = Training("line", torch.nn.Linear(3, 1), rate=0.1)
    first.run(endless(), loss, until=float("inf"), most_steps=5)
    first.save(tmp_path)
    second = Training("line", torch.nn.Linear(3, 1), rate=0.1)
    assert second.resume(tmp_path)
    assert second.step == 5
    for one, other in ((first.module, second.module), (first.average, second.average)):
        assert all(torch.equal(a.bfloat16(), b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    assert not Training("other", torch.nn.Linear(3, 1), rate=0.1).resume(tmp_path)
