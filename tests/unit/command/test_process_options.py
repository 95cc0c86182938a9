"""Options of the processes that omnid starts, and that people start by hand: refused by name, before anything else."""

from __future__ import annotations

import socket

import pytest

from gateway import server as gateway
from omni.rpc.address import ListenError, check_address, check_free, split_address
from stage_server import server as stage_server

JOINS = ["--coordinator", "127.0.0.1:7070", "--model", "m", "--stage", "s"]
GATEWAY = ["--coordinator", "127.0.0.1:7070"]


@pytest.mark.parametrize(
    "text", ["127.0.0.1:65536", "127.0.0.1:80000", "127.0.0.1:", ":7070", "x", "a b:1", "h:-1", "[x:1"]
)
def test_what_is_no_address_is_refused_with_what_is_allowed(text: str) -> None:
    with pytest.raises(ValueError, match="must be HOST:PORT with a port from 0 to 65535, got"):
        check_address(text)


def test_of_a_name_with_several_addresses_one_that_can_be_listened_on_is_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kind = (socket.AF_INET, socket.SOCK_STREAM, 0, "")
    here, elsewhere = (*kind, ("127.0.0.1", 0)), (*kind, ("192.0.2.1", 0))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [elsewhere, here])
    check_free("both:0")
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [elsewhere])
    with pytest.raises(ListenError, match="cannot listen on both:0: Cannot assign requested address"):
        check_free("both:0")


def test_an_address_falls_into_host_and_port() -> None:
    assert split_address("127.0.0.1:0") == ("127.0.0.1", 0)
    assert split_address("[::1]:65535") == ("::1", 65535)


@pytest.mark.parametrize(
    "options",
    [
        ["--coordinator", "127.0.0.1:70000"],
        ["--listen", "127.0.0.1:99999"],
        ["--listen", "nonsense"],
        ["--metrics-port", "65536"],
        ["--metrics-port", "-1"],
        ["--index", "-1"],
        ["--log-level", "loud"],
    ],
)
def test_a_stage_server_refuses_it_by_name(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        stage_server.parse([*JOINS, *options])
    assert ended.value.code == 2
    assert f"argument {options[0]}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options",
    [
        ["--coordinator", "127.0.0.1:70000"],
        ["--listen", "127.0.0.1:99999"],
        ["--ready-fd", "977"],
        ["--ready-fd", "x"],
        ["--max-body-bytes", "0"],
    ],
)
def test_a_gateway_refuses_it_by_name(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        gateway.parse([*GATEWAY, *options])
    assert ended.value.code == 2
    assert f"argument {options[0]}" in capsys.readouterr().err
