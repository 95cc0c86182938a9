"""The nursery's side of an order, without its process."""

from __future__ import annotations

import errno
import json
import os
import socket

import pytest

from omnid.launcher.nursery import Nursery


def test_a_fork_that_the_host_refuses_is_reported_and_the_nursery_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> int:
        raise BlockingIOError(errno.EAGAIN, "no room for another process")

    monkeypatch.setattr(os, "fork", refuse)
    launcher, orders = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    output, output_end = os.pipe()
    with launcher, orders, os.fdopen(output, "rb") as read:
        nursery = Nursery(orders, [])
        order = {"order": "start", "id": 7, "argv": ["true"], "arguments": [], "env": {}}
        socket.send_fds(launcher, [json.dumps(order).encode()], [output_end])
        os.close(output_end)
        assert nursery._obey() == (None, True)
        assert json.loads(launcher.recv(4096)) == {"report": "refused", "id": 7, "errno": errno.EAGAIN}
        assert read.read() == b"", "nobody holds the other end"
