"""Hosts, ports and URLs: the one place that writes and reads them, and that says whom we may call.

Owns brackets and zone ids of IPv6, what counts as loopback, and the refusal of addresses that nobody may make us
call (link-local, cloud metadata, multicast, unspecified). It opens no connection. Shown by
tests/transport/test_addresses.py.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
from typing import NamedTuple

import psutil

from shardline.errors import ShardlineError

_URL = re.compile(
    r"(https?)://(?:([0-9A-Za-z_-]{1,64})@)?(?:\[([0-9A-Fa-f:.]+(?:%(?:25)?[0-9A-Za-z_.~-]+)?)\]|([0-9A-Za-z_.-]+))(?::([0-9]{1,5}))?"
    r"(/[!$%&'()*+,./0-9:;=@A-Z_a-z~-]*)?(\?[!$%&'()*+,./0-9:;=?@A-Z\[\]_a-z|~-]*)?"
)
_METADATA = frozenset(
    ipaddress.ip_address(text)
    for text in ("169.254.169.254", "100.100.100.200", "192.0.0.192", "168.63.129.16", "fd00:ec2::254")
)
_NAT64 = ipaddress.ip_network("64:ff9b::/96")

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class Url(NamedTuple):
    """A URL in parts. `host` has no brackets, a zone id follows a bare `%`; `target` is path and query."""

    scheme: str
    host: str
    port: int
    target: str
    party: str | None = None
    """Whose certificate must answer there: stands before an `@` in https URLs inside a cluster, and is never sent."""


def make_url(scheme: str, host: str, port: int, path: str = "", *, party: str | None = None) -> str:
    """The URL of `path` at `host`: brackets around IPv6, `%25` before a zone id (RFC 6874)."""
    return f"{scheme}://{party + '@' if party else ''}{host_port(host, port)}{path}"


def host_port(host: str, port: int) -> str:
    """`host:port` as it stands in a URL."""
    if ":" not in host:
        return f"{host}:{port}"
    address, percent, zone = host.strip("[]").partition("%")
    return f"[{address}{'%25' if percent else ''}{zone.removeprefix('25') if percent else ''}]:{port}"


def split_url(url: str) -> Url:
    """The parts of an http or https URL; raises `invalid_value` for anything else (credentials, fragments, spaces)."""
    match = _URL.fullmatch(url)
    if match is None:
        raise ShardlineError("invalid_value", f"not an http URL: {url[:200]!r}")
    scheme, party, v6, name, port, path, query = match.groups()
    if party is not None and scheme != "https":
        raise ShardlineError("invalid_value", "only an https URL can name who must answer")
    number = int(port) if port else (443 if scheme == "https" else 80)
    if not 0 < number < 65536:
        raise ShardlineError("invalid_value", f"not a port: {number}")
    host = name if v6 is None else v6.replace("%25", "%")
    return Url(scheme, host, number, (path or "/") + (query or ""), party)


def advertised_url(given: str | None, scheme: str, host: str, port: int) -> str:
    """The URL that others are told: `given` as a URL, or as `host[:port]`; else that of the bound `host` and `port`.

    Raises `setting_invalid` for a URL of another scheme than this process speaks.
    """
    if given is None:
        return make_url(scheme, host, port)
    text = given.rstrip("/")
    if "://" not in text:
        bare = parse_address(text)
        text = make_url(scheme, text.strip("[]"), port) if bare is not None else f"{scheme}://{text}"
        if bare is None and not text.rpartition(":")[2].isdigit():
            text = f"{text}:{port}"
    try:
        parts = split_url(text)
    except ShardlineError as error:
        raise ShardlineError("setting_invalid", f"--advertise: {error.message}", param="advertise") from None
    if parts.scheme != scheme or parts.target != "/" or parts.party is not None:
        why = f"--advertise {given}: this process is reached by {scheme}, at a host and a port"
        raise ShardlineError("setting_invalid", why, param="advertise")
    return make_url(scheme, parts.host, parts.port)


def address_towards(host: str, port: int) -> str:
    """The address of this machine that a connection to `host` would come from. Nothing is sent.

    Raises `setting_invalid` where there is no way to it.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
        family, kind, protocol, _, address = found[0]
        with socket.socket(family, kind, protocol) as sock:
            sock.connect(address)
            return str(sock.getsockname()[0])
    except (OSError, UnicodeError) as error:
        raise ShardlineError("setting_invalid", f"there is no way from this machine to {host}: {error}") from None


def reachable_address(bound: str) -> str:
    """An address by which other machines reach what listens on `bound`: itself, or of an unspecified one the address
    that this machine goes out by, else the first of its others; loopback where it has none."""
    address = parse_address(bound)
    if address is None or not address.is_unspecified:
        return bound
    # Documentation addresses (RFC 5737, RFC 3849): connecting a datagram socket only looks at the routes.
    towards = ("192.0.2.1", "2001:db8::1") if address.version == 4 or bound == "::" else ("2001:db8::1",)
    for host in towards:
        try:
            return address_towards(host, 9)
        except ShardlineError:
            continue
    own = [item.address.partition("%")[0] for items in psutil.net_if_addrs().values() for item in items]
    usable = [host for host in own if _is_for_others(host)]
    usable.sort(key=lambda host: ":" in host)
    return usable[0] if usable else "127.0.0.1"


def _is_for_others(host: str) -> bool:
    address = parse_address(host)
    return address is not None and not (address.is_loopback or address.is_link_local or address.is_multicast)


def parse_address(host: str) -> Address | None:
    """The IP address that `host` is written as, an embedded IPv4 one unwrapped; None for a name."""
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return None
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return address.ipv4_mapped
        if address.sixtofour is not None:
            return address.sixtofour
        if address in _NAT64:
            return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address


def network_of(host: str) -> str:
    """Whom to count as one caller: an IPv4 address, or the /64 that one customer has of IPv6."""
    address = parse_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        return str(ipaddress.ip_network((address, 64), strict=False))
    return host if address is None else str(address)


def is_loopback(host: str) -> bool:
    """Whether `host` names this machine and nothing that another machine can reach."""
    address = parse_address(host)
    if address is not None:
        return address.is_loopback
    return host == "localhost" or host.endswith(".localhost")


def check_callable_address(host_or_ip: str, *, loopback_ok: bool) -> None:
    """Raise `address_refused` for an address that nobody may make us call; names pass (see `resolve_checked`)."""
    if is_loopback(host_or_ip):
        if not loopback_ok:
            raise _refused(host_or_ip, "a loopback address means another machine to everybody else")
        return
    address = parse_address(host_or_ip)
    if address is None:
        return
    if address.is_unspecified:
        raise _refused(host_or_ip, "it is the unspecified address: advertise one that others can call")
    if address.is_multicast:
        raise _refused(host_or_ip, "it is a multicast address")
    if address in _METADATA or str(address).partition("%")[0] in map(str, _METADATA):
        raise _refused(host_or_ip, "it is a cloud metadata address")
    if address.is_link_local:
        raise _refused(host_or_ip, "it is a link-local address: it means another machine on each network")
    if address.is_reserved or (isinstance(address, ipaddress.IPv4Address) and int(address) >> 24 == 0):
        raise _refused(host_or_ip, "it is a reserved address")


async def resolve_checked(host: str, port: int, loopback_ok: bool, *, timeout_s: float = 2.0) -> tuple[str, int]:
    """The address to dial for `host`, every address it resolves to being one that we may call.

    Dial what is returned (`HttpClient.request(address=…)`), never the name again: it may answer differently.
    """
    check_callable_address(host, loopback_ok=loopback_ok)
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(timeout_s):
            found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except TimeoutError:
        raise _refused(host, f"its name was not resolved within {timeout_s:g} s") from None
    except (OSError, UnicodeError) as error:
        raise _refused(host, f"its name does not resolve ({error})") from None
    addresses = [str(item[4][0]) for item in found]
    for address in addresses:
        check_callable_address(address, loopback_ok=loopback_ok)
    return addresses[0], port


def _refused(host: str, why: str) -> ShardlineError:
    return ShardlineError("address_refused", f"{host[:200]} is not called: {why}")
