"""A request's parameters over a stage's defaults."""

from omni.rpc.params import overlay
from omni.v1 import config_pb2


def test_fields_that_are_set_win_and_the_others_stay():
    defaults = config_pb2.StageParams(voice="low", format=config_pb2.MEDIA_FORMAT_WAV)
    defaults.sampling.temperature = 0.5
    defaults.sampling.top_k = 40
    own = config_pb2.StageParams(voice="high")
    own.sampling.temperature = 0
    laid = overlay(defaults, own)
    assert (laid.voice, laid.format) == ("high", config_pb2.MEDIA_FORMAT_WAV)
    assert laid.sampling.HasField("temperature")
    assert (laid.sampling.temperature, laid.sampling.top_k) == (0, 40)
    assert not laid.HasField("diffusion")
    assert defaults.voice == "low"
    assert not own.HasField("format")


def test_a_list_replaces_the_defaults_list_and_an_empty_one_does_not():
    defaults = config_pb2.StageParams(sampling=config_pb2.SamplingParams(stop=["a", "b"], stop_token_ids=[1]))
    laid = overlay(defaults, config_pb2.StageParams(sampling=config_pb2.SamplingParams(stop=["c"])))
    assert (list(laid.sampling.stop), list(laid.sampling.stop_token_ids)) == (["c"], [1])


def test_extra_is_laid_over_key_by_key():
    defaults, own = config_pb2.StageParams(), config_pb2.StageParams()
    defaults.extra.update({"speed": 1.0, "style": {"mood": "calm"}})
    own.extra.update({"style": {"pitch": 2}})
    assert dict(overlay(defaults, own).extra) == {"speed": 1.0, "style": {"pitch": 2}}


def test_a_message_that_is_present_and_empty_stays_present():
    assert overlay(config_pb2.StageParams(), config_pb2.StageParams(sampling={})).HasField("sampling")
