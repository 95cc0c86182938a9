"""Deployments: read, overridden, resolved."""

from pathlib import Path

import pytest

from omni.rpc.spec import spec_hash
from omni.v1 import config_pb2, content_pb2
from omnid.config import ConfigError, DeployConfig, load_deploy, override, resolve, shipped_deploys

MODEL = "models:\n  - name: m.1\n    pipeline: synthetic\n"


def deploy(tmp_path: Path, text: str) -> DeployConfig:
    (tmp_path / "d.yaml").write_text(text)
    return load_deploy(str(tmp_path / "d.yaml"))


def stages(pipeline: config_pb2.ResolvedPipeline) -> dict[str, config_pb2.StageSpec]:
    return {spec.stage: spec for spec in pipeline.stages}


def test_shipped_deployments_resolve() -> None:
    assert {"demo", "synthetic"} <= set(shipped_deploys())
    for name in shipped_deploys():
        assert resolve(load_deploy(name))


def test_the_demo_has_its_two_models() -> None:
    omni, image = resolve(load_deploy("demo"))
    assert [spec.stage for spec in omni.stages] == ["thinker", "talker", "code2wav"]
    assert {spec.checkpoint for spec in omni.stages} == {"asset:tiny_omni"}
    assert [spec.checkpoint for spec in image.stages] == ["asset:tiny_image"]
    assert stages(omni)["thinker"].outputs == [content_pb2.MODALITY_TEXT]
    assert stages(omni)["code2wav"].sources == ["talker"]


def test_everything_unsaid_has_a_default(tmp_path: Path) -> None:
    (pipeline,) = resolve(deploy(tmp_path, MODEL))
    for spec in pipeline.stages:
        bounds = spec.bounds
        seconds = [
            getattr(bounds, name).ToTimedelta().total_seconds()
            for name in ("queue", "first_output", "gap", "cancel", "total")
        ]
        assert seconds == [30, 60, 30, 5, 600]
        assert (spec.dtype, spec.max_running, spec.arena_bytes, spec.checksum) == ("auto", 32, 64 << 20, False)
        assert spec.limits.pixels > 0
    assert [(p.stage, p.replicas, list(p.devices)) for p in pipeline.placements] == [(s, 1, ["cpu"]) for s in "abc"]


def test_a_stage_goes_before_its_model(tmp_path: Path) -> None:
    text = MODEL + (
        "    dtype: float16\n    arena: 8MiB\n    env: {X: '1', Y: '1'}\n    bounds: {gap: 2.5, queue: 1}\n"
        "    checksum: true\n    stages:\n      b: {dtype: float32, checksum: false, bounds: {gap: 7}, env: {Y: '2'},"
        " replicas: 3, devices: ['cuda:0', 'cuda:1']}\n"
    )
    (pipeline,) = resolve(deploy(tmp_path, text))
    a, b = stages(pipeline)["a"], stages(pipeline)["b"]
    assert (a.dtype, b.dtype) == ("float16", "float32")
    assert (a.bounds.gap.ToMilliseconds(), b.bounds.gap.ToMilliseconds(), b.bounds.queue.seconds) == (2500, 7000, 1)
    assert a.arena_bytes == b.arena_bytes == 8 << 20
    assert (a.checksum, b.checksum) == (True, False)
    placement = pipeline.placements[1]
    assert (placement.replicas, list(placement.devices)) == (3, ["cuda:0", "cuda:1", "cuda:0"])
    assert dict(placement.env) == {"X": "1", "Y": "2"}


def test_overrides_go_where_their_path_says(tmp_path: Path) -> None:
    config = deploy(tmp_path, MODEL)
    given = ["models.m.1.stages.a.max_running=4", "models.m.1.max_running=9", "listen.grpc=0.0.0.0:1"]
    changed = override(config, given)
    (pipeline,) = resolve(changed)
    assert changed.listen.grpc == "0.0.0.0:1"
    assert [spec.max_running for spec in pipeline.stages] == [4, 9, 9]
    assert override(config, ["listen.http=null"]).listen.http is None
    assert config.listen.http is not None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            "models.m.1.max_runing=4",
            r"--set: models\[0\]\.max_runing: unknown key 'max_runing'; did you mean 'max_running'\?",
        ),
        ("models.m.1.max_running=many", r"--set: models\[0\]\.max_running: got 'many'; must be a valid integer"),
        ("models.m.1.max_running=0", r"got 0; must be greater than or equal to 1"),
        ("models.n.max_running=1", r"--set: models\.n\.max_running: no entry is named 'n'; allowed: m\.1"),
        ("models.m.1.name.x=1", r"models\.0\.name is a value and has no keys"),
        ("models.m.1.stages.q.replicas=1", r"--set: models\[0\]\.stages\.q: pipeline synthetic has no stage 'q'"),
        ("models", r"--set: got 'models'; must be PATH=VALUE"),
        ("models..x=1", r"no entry is named ''"),
        ("models.m.1.=1", r"--set: got 'models\.m\.1\.=1'; must be PATH=VALUE"),
        ("models.m.1.env.A=[", r"--set: models\.m\.1\.env\.A: not YAML: expected the node content"),
        ("models.m.1.env.A=${NOPE_X}", r"--set: models\.m\.1\.env\.A: environment variable NOPE_X is not set"),
    ],
)
def test_a_wrong_override_is_blamed_on_the_command_line(tmp_path: Path, given: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(override(deploy(tmp_path, MODEL), [given]))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("    max_requests: -1\n", r"d\.yaml:4: models\[0\]\.max_requests: got -1; must be greater than or equal to 1"),
        ("    arena: 5 parsecs\n", r"got '5 parsecs'; must be a number of bytes or one with a unit \(B, KiB"),
        ("    bounds: {gap: .inf}\n", r"bounds\.gap: got inf; must be a finite number"),
        (
            "    stages: {b: {bounds: {total: 5}}}\n",
            r"stages\.b\.bounds\.total: unknown key 'total'; allowed: cancel, first_o",
        ),
        ("    bounds: {gapp: 1}\n", r"bounds\.gapp: unknown key 'gapp'; did you mean 'gap'\?"),
        ("    stages: {a: {devices: []}}\n", r"devices: got \[\]; must have at least 1 item, not 0"),
        ("    stages: {a: {hosts: [x;y]}}\n", r"hosts\[0\]: got 'x;y'; must match pattern"),
        ("    env: {A=B: x}\n", r"env\.A=B: got 'A=B'; must match pattern"),
        (f"  - name: n\n    pipeline: {'x' * 300}.yaml\n", r"models\[1\]\.pipeline: got 'x{78}…; no such file$"),
        ("  - name: n\n    pipeline: ~nobody-here/x.yaml\n", r"pipeline: got '~nobody-here/x\.yaml'; no such file$"),
        ("listen: {http: x}\n", r"d\.yaml:4: listen\.http: must be HOST:PORT with a port from 0 to 65535, got 'x'$"),
        ("    dtype: float8\n", r"got 'float8'; did you mean 'float32'\? allowed: auto, bfloat16, float16, float32"),
        ("    trust_remote_code: 'yes'\n", r"got 'yes'; must be a valid boolean"),
        ("    stages: {a: {devices: [tpu]}}\n", r"stages\.a\.devices\[0\]: got 'tpu'; "),
        ("    stages: {a: {hosts: [x, y]}}\n", r"stages\.a\.hosts: got 2 hosts for 1 replica"),
        ("    stages: {a: {defaults: {sampling: {temperatur: 1}}}}\n", r"did you mean 'temperature'\?"),
        (
            "    stages: {a: {defaults: {sampling: {top_p: 2.0}}}}\n",
            r"top_p: got 2\.0; must be less than or equal to 1",
        ),
        ("    stages: {a: {defaults: {sampling: {seed: -2}}}}\n", r"seed: got -2; must be greater than or equal to 0"),
        ("    stages: {a: {defaults: {format: bmp}}}\n", r"got 'bmp'; .*allowed: flac, jpeg"),
        ("    stages: {a: {engine: {when: 2020-01-01}}}\n", r"engine: got .*; must be made of text, numbers"),
        ("  - name: m.1\n    pipeline: synthetic\n", r"d\.yaml:4: models\[1\]\.name: got 'm\.1' twice"),
        (
            "  - name: n\n    pipeline: text\n",
            r"models\[1\]\.checkpoint: must be given: pipeline text loads a checkpoint",
        ),
        ("  - name: n\n    pipeline: txet\n", r"d\.yaml:5: models\[1\]\.pipeline: got 'txet', .*did you mean 'text'"),
        ("listen: {grpc: 7070}\n", r"listen\.grpc: got 7070; must be a valid string"),
    ],
)
def test_mistakes_are_named_with_line_and_remedy(tmp_path: Path, more: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(deploy(tmp_path, MODEL + more))


@pytest.mark.parametrize("text", ["", "[]\n", "3\n", "models:\n"])
def test_a_file_of_another_shape_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"d\.yaml"):
        deploy(tmp_path, text)


def test_a_pipeline_file_beside_the_deployment_is_found_and_its_mistakes_are_its_own(tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text("name: p\n")
    with pytest.raises(ConfigError, match=r"p\.yaml:1: stages: must be given"):
        resolve(deploy(tmp_path, "models:\n  - {name: m, pipeline: ./p.yaml}\n"))


def test_parameters_and_arguments_reach_the_spec(tmp_path: Path) -> None:
    text = MODEL + (
        "    stages:\n      c:\n        engine: {rate: 20, faults: [{at: 3}], name: x}\n"
        "        defaults: {sampling: {temperature: 0, stop: [a], seed: 7}, format: wav, voice: anna, extra: {k: 1}}\n"
    )
    spec = stages(resolve(deploy(tmp_path, text))[0])["c"]
    assert spec.engine["faults"][0]["at"] == 3
    assert spec.defaults.sampling.HasField("temperature")
    assert (spec.defaults.sampling.seed, list(spec.defaults.sampling.stop)) == (7, ["a"])
    assert (spec.defaults.format, spec.defaults.voice) == (config_pb2.MEDIA_FORMAT_WAV, "anna")
    assert not spec.defaults.sampling.HasField("top_p")


def test_equal_specs_have_equal_hashes(tmp_path: Path) -> None:
    engine = "    stages: {a: {engine: {x: 1, y: {p: 1, q: 2}}}}\n"
    turned = "    stages: {a: {engine: {y: {q: 2, p: 1}, x: 1}}}\n"
    first, second = (stages(resolve(deploy(tmp_path, MODEL + text))[0]) for text in (engine, turned))
    assert spec_hash(first["a"]) == spec_hash(second["a"])
    assert spec_hash(first["a"]) != spec_hash(first["b"])
    assert len(spec_hash(first["a"])) == 16


@pytest.mark.parametrize(
    ("said", "says"),
    [
        ("stall: 1.0e-12", "models[0].stall"),
        ("bounds: {gap: 0.0001}", "models[0].bounds.gap"),
        ("lease: .nan", "models[0].lease"),
    ],
)
def test_a_bound_that_no_clock_here_can_keep_is_refused(tmp_path: Path, said: str, says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        deploy(tmp_path, MODEL + f"    {said}\n")
    assert says in str(refused.value)


@pytest.mark.parametrize("value", [".nan", ".inf", "[1, -.inf]", "{deep: .nan}"])
@pytest.mark.parametrize("where", ["engine: {start_seconds: %s}", "defaults: {extra: {rate: %s}}"])
def test_an_argument_that_is_no_finite_number_is_refused_where_it_was_written(
    tmp_path: Path, where: str, value: str
) -> None:
    with pytest.raises(ConfigError, match="must be made of finite numbers") as refused:
        deploy(tmp_path, MODEL + f"    stages:\n      a: {{{where % value}}}\n")
    assert f"models[0].stages.a.{where.partition(':')[0]}" in str(refused.value)
