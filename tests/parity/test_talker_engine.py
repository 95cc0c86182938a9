"""The talker under the engine, next to transformers' own generate on the same checkpoint."""

from __future__ import annotations

import io
from collections.abc import Iterator

import numpy as np
import pytest
import soundfile
import torch
from PIL import Image
from transformers import Qwen3OmniMoeForConditionalGeneration

from omni.rpc.errors import OmniError, Reason
from omni.v1 import content_pb2
from stage_server.engines.base import Feed
from stage_server.models.qwen3_omni import build
from tests.parity.driver import Driver
from tests.parity.speech import Spoken, conversation, feed_text, reference_model, speak, stage, talker_run


def image() -> content_pb2.ContentPart:
    pixels = np.random.default_rng(0).integers(0, 256, (64, 96, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return content_pb2.ContentPart(media=content_pb2.Media(modality=content_pb2.MODALITY_IMAGE, data=file.getvalue()))


def sound() -> content_pb2.ContentPart:
    file = io.BytesIO()
    soundfile.write(file, np.random.default_rng(0).normal(0, 0.1, 16000), 16000, format="WAV")
    return content_pb2.ContentPart(media=content_pb2.Media(modality=content_pb2.MODALITY_AUDIO, data=file.getvalue()))


PROMPTS = {
    "text": (conversation("How are you today?"), 12, 40),
    "long text": (conversation("The quick brown fox jumps over the lazy dog. " * 6), 30, 60),
    "two words": (conversation("a"), 2, 20),
    "three words": (conversation("Hello"), 3, 12),
    "image": (conversation(image(), "Name three things that you see."), 9, 30),
    "sound": (conversation(sound(), "Say it again."), 20, 16),
    "image and sound": (conversation(image(), "and", sound(), "?"), 8, 24),
    "more words than frames": (conversation("Tell me a story."), 40, 10),
    "one frame": (conversation("Be brief."), 6, 2),
}


@pytest.fixture(scope="module")
def spoken() -> dict[str, Spoken]:
    model: Qwen3OmniMoeForConditionalGeneration = reference_model()
    # Without it transformers' talker cannot place a recording beside a picture.
    model.talker.config.audio_config = model.config.thinker_config.audio_config
    return {kind: speak(model, *given) for kind, given in PROMPTS.items()}


@pytest.fixture(scope="module")
def driver() -> Iterator[Driver]:
    driver = Driver(build(stage("talker", step_tokens=24)))
    yield driver
    driver.close()


@pytest.mark.parametrize("kind", PROMPTS)
def test_codes_of_one_run_equal_generate(driver: Driver, spoken: dict[str, Spoken], kind: str) -> None:
    run = driver.submit(talker_run(max_tokens=PROMPTS[kind][2]))
    feed_text(driver, run, spoken[kind])
    assert driver.result(run).tensor("codes").tolist() == spoken[kind].codes.tolist()


def test_codes_of_all_runs_at_once_equal_generate(driver: Driver, spoken: dict[str, Spoken]) -> None:
    runs = {kind: driver.submit(talker_run(max_tokens=PROMPTS[kind][2])) for kind in PROMPTS}
    for kind, run in runs.items():
        feed_text(driver, run, spoken[kind])
    for kind, run in runs.items():
        assert driver.result(run).tensor("codes").tolist() == spoken[kind].codes.tolist(), kind


@pytest.mark.parametrize("kind", ["text", "image", "two words"])
def test_codes_do_not_depend_on_how_the_text_comes(driver: Driver, spoken: dict[str, Spoken], kind: str) -> None:
    total = len(spoken[kind].tensors["embeds"])
    for splits in (range(1, total), range(5, total, 7), [total - 1]):
        run = driver.submit(talker_run(max_tokens=PROMPTS[kind][2]))
        feed_text(driver, run, spoken[kind], splits)
        assert driver.result(run).tensor("codes").tolist() == spoken[kind].codes.tolist()


def test_frames_come_in_chunks_the_first_one_small(driver: Driver, spoken: dict[str, Spoken]) -> None:
    run = driver.submit(talker_run(max_tokens=60))
    feed_text(driver, run, spoken["long text"])
    sizes = [len(output.tensors["codes"]) for output in driver.result(run).outputs]
    frames = len(spoken["long text"].codes)
    assert sizes[0] == min(8, frames)
    assert all(size == 25 for size in sizes[1:-1])
    assert sum(sizes) == frames


def test_sound_begins_while_the_text_still_comes_and_then_waits_for_it(
    driver: Driver, spoken: dict[str, Spoken]
) -> None:
    text = spoken["long text"]
    length = len(text.tensors["prompt_ids"])
    run = driver.submit(talker_run(max_tokens=60))
    part = {name: [text.tensors[name][: length + 10]] for name in ("embeds", "hidden")}
    driver.engine.feed(run, Feed("thinker", "", tensors={**part, "prompt_ids": [text.tensors["prompt_ids"]]}))
    driver.wait(lambda: bool(driver.runs[run].outputs))
    rest = {name: [text.tensors[name][length + 10 :]] for name in ("embeds", "hidden")}
    driver.engine.feed(run, Feed("thinker", "", tensors=rest))
    driver.engine.feed(run, Feed("thinker", "", end=True))
    assert driver.result(run).tensor("codes").tolist() == text.codes.tolist()


def test_an_answer_without_a_word_is_silence(driver: Driver, spoken: dict[str, Spoken]) -> None:
    text = spoken["text"].tensors
    length = len(text["prompt_ids"])
    silent = Spoken({**text, "embeds": text["embeds"][:length], "hidden": text["hidden"][:length]}, torch.empty(0))
    run = driver.submit(talker_run())
    feed_text(driver, run, silent)
    seen = driver.result(run)
    assert not seen.outputs
    assert seen.finished.reason == content_pb2.FINISH_REASON_STOP


def test_runs_cancelled_in_the_middle_free_their_places(driver: Driver, spoken: dict[str, Spoken]) -> None:
    text = spoken["long text"].tensors
    rows = len(text["prompt_ids"]) + 12
    part = {"prompt_ids": [text["prompt_ids"]], "embeds": [text["embeds"][:rows]], "hidden": [text["hidden"][:rows]]}
    runs = [driver.submit(talker_run(max_tokens=4000)) for _ in range(8)]
    for run in runs:
        driver.engine.feed(run, Feed("thinker", "", tensors=part))
    for run in runs:
        driver.wait(lambda run=run: bool(driver.runs[run].outputs))
        driver.engine.cancel(run)
    assert {seen.finished.reason for seen in driver.results(runs)} == {content_pb2.FINISH_REASON_CANCELLED}
    assert (driver.engine.load().running, driver.engine.load().waiting) == (0, 0)
    run = driver.submit(talker_run(max_tokens=40))
    feed_text(driver, run, spoken["text"])
    assert driver.result(run).tensor("codes").tolist() == spoken["text"].codes.tolist()


def test_a_seed_gives_the_same_sound_whatever_else_runs(driver: Driver, spoken: dict[str, Spoken]) -> None:
    def sampled() -> int:
        run = driver.submit(talker_run(temperature=0.9, top_k=50, seed=7, max_tokens=20))
        feed_text(driver, run, spoken["text"])
        return run

    alone = driver.result(sampled()).tensor("codes")
    together = driver.results([sampled(), sampled()])
    assert all(seen.tensor("codes").equal(alone) for seen in together)


def test_a_talker_told_to_ignore_its_end_says_only_what_can_be_heard(driver: Driver, spoken: dict[str, Spoken]) -> None:
    count = len(spoken["text"].codes) + 30
    run = driver.submit(talker_run(ignore_eos=True, max_tokens=count))
    feed_text(driver, run, spoken["text"])
    seen = driver.result(run)
    codes = seen.tensor("codes")
    assert len(codes) == count - 1  # as with transformers: of the last token no frame is made
    assert int(codes.max()) < reference_model().config.code2wav_config.codebook_size
    assert seen.finished.reason == content_pb2.FINISH_REASON_LENGTH


def test_an_unknown_voice_is_refused_with_those_there_are(driver: Driver) -> None:
    run = talker_run()
    run.params.voice = "nobody"
    with pytest.raises(OmniError, match="must be one of tiny, got 'nobody'") as refused:
        driver.submit(run)
    assert refused.value.fields[0].field == "params.voice"


def test_unknown_and_wrong_extra_parameters_are_refused(driver: Driver) -> None:
    run = talker_run()
    run.params.extra.update({"subtalker_topk": 3})
    with pytest.raises(OmniError, match="did you mean subtalker_top_k") as refused:
        driver.submit(run)
    assert refused.value.reason == Reason.UNKNOWN_PARAMETER
    run = talker_run()
    run.params.extra.update({"subtalker_top_p": 3})
    with pytest.raises(OmniError, match="subtalker_top_p: must be from"):
        driver.submit(run)


def test_a_prompt_without_an_assistant_turn_fails_alone(driver: Driver, spoken: dict[str, Spoken]) -> None:
    plain = Spoken({**spoken["text"].tensors, "prompt_ids": torch.arange(20, 30)}, torch.empty(0))
    run = driver.submit(talker_run())
    feed_text(driver, run, plain)
    assert driver.result(run).failed.error.reason == Reason.BAD_REQUEST
