"""Media behind http and https URLs: fetched from public addresses only, bounded in bytes, time and redirects."""

import asyncio
import ipaddress
import socket

import httpx

from gateway.errors import bad_request
from omni.rpc.errors import OmniError, Reason
from omni.v1 import content_pb2

_SECONDS = 20.0
_REDIRECTS = 3


async def fetch(url: str, param: str, limit: int, modality: content_pb2.Modality.ValueType) -> content_pb2.Media:
    """The media at `url`.

    The name is resolved once and the connection goes to the address that was checked, so a name that answers
    differently the second time reaches nothing that the first answer did not.

    Raises:
        OmniError: MEDIA_INVALID, MEDIA_TOO_LARGE, BAD_REQUEST for an address that is not public.
    """
    try:
        async with asyncio.timeout(_SECONDS):
            for _ in range(_REDIRECTS + 1):
                answer = await _get(url, param, limit)
                if isinstance(answer, str):
                    url = answer
                    continue
                mime, data = answer
                return content_pb2.Media(modality=modality, mime_type=mime, data=data)
    except TimeoutError:
        raise bad_request(param, f"the URL did not answer within {_SECONDS:g} s", Reason.MEDIA_INVALID) from None
    except httpx.HTTPError as error:
        raise bad_request(param, f"the URL cannot be fetched: {type(error).__name__}", Reason.MEDIA_INVALID) from error
    raise bad_request(param, f"the URL is redirected more than {_REDIRECTS} times", Reason.MEDIA_INVALID)


async def _get(url: str, param: str, limit: int) -> str | tuple[str, bytes]:
    """Where the URL is redirected to, or type and bytes."""
    parsed = httpx.URL(url)
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise bad_request(param, "must be an http or https URL", Reason.MEDIA_INVALID)
    address = await _public_address(parsed, param)
    pinned = parsed.copy_with(host=address)
    headers = {"host": parsed.netloc.decode("ascii")}
    extensions = {"sni_hostname": parsed.host}
    async with (
        httpx.AsyncClient(timeout=_SECONDS, trust_env=False) as client,
        client.stream("GET", pinned, headers=headers, extensions=extensions) as response,
    ):
        if response.is_redirect and "location" in response.headers:
            return str(parsed.join(response.headers["location"]))
        if response.status_code != httpx.codes.OK:
            raise bad_request(param, f"the URL answered {response.status_code}", Reason.MEDIA_INVALID)
        data = bytearray()
        async for chunk in response.aiter_bytes():
            data += chunk
            if len(data) > limit:
                raise bad_request(param, f"has more than the {limit} bytes that are taken", Reason.MEDIA_TOO_LARGE)
        if not data:
            raise bad_request(param, "the URL has no content", Reason.MEDIA_INVALID)
        return response.headers.get("content-type", "").split(";")[0].strip()[:128], bytes(data)


async def _public_address(url: httpx.URL, param: str) -> str:
    """An address of the URL's host, when all of its addresses are public."""
    port = url.port or (443 if url.scheme == "https" else 80)
    try:
        found = await asyncio.get_running_loop().getaddrinfo(url.host, port, type=socket.SOCK_STREAM)
    except OSError:
        raise bad_request(param, f"host {url.host!r} is unknown", Reason.MEDIA_INVALID) from None
    addresses = [str(each[4][0]) for each in found]
    if not addresses or not all(ipaddress.ip_address(address).is_global for address in addresses):
        raise OmniError(Reason.BAD_REQUEST, f"{param}: host {url.host!r} is not a public address")
    return addresses[0]
