"""Media before decoding: sizes from headers, strict base64, and URLs that lead nowhere private."""

import asyncio
import base64
import contextlib
import io
import ipaddress
from collections.abc import AsyncIterator

import numpy as np
import pytest
import soundfile
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from gateway.media.encoding import decode_base64, decoded_size, split_data_url
from gateway.media.fetch import Fetcher, is_public
from gateway.media.sniff import sniff
from omni.rpc.errors import OmniError, Reason

BOUND_S = 5.0


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "BMP", "WEBP"])
@pytest.mark.parametrize("size", [(1, 1), (37, 300), (640, 480)])
def test_the_size_of_a_picture_is_read_from_its_header(kind, size):
    file = io.BytesIO()
    Image.new("RGB", size, (200, 30, 30)).save(file, kind)
    found = sniff(file.getvalue())
    assert (found.mime_type, found.width, found.height) == (f"image/{kind.lower()}", *size)


@pytest.mark.parametrize("options", [{"lossless": True}, {"exif": b"Exif\x00\x00"}, {"progressive": True}])
def test_other_layouts_of_the_same_kinds_are_read_too(options):
    kind = "JPEG" if "progressive" in options else "WEBP"
    file = io.BytesIO()
    Image.new("RGB", (51, 23)).save(file, kind, **options)
    assert (sniff(file.getvalue()).width, sniff(file.getvalue()).height) == (51, 23)


@pytest.mark.parametrize("kind", ["WAV", "FLAC"])
def test_the_length_of_a_recording_is_read_from_its_header(kind):
    file = io.BytesIO()
    soundfile.write(file, np.zeros(12_000, np.float32), 8000, format=kind)
    found = sniff(file.getvalue())
    assert found.mime_type == f"audio/{kind.lower()}" and found.seconds == pytest.approx(1.5)


def test_a_streamed_wav_file_lasts_as_long_as_what_is_there():
    file = io.BytesIO()
    soundfile.write(file, np.zeros(8000, np.int16), 8000, format="WAV")
    data = bytearray(file.getvalue())
    at = data.index(b"data") + 4
    data[at : at + 4] = b"\xff\xff\xff\xff"
    assert sniff(bytes(data)).seconds == pytest.approx(1.0)


@given(st.sampled_from([b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"RIFF", b"fLaC", b"GIF8", b"BM", b""]), st.binary())
def test_no_header_however_broken_is_more_than_unknown(magic, rest):
    sniff(magic + rest)
    sniff(magic + b"\x00\x00\x00\x00WAVEfmt " + rest)


@given(st.binary(min_size=1, max_size=2000))
def test_base64_is_decoded_and_its_size_known_before(data):
    text = base64.b64encode(data).decode()
    assert decoded_size(text) == len(data)
    assert asyncio.run(decode_base64(text, "x", len(data))) == data
    with pytest.raises(OmniError) as refused:
        asyncio.run(decode_base64(text, "x", len(data) - 1))
    assert refused.value.reason is Reason.MEDIA_TOO_LARGE


async def test_long_base64_is_decoded_in_pieces_to_the_same_bytes():
    data = bytes(range(256)) * 4096 + b"tail"
    assert await decode_base64(base64.b64encode(data).decode(), "x", len(data)) == data


@pytest.mark.parametrize("place", [10, 262_144 - 1, 300_000])
async def test_padding_in_the_middle_is_refused_wherever_it_is(place):
    text = base64.b64encode(bytes(400_000)).decode()
    with pytest.raises(OmniError) as refused:
        await decode_base64(text[:place] + "=" + text[place + 1 :], "x", 10**6)
    assert refused.value.reason is Reason.MEDIA_INVALID


@pytest.mark.parametrize("text", ["A", "AAA", "AA A", "AAAA\n", "ÄAAA", "A===", "====", "-_-_"])
async def test_what_is_no_base64_is_refused(text):
    with pytest.raises(OmniError) as refused:
        await decode_base64(text, "x", 1000)
    assert refused.value.reason is Reason.MEDIA_INVALID


def test_data_urls_may_have_parameters_and_no_type():
    assert split_data_url("data:;base64,AAAA", "x").mime_type == ""
    assert split_data_url("DATA:Image/PNG;charset=x;BASE64,AAAA", "x").mime_type == "image/png"
    assert split_data_url("data:a/b;base64,AA%2BA", "x").base64 == "AA+A"


@pytest.mark.parametrize(
    "address",
    [
        *(
            "127.0.0.1",
            "10.1.2.3",
            "172.16.0.1",
            "192.168.1.1",
            "169.254.169.254",
            "100.64.0.1",
            "0.0.0.0",
            "224.0.0.1",
        ),
        *("255.255.255.255", "198.18.0.1", "240.0.0.1"),
        *("::1", "::", "fe80::1", "fc00::1", "ff02::1", "::ffff:8.8.8.8", "::ffff:127.0.0.1", "2002:7f00:1::"),
        *("64:ff9b::7f00:1", "2001:0:7f00:1::", "2001:db8::1"),
    ],
)
def test_no_private_address_is_public(address):
    assert not is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize("address", ["8.8.8.8", "1.1.1.1", "2606:4700:4700::1111"])
def test_public_addresses_are_public(address):
    assert is_public(ipaddress.ip_address(address))


@contextlib.asynccontextmanager
async def web(*answers: bytes) -> AsyncIterator[tuple[str, list[bytes]]]:
    """A server that gives `answers` one by one, each to a connection of its own; its address and what it was asked."""
    asked: list[bytes] = []
    left = list(answers)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readuntil(b"\r\n\r\n"))
        with contextlib.suppress(ConnectionError):
            writer.write(left.pop(0))
            await writer.drain()
            writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}", asked


def answer(body: bytes, head: str = "Content-Type: image/png; x=y", status: str = "200 OK") -> bytes:
    return f"HTTP/1.1 {status}\r\n{head}\r\nConnection: close\r\n\r\n".encode() + body


def anywhere(**options) -> Fetcher:
    return Fetcher(allowed=lambda _address: True, **options)


async def test_a_file_is_fetched_through_redirects_from_the_address_that_was_checked():
    checked = []

    def allowed(address):
        checked.append(str(address))
        return True

    async with (
        web(answer(b"", "Location: /b?c", "302 Found"), answer(b"file")) as (host, asked),
        Fetcher(allowed=allowed) as fetcher,
    ):
        fetched = await fetcher.fetch(f"http://{host}/a", "x", 100)
    assert (fetched.data, fetched.mime_type) == (b"file", "image/png")
    assert [each.split(b" ")[1] for each in asked] == [b"/a", b"/b?c"]
    assert all(f"host: {host}".encode() in each.lower() for each in asked)
    assert checked == ["127.0.0.1", "127.0.0.1"]


async def refused(fetcher: Fetcher, url: str, limit: int = 100) -> OmniError:
    async with fetcher:
        with pytest.raises(OmniError) as error:
            await asyncio.wait_for(fetcher.fetch(url, "x", limit), BOUND_S)
    return error.value


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "[::1]", "2130706433", "0x7f.1", "[::ffff:127.0.0.1]"])
async def test_private_hosts_are_never_connected_to(host):
    async with web(answer(b"secret")) as (address, asked):
        error = await refused(Fetcher(), f"http://{host}:{address.split(':')[1]}/")
    assert error.reason is Reason.MEDIA_INVALID
    assert asked == []


async def test_a_redirect_to_a_private_address_is_not_followed():
    async with web(answer(b"", "Location: http://10.0.0.1/", "307 Temporary Redirect")) as (host, asked):
        error = await refused(Fetcher(allowed=lambda address: str(address) == "127.0.0.1"), f"http://{host}/")
    assert "public internet" in error.message and len(asked) == 1


async def test_endless_redirects_end():
    async with web(*[answer(b"", "Location: /again", "302 Found")] * 9) as (host, asked):
        error = await refused(anywhere(), f"http://{host}/")
    assert "redirects" in error.message and len(asked) == 4


async def test_a_file_that_is_too_large_is_not_read_to_its_end():
    for head in ("Content-Length: 101", "X: y"):
        async with web(answer(b"x" * 101, head)) as (host, _):
            error = await refused(anywhere(), f"http://{host}/")
        assert error.reason is Reason.MEDIA_TOO_LARGE


async def test_a_server_that_does_not_answer_is_given_up():
    async def serve(_reader, _writer):
        await asyncio.Event().wait()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        error = await refused(anywhere(within=0.2), f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/")
    assert "within 0.2 s" in error.message or "Timeout" in error.message


@pytest.mark.parametrize(
    "url",
    [
        "ftp://h/",
        "file:///etc/passwd",
        "http://",
        "http://a:b@h/",
        "http://h:99999/",
        "//h/",
        "x",
        "http://" + "h" * 3000,
    ],
)
async def test_odd_urls_are_refused(url):
    assert (await refused(anywhere(), url)).reason is Reason.MEDIA_INVALID


async def test_an_error_page_is_no_picture():
    async with web(answer(b"gone", status="404 Not Found")) as (host, _):
        error = await refused(anywhere(), f"http://{host}/")
    assert "404" in error.message
