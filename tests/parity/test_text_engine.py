"""Text models under the engine, next to transformers' own generate on the same checkpoint."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from omni.rpc.errors import OmniError, Reason
from omni.v1 import config_pb2, content_pb2
from stage_server.models import text
from tests.parity.driver import Driver, run_of
from tools.tiny.folder import made
from tools.tiny.text import mistral, qwen3

MODELS = {"tiny-text": qwen3, "tiny-text-window": mistral}
LENGTHS = (1, 3, 5, 17, 30, 41, 64, 90)


def spec_of(name: str, **engine: float) -> config_pb2.StageSpec:
    spec = config_pb2.StageSpec(
        stage="text", model=name, family="text", checkpoint=str(made(MODELS[name])), dtype="float32", max_running=8
    )
    spec.engine.update(engine)
    return spec


def prompt_of(length: int, seed: int = 0) -> list[int]:
    chooser = random.Random(f"{length}/{seed}")
    return [chooser.randrange(300, 900) for _ in range(length)]


def greedy(model: PreTrainedModel, ids: list[int], tokens: int, **options: object) -> list[int]:
    row = torch.tensor([ids])
    options = {"eos_token_id": None, "do_sample": False} | options
    out = model.generate(row, attention_mask=torch.ones_like(row), max_new_tokens=tokens, pad_token_id=0, **options)
    return out[0, len(ids) :].tolist()


@pytest.fixture(scope="module", params=MODELS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def reference(name: str) -> PreTrainedModel:
    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(made(MODELS[name]), dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def driver(name: str) -> Iterator[Driver]:
    driver = Driver(text.build(spec_of(name, step_tokens=24)))
    yield driver
    driver.close()


def test_greedy_tokens_of_one_run_equal_generate(driver: Driver, reference: PreTrainedModel) -> None:
    ids = prompt_of(40)
    seen = driver.result(driver.submit(run_of(ids, temperature=0, max_tokens=40, ignore_eos=True)))
    assert seen.tokens == greedy(reference, ids, 40)
    assert seen.finished.reason == content_pb2.FINISH_REASON_LENGTH
    assert (seen.finished.usage.prompt_tokens, seen.finished.usage.completion_tokens) == (40, 40)


def test_greedy_tokens_of_eight_runs_of_different_lengths_equal_generate(
    driver: Driver, reference: PreTrainedModel
) -> None:
    runs = [
        driver.submit(run_of(prompt_of(length), temperature=0, max_tokens=10 + 5 * place, ignore_eos=True))
        for place, length in enumerate(LENGTHS)
    ]
    for place, (length, seen) in enumerate(zip(LENGTHS, driver.results(runs), strict=True)):
        assert seen.tokens == greedy(reference, prompt_of(length), 10 + 5 * place), length


def test_twenty_runs_come_and_go_over_eight_slots(driver: Driver, reference: PreTrainedModel) -> None:
    wanted = [(prompt_of(5 + 3 * at, at), 4 + (7 * at) % 23) for at in range(20)]
    runs = [driver.submit(run_of(ids, temperature=0, max_tokens=n, ignore_eos=True)) for ids, n in wanted]
    for (ids, n), seen in zip(wanted, driver.results(runs), strict=True):
        assert seen.tokens == greedy(reference, ids, n)
    load = driver.engine.load()
    assert (load.running, load.waiting) == (0, 0)


def test_penalties_are_those_of_generate(driver: Driver, reference: PreTrainedModel) -> None:
    ids = prompt_of(12)
    seen = driver.result(
        driver.submit(run_of(ids, temperature=0, max_tokens=30, ignore_eos=True, repetition_penalty=1.7))
    )
    assert seen.tokens == greedy(reference, ids, 30, repetition_penalty=1.7)


def test_logprobs_are_those_of_the_model(driver: Driver, reference: PreTrainedModel) -> None:
    ids = prompt_of(9)
    seen = driver.result(driver.submit(run_of(ids, temperature=0, max_tokens=6, ignore_eos=True, logprobs=3)))
    with torch.inference_mode():
        logits = reference(torch.tensor([ids + seen.tokens])).logits[0, len(ids) - 1 : -1]
    expected = logits.log_softmax(-1)
    assert [entry.sampled.token_id for entry in seen.logprobs] == seen.tokens
    for row, entry in zip(expected, seen.logprobs, strict=True):
        values, top = row.topk(3)
        assert [candidate.token_id for candidate in entry.top] == top.tolist()
        assert [candidate.logprob for candidate in entry.top] == pytest.approx(values.tolist(), abs=1e-3)
        assert entry.sampled.logprob == pytest.approx(values[0].item(), abs=1e-3)


def test_an_end_token_ends_a_run_and_is_no_text(driver: Driver, reference: PreTrainedModel, name: str) -> None:
    ids = prompt_of(20)
    tokens = greedy(reference, ids, 30)
    end = tokens[12]
    seen = driver.result(driver.submit(run_of(ids, temperature=0, max_tokens=30, stop_token_ids=[end])))
    first = tokens.index(end)
    assert seen.tokens == tokens[: first + 1]
    assert seen.finished.reason == content_pb2.FINISH_REASON_STOP
    tokenizer = AutoTokenizer.from_pretrained(made(MODELS[name]))
    assert seen.text == tokenizer.decode(tokens[:first], skip_special_tokens=True)


def test_min_tokens_keeps_an_end_token_away(driver: Driver, reference: PreTrainedModel) -> None:
    ids = prompt_of(20)
    end = greedy(reference, ids, 1)[0]
    seen = driver.result(driver.submit(run_of(ids, temperature=0, max_tokens=8, min_tokens=5, stop_token_ids=[end])))
    assert len(seen.tokens) >= 5
    assert end not in seen.tokens[:5]


def test_stop_strings_cut_the_text_and_leak_nothing(driver: Driver, reference: PreTrainedModel, name: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(made(MODELS[name]))
    ids = prompt_of(25)
    text_ = tokenizer.decode(greedy(reference, ids, 40), skip_special_tokens=True)
    stop = text_[len(text_) // 2 :][:6]
    seen = driver.result(
        driver.submit(run_of(ids, temperature=0, max_tokens=40, stop=[stop, "never met"], ignore_eos=True))
    )
    assert seen.text == text_[: text_.index(stop)]
    assert seen.finished.reason == content_pb2.FINISH_REASON_STOP


def test_seeds_give_the_same_tokens_in_any_company(driver: Driver) -> None:
    ids = prompt_of(15)
    params = {"max_tokens": 25, "ignore_eos": True, "seed": 7, "temperature": 1.3, "top_k": 40, "top_p": 0.95}
    alone = driver.result(driver.submit(run_of(ids, **params))).tokens
    runs = [driver.submit(run_of(prompt_of(4 + at), max_tokens=30, temperature=1.0, seed=at)) for at in range(3)]
    among = driver.submit(run_of(ids, **params))
    runs += [driver.submit(run_of(prompt_of(50 + at), max_tokens=30, temperature=0.7, min_p=0.1)) for at in range(3)]
    assert driver.result(among).tokens == alone
    driver.results(runs)
    other = driver.result(driver.submit(run_of(ids, **(params | {"seed": 8})))).tokens
    assert other != alone


def test_a_conversation_goes_through_the_chat_template(driver: Driver, reference: PreTrainedModel, name: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(made(MODELS[name]))
    conversation = content_pb2.Conversation(
        messages=[
            {"role": content_pb2.CHAT_ROLE_SYSTEM, "content": [{"text": "You are a helpful assistant."}]},
            {"role": content_pb2.CHAT_ROLE_USER, "content": [{"text": "What time "}, {"text": "is it?"}]},
        ]
    )
    seen = driver.result(
        driver.submit(
            run_of(content_pb2.Prompt(conversation=conversation), temperature=0, max_tokens=12, ignore_eos=True)
        )
    )
    ids = tokenizer.apply_chat_template(
        [
            {"role": "system", "content": "You are a helpful assistant."},
            {"role": "user", "content": "What time is it?"},
        ],
        add_generation_prompt=True,
        return_dict=False,
    )
    assert seen.tokens == greedy(reference, ids, 12)


def test_a_prompt_longer_than_the_context_fails_alone(driver: Driver, reference: PreTrainedModel) -> None:
    ids = prompt_of(30)
    good = driver.submit(run_of(ids, temperature=0, max_tokens=20, ignore_eos=True))
    bad = driver.submit(run_of(prompt_of(5000), max_tokens=4))
    error = driver.result(bad).failed.error
    assert error.reason == Reason.PROMPT_TOO_LONG
    assert "5000" in error.message
    assert driver.result(good).tokens == greedy(reference, ids, 20)


def test_media_and_foreign_token_ids_are_refused(driver: Driver) -> None:
    picture = content_pb2.Media(modality=content_pb2.MODALITY_IMAGE, data=b"x")
    message = content_pb2.ChatMessage(role=content_pb2.CHAT_ROLE_USER, content=[content_pb2.ContentPart(media=picture)])
    prompt = content_pb2.Prompt(conversation=content_pb2.Conversation(messages=[message]))
    with pytest.raises(OmniError) as refusal:
        driver.engine.submit(run_of(prompt))
    assert refusal.value.reason == Reason.UNSUPPORTED_MODALITY
    assert refusal.value.fields[0].field == "prompt.conversation.messages[0].content[0].media"
    error = driver.result(driver.submit(run_of([3, 10**6]))).failed.error
    assert error.reason == Reason.BAD_REQUEST


def test_the_context_ends_a_run_that_nothing_else_ends(name: str, reference: PreTrainedModel) -> None:
    driver = Driver(text.build(spec_of(name, max_length=32)))
    try:
        ids = prompt_of(20)
        seen = driver.result(driver.submit(run_of(ids, temperature=0, ignore_eos=True)))
        assert seen.tokens == greedy(reference, ids, 13)
        assert seen.finished.reason == content_pb2.FINISH_REASON_LENGTH
    finally:
        driver.close()


def test_unknown_engine_arguments_are_refused() -> None:
    with pytest.raises(OmniError) as refusal:
        text.build(spec_of("tiny-text", step_token=3))
    assert refusal.value.fields[0].field == "engine.step_token"
    with pytest.raises(OmniError):
        text.build(spec_of("tiny-text", step_tokens=0))


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    spec = config_pb2.StageSpec(checkpoint=str(tmp_path), dtype="auto", max_running=1)
    with pytest.raises(OmniError, match=f"{tmp_path} .* lacks config.json, \\*.safetensors, tokenizer\\*") as refusal:
        text.build(spec).start(lambda _events: None)
    assert refusal.value.fields[0].field == "checkpoint"
    for name in ("model.safetensors", "tokenizer.json"):
        (tmp_path / name).touch()
    (tmp_path / "config.json").write_text('{"model_type": "nothing known"}')
    with pytest.raises(OmniError, match="cannot be loaded"):
        text.build(spec).start(lambda _events: None)
