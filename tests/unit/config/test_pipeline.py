"""Pipelines: what is refused, and in which words."""

from pathlib import Path

import pytest

from omnid.config import ConfigError, PipelineConfig, load_pipeline, shipped_pipelines
from omnid.config.document import parse
from omnid.config.pipeline import read_pipeline

HEAD = "name: p\ninputs: [text]\ndefault_outputs: [text]\n"


def read(body: str, head: str = HEAD) -> PipelineConfig:
    return read_pipeline(parse(head + body, "p.yaml", {}))


def stage(name: str, outputs: str = "[]", more: str = "") -> str:
    return f"  {name}: {{kind: synthetic, family: synthetic, outputs: {outputs}{more}}}\n"


CHAIN = "stages:\n" + stage("a", "[text]") + stage("b", "[audio]")


def test_shipped_pipelines_are_sound() -> None:
    assert {"qwen3_omni", "text", "image", "synthetic"} <= set(shipped_pipelines())
    for name in shipped_pipelines():
        assert load_pipeline(name).name == name


def test_qwen3_omni_streams_from_thinker_to_sound() -> None:
    pipeline = load_pipeline("qwen3_omni")
    assert pipeline.ordered() == ["thinker", "talker", "code2wav"]
    assert pipeline.sources("thinker") == []
    assert pipeline.sources("code2wav") == ["talker"]
    assert [(edge.mode, edge.tensors) for edge in pipeline.edges] == [
        ("stream", ["prompt_ids", "image_grid_thw", "audio_feature_lengths", "embeds", "hidden"]),
        ("stream", ["codes"]),
    ]


def test_an_unknown_pipeline_names_the_closest_and_all() -> None:
    with pytest.raises(FileNotFoundError, match=r"did you mean 'qwen3_omni'\? allowed: image, qwen3_omni"):
        load_pipeline("qwen_omni")


def test_a_path_is_read_relative_to_the_given_folder(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(HEAD + "stages:\n" + stage("a", "[text]"))
    assert load_pipeline("./mine.yaml", tmp_path).name == "p"
    with pytest.raises(FileNotFoundError, match="no such file"):
        load_pipeline("./yours.yaml", tmp_path)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "stages:\n  a: {kind: synthetic, familly: synthetic}\n",
            r"p\.yaml:5: stages\.a\.familly: unknown key 'familly'; did you mean 'family'\?",
        ),
        (
            "stages:\n  a: {kind: synthetik, family: synthetic}\n",
            r"p\.yaml:5: stages\.a\.kind: got 'synthetik'; did you mean 'synthetic'\? allowed: autoregressive",
        ),
        ("stages:\n  a: {kind: synthetic}\n", r"p\.yaml:5: stages\.a\.family: must be given"),
        ("stages:\n  A B: {kind: synthetic, family: synthetic}\n", r"p\.yaml:5: stages\.A B: got 'A B'"),
        ("stages: []\n", r"p\.yaml:4: stages: got \[\]; must be a mapping"),
        (
            CHAIN + "edges:\n  - {from: a, to: c, mode: stream}\n",
            r"p\.yaml:8: edges\[0\]\.to: got 'c', which is no stage; allowed: a, b",
        ),
        (
            CHAIN + "edges:\n  - {from: a, to: b, mode: sometimes}\n",
            r"edges\[0\]\.mode: got 'sometimes'; allowed: end, stream",
        ),
        (
            CHAIN + "edges:\n  - {from: a, to: b, mode: end}\n  - {from: b, to: a, mode: end}\n",
            r"edges: go in a circle",
        ),
        (CHAIN + "edges:\n  - {from: a, to: a, mode: end}\n", r"edges: go in a circle: a -> a"),
        (
            CHAIN + "edges:\n" + "  - {from: a, to: b, mode: end}\n" * 2,
            r"p\.yaml:9: edges\[1\]: a second edge from a to b",
        ),
        ("stages:\n" + stage("a", "[text]") + stage("b"), r"p\.yaml:6: stages\.b: has neither an output"),
        (
            "stages:\n" + stage("a", "[text]") + stage("b", "[text]"),
            r"stages\.b\.outputs\[0\]: got 'text', which a already gives",
        ),
        (
            "stages:\n" + stage("a", "[audio]"),
            r"default_outputs\[0\]: got 'text', which no stage outputs; allowed: audio",
        ),
        (
            "stages:\n  a: {kind: diffusion, family: x, outputs: [text]}\n",
            r"got 'text', which no diffusion stage makes",
        ),
        ("stages:\n  a: {kind: synthetic, family: text, outputs: [text]}\n", r"stages\.a\.family: got 'text'"),
        (
            "stages:\n" + stage("a", "[text]", ", sources: [b]") + stage("b", "[audio]"),
            r"stages\.a\.sources: got b; its edges come from: none",
        ),
        (
            "stages:\n" + stage("a", "[text]", ", companions: [{role: n}, {role: n}]"),
            r"companions\[1\]\.role: got 'n' twice",
        ),
    ],
)
def test_mistakes_are_named_with_line_and_remedy(body: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(body)


def test_consumers_of_a_stage_with_companions_wait_for_its_end() -> None:
    body = (
        "stages:\n" + stage("a", "[text]", ", companions: [{role: n, negative_prompt: true}]") + stage("b", "[audio]")
    )
    assert read(body + "edges:\n  - {from: a, to: b, mode: end}\n").stages["a"].companions[0].negative_prompt
    with pytest.raises(ConfigError, match=r"a has companions, so its consumers must wait: 'end'"):
        read(body + "edges:\n  - {from: a, to: b, mode: stream}\n")


def test_edges_of_one_consumer_have_one_mode() -> None:
    body = "stages:\n" + "".join(
        stage(name, f"[{out}]") for name, out in zip("abc", ("text", "audio", "image"), strict=True)
    )
    with pytest.raises(ConfigError, match=r"edges\[1\]\.mode: got 'end'; all edges to c must have one mode"):
        read(body + "edges:\n  - {from: a, to: c, mode: stream}\n  - {from: b, to: c, mode: end}\n")


def test_all_mistakes_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        read("stages:\n  a: {kind: x, family: synthetic, otputs: [text]}\n", "name: P P\n")
    assert {problem.path[-1] for problem in caught.value.problems} == {
        "name",
        "inputs",
        "default_outputs",
        "kind",
        "otputs",
    }
