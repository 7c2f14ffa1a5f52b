"""Media at addresses that a client names, fetched so that it cannot reach what only this server can reach.

A request leaves only for http and https, without credentials, proxy or cookies. The rule for addresses is asked twice:
of everything that a name resolves to, and once more when the socket for a connection is made, of the address that it
is made for. Nothing is resolved in between, so a name that changes its mind gains nothing, and neither do addresses
written in strange ways, nor redirects, each of which is a new request here. Whatever fails is told in one sentence for
all reasons, which would otherwise tell what names and hosts there are inside.
"""

import asyncio
import ipaddress
import socket
from collections.abc import Callable, Collection
from typing import Any

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from omni_common.errors import OmniError, invalid
from omni_gateway.media.inline import Kind, too_large

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_MOST_REDIRECTS = 3
_URL_CHARS = 8192
#: Each holds what it has of its medium.
_MOST_AT_ONCE = 32
_PIECE = 1 << 16
#: Accept-Encoding: a few bytes could become gigabytes.
_HEADERS = {"Accept": "*/*", "Accept-Encoding": "identity", "User-Agent": "Omnibus"}
_UNICAST_6 = ipaddress.IPv6Network("2000::/3")
#: Reached from the inside of networks, or ways around the rule, though Python's registry has some as global: protocol
#: assignments (a cloud's metadata among them), 6to4's relays, a cloud's own services, Teredo and the like, 6to4,
#: documentation.
_NOT_PUBLIC = [
    ipaddress.ip_network(network)
    for network in ("192.0.0.0/24", "192.88.99.0/24", "168.63.129.16/32", "2001::/23", "2002::/16", "3fff::/20")
]


def is_public(address: Address) -> bool:
    """True for a unicast address of the open Internet.

    IPv6 addresses that carry an IPv4 address (mapped, compatible, NAT64, 6to4, Teredo) are not: they lead elsewhere.
    """
    if isinstance(address, ipaddress.IPv6Address) and address not in _UNICAST_6:
        return False
    if address.is_multicast or address.is_reserved or not address.is_global:
        return False
    return not any(address in network for network in _NOT_PUBLIC)


class Refused(OSError):
    """The rule does not allow this address."""


class Fetcher:
    """Fetches one medium a call. `allowed` is the rule for addresses, asked at every connection.

    `hosts`, where given, are the only names (lower case) that may be asked; addresses are still held to the rule.
    """

    def __init__(self, hosts: Collection[str] | None = None, *, allowed: Callable[[Address], bool] = is_public) -> None:
        self._hosts = hosts
        self._allowed = allowed
        self._running = 0

    async def fetch(self, url: str, kind: Kind, *, max_bytes: int, within_s: float, param: str) -> bytes:
        """The body at `url`, after at most three redirects, whole within `within_s`. Its content type is not looked at.

        Raises OmniError with `param`: 400 `invalid_url` for what is no http(s) URL or names a host that is not listed,
        413 as `too_large`, 429 `queue_full`, 400 `fetch_timeout`, 400 `fetch_failed` for everything else.
        """
        if self._running >= _MOST_AT_ONCE:
            text = "Too many media are being fetched."
            raise OmniError(text, status=429, code="queue_full", retry_after_s=1.0)
        target = self._parse(url, param)
        self._running += 1
        try:
            async with asyncio.timeout(within_s):
                return await self._follow(target, kind, max_bytes, param)
        except TimeoutError:
            raise invalid(f"{param}: the {kind} did not come in time", param, code="fetch_timeout") from None
        except (aiohttp.ClientError, OSError, ValueError):
            text = f"{param}: no {kind} could be fetched; it must be at a public address that answers"
            raise invalid(text, param, code="fetch_failed") from None
        finally:
            self._running -= 1

    async def _follow(self, target: URL, kind: Kind, max_bytes: int, param: str) -> bytes:
        connector = aiohttp.TCPConnector(
            resolver=_Resolver(self._check), socket_factory=self._socket, use_dns_cache=False, force_close=True
        )
        async with aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            headers=_HEADERS,
            auto_decompress=False,
            # One deadline holds for all of it, and it is the caller's.
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
        ) as session:
            for _ in range(_MOST_REDIRECTS + 1):
                async with session.get(target, allow_redirects=False) as response:
                    location = response.headers.get("Location")
                    if response.status not in _REDIRECTS or location is None:
                        return await _read(response, kind, max_bytes, param)
                target = self._parse(target.join(URL(location)), param)
        text = f"{param}: the {kind} is behind more than {_MOST_REDIRECTS} redirects"
        raise invalid(text, param, code="fetch_failed")

    def _parse(self, url: str | URL, param: str) -> URL:
        try:
            if isinstance(url, str) and len(url) > _URL_CHARS:
                raise ValueError
            target = URL(url)
            host, _ = target.host, target.port
        except ValueError:
            raise invalid(f"{param} is not a valid URL", param, code="invalid_url") from None
        if target.scheme not in ("http", "https") or not host:
            raise invalid(f"{param} must be an http, https or data URL", param, code="invalid_url")
        if target.user is not None or target.password is not None:
            raise invalid(f"{param}: the URL must not hold credentials", param, code="invalid_url")
        if self._hosts is not None and host.lower() not in self._hosts:
            raise invalid(f"{param}: this server fetches nothing from that host", param, code="invalid_url")
        return target

    def _check(self, host: str) -> None:
        """Raises Refused unless the rule allows `host`, an address; ValueError when it is none."""
        if not self._allowed(ipaddress.ip_address(host.partition("%")[0])):
            raise Refused

    def _socket(self, found: tuple[Any, Any, int, str, tuple[Any, ...]]) -> socket.socket:
        family, kind, proto, _, address = found
        self._check(address[0])
        return socket.socket(family=family, type=kind, proto=proto)


class _Resolver(AbstractResolver):
    """The system's resolver; raises when any address of a name is refused, so that no other of them is tried."""

    def __init__(self, check: Callable[[str], None]) -> None:
        self._inner = aiohttp.ThreadedResolver()
        self._check = check

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        found = await self._inner.resolve(host, port, family)
        for each in found:
            self._check(each["host"])
        return found

    async def close(self) -> None:
        await self._inner.close()


async def _read(response: aiohttp.ClientResponse, kind: Kind, max_bytes: int, param: str) -> bytes:
    if response.status != 200:
        text = f"{param}: the server of the {kind} answered {response.status}"
        raise invalid(text, param, code="fetch_failed")
    if response.headers.get("Content-Encoding", "identity").lower() != "identity":
        text = f"{param}: the server of the {kind} sent it compressed, which it was asked not to do"
        raise invalid(text, param, code="fetch_failed")
    if (stated := response.content_length or 0) > max_bytes:
        raise too_large(kind, stated, max_bytes, param)
    data = bytearray()
    async for piece in response.content.iter_chunked(_PIECE):
        data += piece
        if len(data) > max_bytes:
            raise too_large(kind, len(data), max_bytes, param)
    if not data:
        raise invalid(f"{param}: the {kind} is empty", param, code=f"invalid_{kind}")
    return bytes(data)
