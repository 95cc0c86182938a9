"""Code2wav under the generation engine, next to one decode of the whole by transformers' own model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import Qwen3OmniMoeForConditionalGeneration

from omni.rpc.errors import Reason
from omni.v1 import config_pb2, content_pb2
from stage_server.engines.base import Feed, Run
from stage_server.models.qwen3_omni import build
from stage_server.models.qwen3_omni.code2wav import Code2Wav
from tests.parity.driver import Driver, Seen, run_of
from tests.parity.speech import conversation, feed_text, reference_model, speak, stage, talker_run

SPLITS = ([8, 25], [1], [50], [3, 30, 1], [110])


@pytest.fixture(scope="module")
def model() -> Qwen3OmniMoeForConditionalGeneration:
    return reference_model()


@pytest.fixture(scope="module")
def driver() -> Iterator[Driver]:
    driver = Driver(build(stage("code2wav", batch=4)))
    yield driver
    driver.close()


def codes(frames: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(512, (frames, 4), generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
def whole(model: Qwen3OmniMoeForConditionalGeneration, frames: torch.Tensor) -> NDArray[np.float32]:
    return model.code2wav(frames.T[None]).reshape(-1).numpy()


def cut(frames: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    """Chunks of these sizes; the last size goes on to the end."""
    chunks = []
    while len(frames):
        size, *rest = sizes
        sizes = rest or [size]
        chunks.append(frames[:size])
        frames = frames[size:]
    return chunks


def vocoder_run(media_format: config_pb2.MediaFormat.ValueType = config_pb2.MEDIA_FORMAT_PCM16) -> Run:
    run = replace(run_of(None), sources=(("talker", ""),))
    run.params.format = media_format
    return run


def feed_codes(driver: Driver, run: int, chunks: Sequence[torch.Tensor]) -> None:
    for chunk in chunks:
        driver.engine.feed(run, Feed("talker", "", tensors={"codes": [chunk]}))
    driver.engine.feed(run, Feed("talker", "", end=True))


def heard(seen: Seen) -> NDArray[np.float32]:
    data = b"".join(piece.data for output in seen.outputs for piece in output.media)
    return np.frombuffer(data, "<i2").astype(np.float32) / 32767


@pytest.mark.parametrize("frames", [1, 7, 40, 110])
def test_joined_chunks_equal_one_whole_decode(model: Qwen3OmniMoeForConditionalGeneration, frames: int) -> None:
    decoder = Code2Wav(stage("code2wav"))
    with torch.inference_mode():
        decoder.load()
        expected = whole(model, codes(frames))
        assert np.abs(expected).max() > 0.1, "silence proves nothing"
        for sizes in SPLITS:
            state, pieces = decoder.open(), []
            for chunk in cut(codes(frames), sizes):
                [(state, samples)] = decoder.decode([(state, chunk)])
                pieces.append(samples)
            joined = np.concatenate(pieces)
            assert joined.shape == expected.shape
            assert np.abs(joined - expected).max() < 1e-5


def test_a_chunk_sounds_the_same_in_a_batch_of_ragged_runs(model: Qwen3OmniMoeForConditionalGeneration) -> None:
    decoder = Code2Wav(stage("code2wav"))
    with torch.inference_mode():
        decoder.load()
        runs = [cut(codes(20 + 20 * seed, seed), SPLITS[seed % 4]) for seed in range(4)]
        states = [decoder.open() for _ in runs]
        joined: list[list[NDArray[np.float32]]] = [[] for _ in runs]
        while any(runs):
            going = [index for index, chunks in enumerate(runs) if chunks]
            decoded = decoder.decode([(states[index], runs[index].pop(0)) for index in going])
            for index, (state, samples) in zip(going, decoded, strict=True):
                states[index] = state
                joined[index].append(samples)
    for seed, pieces in enumerate(joined):
        assert np.abs(np.concatenate(pieces) - whole(model, codes(20 + 20 * seed, seed))).max() < 1e-5


def test_eight_streams_at_once_give_the_pcm_of_whole_decodes(
    driver: Driver, model: Qwen3OmniMoeForConditionalGeneration
) -> None:
    runs = [driver.submit(vocoder_run()) for _ in range(8)]
    for seed, run in enumerate(runs):
        feed_codes(driver, run, cut(codes(10 + 11 * seed, seed), SPLITS[seed % 5]))
    for seed, seen in enumerate(driver.results(runs)):
        expected = whole(model, codes(10 + 11 * seed, seed))
        assert np.abs(heard(seen) - expected).max() < 1e-3
        assert seen.finished.usage.audio_samples == len(expected)
        assert sum(piece.samples for output in seen.outputs for piece in output.media) == len(expected)


def test_from_the_thinkers_rows_to_sound_equals_transformers(
    driver: Driver, model: Qwen3OmniMoeForConditionalGeneration
) -> None:
    spoken = speak(model, conversation("How are you today?"), 12, 40)
    talker = Driver(build(stage("talker")))
    try:
        text = talker.submit(talker_run(max_tokens=40))
        feed_text(talker, text, spoken, range(10, 40, 3))
        chunks = [output.tensors["codes"] for output in talker.result(text).outputs]
    finally:
        talker.close()
    run = driver.submit(vocoder_run())
    feed_codes(driver, run, chunks)
    assert np.abs(heard(driver.result(run)) - whole(model, spoken.codes)).max() < 1e-3


def test_the_first_piece_says_what_it_is_and_the_last_that_it_ends(driver: Driver) -> None:
    run = driver.submit(vocoder_run(config_pb2.MEDIA_FORMAT_WAV))
    feed_codes(driver, run, cut(codes(60), [8, 25]))
    pieces = [piece for output in driver.result(run).outputs for piece in output.media]
    assert (pieces[0].mime_type, pieces[0].sample_rate) == ("audio/wav", 24_000)
    assert not any(piece.mime_type for piece in pieces[1:])
    assert [piece.last for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert all(len(piece.data) <= 64 * 1024 for piece in pieces)
    assert {piece.modality for piece in pieces} == {content_pb2.MODALITY_AUDIO}


@pytest.mark.parametrize(
    "bad", [torch.full((3, 4), 512), torch.full((3, 4), -1), torch.zeros(3, 5, dtype=torch.int64), torch.zeros(3, 4)]
)
def test_codes_that_are_none_fail_their_run_alone(
    driver: Driver, model: Qwen3OmniMoeForConditionalGeneration, bad: torch.Tensor
) -> None:
    good, run = driver.submit(vocoder_run()), driver.submit(vocoder_run())
    feed_codes(driver, run, [bad])
    feed_codes(driver, good, [codes(20)])
    assert driver.result(run).failed.error.reason == Reason.STAGE_FAILED
    assert np.abs(heard(driver.result(good)) - whole(model, codes(20))).max() < 1e-3
