"""Drawing: filters, penalties, seeds."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from omni.v1 import config_pb2
from stage_server.engines.ar.sampling import Sampling, Seen, draw, penalize

DRAWS = 4000
LOGITS = torch.randn(1, 60, generator=torch.Generator().manual_seed(3)) * 2


def of(seed: int = 1, **values: Any) -> Sampling:
    return Sampling(rng=random.Random(seed), **values)


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": 1.0},
        {"temperature": 0.6},
        {"temperature": 1.4, "top_k": 7},
        {"temperature": 1.0, "top_p": 0.7},
        {"temperature": 1.0, "min_p": 0.2},
        {"temperature": 1.2, "top_k": 20, "top_p": 0.8, "min_p": 0.05},
    ],
)
def test_tokens_are_drawn_from_the_distribution_of_transformers(values: dict[str, float]) -> None:
    warpers = LogitsProcessorList([TemperatureLogitsWarper(values["temperature"])])
    if "top_k" in values:
        warpers.append(TopKLogitsWarper(int(values["top_k"])))
    if "top_p" in values:
        warpers.append(TopPLogitsWarper(values["top_p"]))
    if "min_p" in values:
        warpers.append(MinPLogitsWarper(values["min_p"]))
    wanted = warpers(torch.tensor([[0]]), LOGITS.clone())[0].softmax(-1)
    sampling = of(**values)
    counts = Counter(draw(LOGITS.expand(DRAWS, -1), [sampling] * DRAWS))
    assert set(counts) <= set(wanted.nonzero().squeeze(1).tolist())
    for token, weight in enumerate(wanted.tolist()):
        assert counts[token] / DRAWS == pytest.approx(weight, abs=0.035)


def test_a_row_draws_the_same_in_any_company() -> None:
    rows = torch.randn(6, 60, generator=torch.Generator().manual_seed(4))
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.9},
        {"temperature": 0.0},
        {"temperature": 1.0, "top_k": 5},
        {"temperature": 1.1, "top_p": 0.6},
        {"temperature": 1.0, "top_k": 30, "top_p": 0.9},
        {"temperature": 2.0, "min_p": 0.1},
    ]
    alone = [draw(rows[at : at + 1], [of(at, **kind)])[0] for at, kind in enumerate(kinds)]
    assert draw(rows, [of(at, **kind) for at, kind in enumerate(kinds)]) == alone


def test_penalties_touch_their_own_rows_only() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(5))
    seen = Seen([4, 9, 9, 4, 30], torch.device("cpu"))
    for token in (7, 9, 7, 7):
        seen.add(token)
    expected = logits.clone()
    ids = torch.tensor([[4, 9, 9, 4, 30, 7, 9, 7, 7]])
    expected[1] = RepetitionPenaltyLogitsProcessor(1.3)(ids, expected[1:2].clone())[0]
    for token, count in ((7, 3), (9, 1)):
        expected[1, token] -= 0.5 * count + 0.25
    sampling = Sampling(repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=0.25)
    penalize(logits, [(1, sampling, seen)])
    torch.testing.assert_close(logits, expected)


def test_seen_grows_with_its_run() -> None:
    seen = Seen([], torch.device("cpu"))
    for token in range(500):
        seen.add(token % 200)
    assert len(seen) == 200
    assert seen.counts.sum() == 500
    assert seen.ids.tolist() == list(range(200))


def test_what_a_request_says_is_laid_over_the_model() -> None:
    model = config_pb2.SamplingParams(temperature=0.7, top_k=20, repetition_penalty=1.1)
    sampling = Sampling.of(config_pb2.SamplingParams(temperature=0, stop_token_ids=[5]), model, frozenset([2]))
    assert (sampling.temperature, sampling.top_k, sampling.stop_ids) == (0.0, 20, {2, 5})
    assert sampling.greedy
    assert sampling.repetition_penalty == pytest.approx(1.1)
    ignoring = Sampling.of(config_pb2.SamplingParams(ignore_eos=True, stop_token_ids=[5]), model, frozenset([2]))
    assert ignoring.stop_ids == {5}
    assert ignoring.top_p == 1.0
