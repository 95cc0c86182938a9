"""Fetches media from http and https URLs that a request names, never from a private address.

A name is resolved here, all its addresses are checked, and the connection goes to one of the addresses that were
checked: a name that resolves otherwise a moment later changes nothing. Redirects are followed one by one under the
same rules. Proxies of the environment are not used: they would resolve the name again.
"""

import asyncio
import ipaddress
import socket
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import httpx

from gateway.errors import bad_request
from gateway.media.encoding import too_large
from omni.rpc.errors import OmniError, Reason
from omni.rpc.text import shown

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_MAX_REDIRECTS = 3
_MAX_URL = 2048
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_REDIRECTS = frozenset((301, 302, 303, 307, 308))


@dataclass(frozen=True, slots=True)
class Fetched:
    """A file, and the type that its server gave it ("" for none)."""

    data: bytes
    mime_type: str


def is_public(address: Address) -> bool:
    """Whether an address is one of the open internet: not private, local, shared, reserved, multicast, nor an IPv6
    form that carries an IPv4 address to a translator."""
    if isinstance(address, ipaddress.IPv6Address) and (
        address.ipv4_mapped or address.sixtofour or address.teredo or address in _NAT64
    ):
        return False
    return address.is_global and not address.is_multicast


class Fetcher:
    """Fetches files; one for the whole gateway.

    Args:
        within: seconds for one file, redirects and all.
        allowed: which addresses may be connected to.
    """

    def __init__(self, within: float = 10.0, allowed: Callable[[Address], bool] = is_public) -> None:
        self._within = within
        self._allowed = allowed
        # No connection is kept: the pool knows it by its address, and its certificate was checked for one name.
        self._client = httpx.AsyncClient(
            trust_env=False,
            follow_redirects=False,
            timeout=httpx.Timeout(within),
            limits=httpx.Limits(max_connections=64, max_keepalive_connections=0),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        await self._client.aclose()

    async def fetch(self, url: str, param: str, limit: int) -> Fetched:
        """The file at `url`.

        Args:
            url: http or https.
            param: name of the field for messages.
            limit: most bytes that are read.

        Raises:
            OmniError: MEDIA_INVALID, also for addresses that are not public; MEDIA_TOO_LARGE.
        """
        try:
            async with asyncio.timeout(self._within):
                target = _parse(url, param)
                for _ in range(_MAX_REDIRECTS + 1):
                    answer = await self._get(target, param, limit)
                    if isinstance(answer, Fetched):
                        return answer
                    target = _parse(str(target.join(answer)), param)
        except TimeoutError:
            raise _failed(param, f"the file did not come within {self._within:g} s") from None
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            raise _failed(param, f"the file cannot be fetched: {type(error).__name__}") from error
        raise _failed(param, f"more than {_MAX_REDIRECTS} redirects")

    async def _get(self, url: httpx.URL, param: str, limit: int) -> Fetched | str:
        """The file, or where it is said to be."""
        address = await self._resolve(url, param)
        request = self._client.build_request(
            "GET",
            url.copy_with(host=str(address)),
            headers={"host": url.netloc.decode("ascii"), "accept": "image/*, audio/*", "accept-encoding": "identity"},
            extensions={"sni_hostname": url.raw_host.decode("ascii")},
        )
        response = await self._client.send(request, stream=True)
        try:
            if response.status_code in _REDIRECTS and (location := response.headers.get("location")):
                return str(location)
            if response.status_code != 200:
                raise _failed(param, f"its server answered {response.status_code}")
            announced = response.headers.get("content-length", "")
            if announced.isdecimal() and int(announced) > limit:
                raise too_large(param, int(announced), limit)
            data = bytearray()
            async for piece in response.aiter_raw(64 * 1024):
                data += piece
                if len(data) > limit:
                    raise too_large(param, len(data), limit)
            return Fetched(bytes(data), response.headers.get("content-type", "").split(";")[0].strip().lower()[:128])
        finally:
            await response.aclose()

    async def _resolve(self, url: httpx.URL, param: str) -> Address:
        """One of the host's addresses, after all of them were found to be allowed."""
        port = url.port or (443 if url.scheme == "https" else 80)
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(url.raw_host.decode("ascii"), port, type=socket.SOCK_STREAM)
        except (socket.gaierror, UnicodeError):
            raise _failed(param, f"host {shown(url.host)} is not known") from None
        addresses = [ipaddress.ip_address(str(entry[4][0]).split("%")[0]) for entry in found]
        if not addresses or not all(self._allowed(address) for address in addresses):
            raise _failed(param, f"host {shown(url.host)} is not on the public internet")
        return addresses[0]


def _parse(url: str, param: str) -> httpx.URL:
    if len(url) > _MAX_URL:
        raise _failed(param, f"a URL has at most {_MAX_URL} characters, this one {len(url)}")
    parsed = httpx.URL(url)
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise _failed(param, "must be a data URL, or an http or https URL with a host")
    if parsed.userinfo:
        raise _failed(param, "must not hold a user name or password")
    return parsed


def _failed(param: str, description: str) -> OmniError:
    return bad_request(param, description, Reason.MEDIA_INVALID)
