"""The command's options are looked at before anything is started: exit status 2, and the option's name."""

from __future__ import annotations

import os
import resource
import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from omnid.cli import app
from omnid.saving import save

NOWHERE = "127.0.0.1:1"
"""Nothing listens there."""


def omnid(*arguments: str, **env: str) -> Result:
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "200", "TERM": "dumb", **env})


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (("up", "synthetic", "--grpc", "127.0.0.1:80000"), "--grpc"),
        (("up", "synthetic", "--grpc", "127.0.0.1"), "--grpc"),
        (("up", "synthetic", "--http", "foo"), "--http"),
        (("up", "synthetic", "--ready-timeout", "-5"), "--ready-timeout"),
        (("up", "synthetic", "--ready-timeout", "0"), "--ready-timeout"),
        (("up", "synthetic", "--ready-timeout", "inf"), "--ready-timeout"),
        (("up", "synthetic", "--ready-timeout", "nan"), "--ready-timeout"),
        (("up", "synthetic", "--ready-fd", "977"), "--ready-fd"),
        (("up", "synthetic", "--ready-fd", "-3"), "--ready-fd"),
        (("up", "synthetic", "--ready-fd", "99999999999999999999"), "--ready-fd"),
        (("up", "synthetic", "--log-level", "loud"), "--log-level"),
        (("up", "synthetic", "--log-format", "xml"), "--log-format"),
        (("serve", "synthetic", "--grpc", "127.0.0.1:80000"), "--grpc"),
        (("serve", "synthetic", "--ready-fd", "977"), "--ready-fd"),
        (("ps", "--target", "::::"), "--target"),
        (("generate", "m", "hi", "--target", "here"), "--target"),
        (("generate", "m", "hi", "--output", "smell", "--target", NOWHERE), "--output"),
        (("generate", "m", "hi", "--save", "/proc/nope", "--target", NOWHERE), "--save"),
        (("demo", "--out", "/proc/nope"), "--out"),
    ],
)
def test_an_option_that_cannot_be_is_refused_by_its_name(arguments: tuple[str, ...], option: str) -> None:
    ended = omnid(*arguments)
    assert ended.exit_code == 2, ended.output
    assert option in ended.output
    assert "must be" in ended.output or "Input should be" in ended.output


def test_what_is_no_name_of_a_host_is_refused_by_the_option() -> None:
    for host in ("a..b", "x" * 300, "nowhere.invalid"):
        ended = omnid("serve", "synthetic", "--grpc", f"{host}:0")
        assert ended.exit_code == 2
        assert ended.output.startswith(f"omnid: --grpc: cannot listen on {host}:0: ")


def test_a_descriptor_that_is_for_reading_is_refused() -> None:
    reading, writing = os.pipe()
    try:
        ended = omnid("up", "synthetic", "--ready-fd", str(reading))
    finally:
        os.close(reading)
        os.close(writing)
    assert ended.exit_code == 2
    assert "for writing" in ended.output


def test_a_folder_for_answers_is_tried_before_anything_is_asked_and_none_is_left_behind(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    refused = omnid("generate", "m", "hi", "--save", str(tmp_path / "file"), "--target", NOWHERE)
    assert refused.exit_code == 2
    assert "--save" in refused.output
    tried = omnid("generate", "m", "hi", "--save", str(tmp_path / "a" / "b"), "--target", NOWHERE)
    assert tried.exit_code == 1, "it gets as far as the coordinator"
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_a_file_that_does_not_fit_is_named_and_nothing_of_it_is_left(tmp_path: Path) -> None:
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limit[1]))
    try:
        save(tmp_path / "a" / "fits", b"x" * 1000)
        with pytest.raises(OSError, match=f"File too large: '{tmp_path}/a/long'"):
            save(tmp_path / "a" / "long", b"x" * 1001)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert [each.name for each in (tmp_path / "a").iterdir()] == ["fits"]


def test_the_demo_refuses_a_deployment_that_serves_other_models() -> None:
    ended = omnid("demo", "--deploy", "synthetic")
    assert ended.exit_code == 2
    assert "synthetic.yaml:2: models: the deployment must serve tiny-omni and tiny-image" in ended.output


@pytest.mark.parametrize("asset", ["tiny_omn", "", "../assets/tiny_omni", "/etc"])
def test_a_deployment_that_names_no_shipped_model_is_refused_with_those_there_are(tmp_path: Path, asset: str) -> None:
    file = tmp_path / "d.yaml"
    file.write_text(f"models:\n  - name: m\n    pipeline: text\n    checkpoint: 'asset:{asset}'\n")
    for command in (("config", "validate"), ("config", "resolve"), ("serve",), ("up",)):
        ended = omnid(*command, str(file))
        assert ended.exit_code == 2
        assert f"{file}:4: models[0].checkpoint: there is no asset {asset!r}" in ended.output
        assert "allowed: tiny_image, tiny_omni" in ended.output


@pytest.mark.parametrize("key", ["grpc", "http", "metrics"])
def test_an_address_that_is_taken_is_told_under_the_key_or_the_option_that_says_it(tmp_path: Path, key: str) -> None:
    file = tmp_path / "d.yaml"
    listen = {"grpc": "127.0.0.1:0", "http": "127.0.0.1:0"}
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        lines = "".join(f"  {name}: {where}\n" for name, where in {**listen, key: address}.items())
        file.write_text(f"models:\n  - {{name: m, pipeline: synthetic}}\nlisten:\n{lines}")
        told = f"cannot listen on {address}: Address already in use"
        line = 4 + [*listen, "metrics"].index(key)
        for command in ("up", "serve")[: 1 if key == "http" else 2]:
            ended = omnid(command, str(file))
            assert ended.exit_code == 2
            assert ended.output == f"omnid: {file}:{line}: listen.{key}: {told}\n"
            if key != "metrics":
                others = () if command == "serve" else ("--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0")
                ended = omnid(command, "synthetic", *others, f"--{key}", address)
                assert (ended.exit_code, ended.output) == (2, f"omnid: --{key}: {told}\n")


def test_tls_files_of_a_deployment_that_has_none_are_refused_and_not_left_out() -> None:
    for command in (("ps",), ("generate", "m", "hi")):
        ended = omnid(*command, "--target", NOWHERE, "--tls-from", "synthetic")
        assert ended.exit_code == 2
        assert "synthetic.yaml:" in ended.output
        assert "has no tls, which --tls-from is to take files from" in ended.output


TLS = "models:\n  - {name: m, pipeline: synthetic}\ntls:\n  ca: ca.pem\n  cert: own.pem\n  key: own.key\n"


def test_tls_files_that_are_not_there_are_named_with_line_and_key(tmp_path: Path) -> None:
    file = tmp_path / "d.yaml"
    file.write_text(TLS)
    (tmp_path / "own.pem").mkdir()
    for command in (("config", "validate"), ("serve", "--grpc", "127.0.0.1:0"), ("up",), ("ps", "--tls-from")):
        ended = omnid(*command, str(file))
        assert ended.exit_code == 2
        assert f"{file}:4: tls.ca: {tmp_path}/ca.pem cannot be read: No such file" in ended.output
        assert f"{file}:5: tls.cert: {tmp_path}/own.pem cannot be read: Is a directory" in ended.output
        assert f"{file}:6: tls.key: " in ended.output


def test_a_tls_file_that_is_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    file = tmp_path / "d.yaml"
    file.write_text(TLS)
    os.mkfifo(tmp_path / "ca.pem")
    ended = omnid("config", "validate", str(file))
    assert f"{file}:4: tls.ca: {tmp_path}/ca.pem cannot be read: Is a pipe" in ended.output


def test_tls_files_that_hold_something_else_are_named(tmp_path: Path) -> None:
    file = tmp_path / "d.yaml"
    file.write_text(TLS)
    for name in ("ca.pem", "own.pem", "own.key"):
        (tmp_path / name).write_text("hello")
    ended = omnid("config", "validate", str(file))
    assert ended.exit_code == 2
    assert f"{file}:3: tls: " in ended.output
    assert "own.pem" in ended.output


def test_validate_warns_of_what_only_another_host_or_process_knows(tmp_path: Path) -> None:
    file = tmp_path / "d.yaml"
    file.write_text(
        "models:\n  - name: m\n    pipeline: text\n    checkpoint: ./none\n"
        "    stages: {llm: {engine: {max_lenth: 4}}}\n"
    )
    ended = omnid("config", "validate", str(file))
    assert ended.exit_code == 0, ended.output
    assert f"warning: {file}:4: models[0].checkpoint: {tmp_path}/none is not a folder on this host" in ended.output
    assert f"note: {file}:5: models[0].stages.llm.engine: max_lenth: checked by the stage server" in ended.output


def test_a_checkpoint_of_another_host_is_not_looked_for_here(tmp_path: Path) -> None:
    from omnid.config import ConfigError
    from omnid.launcher.deployment import prepare

    file = tmp_path / "d.yaml"
    text = "models:\n  - name: m\n    pipeline: text\n    checkpoint: ./none\n"
    file.write_text(text + "    stages: {llm: {hosts: [far.example]}}\n")
    assert prepare(str(file))
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"d\.yaml:4: models\[0\]\.checkpoint"):
        prepare(str(file))
