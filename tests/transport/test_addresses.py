from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardline.errors import ShardlineError
from shardline.transport.addresses import (
    address_towards,
    advertised_url,
    check_callable_address,
    host_port,
    is_loopback,
    make_url,
    network_of,
    reachable_address,
    resolve_checked,
    split_url,
)


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:80/x"),
        ("::1", "http://[::1]:80/x"),
        ("[::1]", "http://[::1]:80/x"),
        ("2001:db8::1", "http://[2001:db8::1]:80/x"),
        ("fe80::1%eth0", "http://[fe80::1%25eth0]:80/x"),
        ("node-1.lan", "http://node-1.lan:80/x"),
    ],
)
def test_one_function_makes_urls(host: str, url: str) -> None:
    assert make_url("http", host, 80, "/x") == url
    assert split_url(url)[1:] == (host.strip("[]"), 80, "/x", None)


@given(st.one_of(st.ip_addresses(v=4), st.ip_addresses(v=6)), st.integers(1, 65535))
def test_every_address_survives_the_way_into_a_url_and_back(
    address: ipaddress.IPv4Address | ipaddress.IPv6Address, port: int
) -> None:
    parts = split_url(make_url("https", str(address), port, "/a?b=c"))
    assert (parts.scheme, ipaddress.ip_address(parts.host), parts.port, parts.target) == (
        "https",
        address,
        port,
        "/a?b=c",
    )


@given(st.text(alphabet=st.sampled_from("http:/[]@#%?&=.\\ \r\n\x00aZ09é"), max_size=40))
def test_no_text_breaks_the_url_reader(text: str) -> None:
    try:
        parts = split_url("http://" + text)
    except ShardlineError as error:
        assert error.code == "invalid_value"
    else:
        assert not set(parts.host + parts.target) & set("\r\n \x00#\\é") and "@" not in parts.host
        assert parts.target.startswith("/")


@pytest.mark.parametrize(
    "url",
    [
        "",
        "ftp://a/",
        "http://",
        "http://user:secret@host/",
        "http://host:0/",
        "http://host:65536/",
        "http://host:99999999/",
        "http://2001:db8::1:8000/",
        "http://host/a b",
        "http://host/a\r\nx: y",
        "http://host/#fragment",
        "http://[::1/",
        "//host/",
    ],
)
def test_refused_urls(url: str) -> None:
    with pytest.raises(ShardlineError) as caught:
        split_url(url)
    assert caught.value.code == "invalid_value"


def test_ports_and_paths_by_default() -> None:
    assert split_url("http://host") == ("http", "host", 80, "/", None)
    assert split_url("https://host?q=1") == ("https", "host", 443, "/?q=1", None)
    assert host_port("::1", 5) == "[::1]:5"


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.8.8.8", "::1", "[::1]", "::ffff:127.0.0.1", "localhost", "a.localhost"]
)
def test_loopback(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "::", "10.0.0.1", "example.org", "localhost.evil.test", "127.0.0.1.evil.test"]
)
def test_not_loopback(host: str) -> None:
    assert not is_loopback(host)


REFUSED = [
    "169.254.169.254",
    "169.254.1.1",
    "fe80::1",
    "fe80::1%eth0",
    "::ffff:169.254.169.254",
    "64:ff9b::a9fe:a9fe",
    "100.100.100.200",
    "fd00:ec2::254",
    "0.0.0.0",
    "::",
    "0.1.2.3",
    "224.0.0.1",
    "ff02::1",
    "255.255.255.255",
    "240.0.0.1",
    "2002:a9fe:a9fe::1",
    "::7f00:1",
    "::a9fe:a9fe",
]


@pytest.mark.parametrize("host", REFUSED)
@pytest.mark.parametrize("loopback_ok", [True, False])
def test_addresses_that_nobody_may_make_us_call(host: str, loopback_ok: bool) -> None:
    with pytest.raises(ShardlineError) as caught:
        check_callable_address(host, loopback_ok=loopback_ok)
    assert caught.value.code == "address_refused"
    assert host in caught.value.message


@pytest.mark.parametrize(
    "host", ["10.1.2.3", "192.168.0.7", "100.64.0.1", "8.8.8.8", "fd12::1", "2001:db8::1", "name.lan"]
)
def test_addresses_that_may_be_called(host: str) -> None:
    check_callable_address(host, loopback_ok=False)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "::ffff:127.0.0.1", "2002:7f00:1::"])
def test_loopback_is_called_from_loopback_only(host: str) -> None:
    check_callable_address(host, loopback_ok=True)
    with pytest.raises(ShardlineError):
        check_callable_address(host, loopback_ok=False)


async def test_resolving_gives_the_address_to_dial() -> None:
    assert await resolve_checked("127.0.0.1", 81, True) == ("127.0.0.1", 81)
    ip, port = await resolve_checked("localhost", 82, True)
    assert is_loopback(ip) and port == 82


@pytest.mark.parametrize("host", ["2130706433", "127.1", "0x7f000001", "0177.0.0.1"])
async def test_other_spellings_of_loopback_are_seen_through(host: str) -> None:
    assert await resolve_checked(host, 80, True) == ("127.0.0.1", 80)
    with pytest.raises(ShardlineError) as caught:
        await resolve_checked(host, 80, False)
    assert caught.value.code == "address_refused"


async def test_metadata_address_written_as_a_number_is_refused() -> None:
    with pytest.raises(ShardlineError) as caught:
        await resolve_checked(str(int(ipaddress.ip_address("169.254.169.254"))), 80, True)
    assert caught.value.code == "address_refused"


async def test_a_name_that_cannot_exist() -> None:
    with pytest.raises(ShardlineError) as caught:
        await resolve_checked("a..b", 80, True)
    assert caught.value.code == "address_refused"


def test_a_url_may_say_who_must_answer() -> None:
    url = make_url("https", "fe80::1%eth0", 7, "/x", party="n-0123456789abcdef")
    assert url == "https://n-0123456789abcdef@[fe80::1%25eth0]:7/x"
    assert split_url(url) == ("https", "fe80::1%eth0", 7, "/x", "n-0123456789abcdef")
    for refused in ("http://tracker@host/", "https://@host/", "https://a@b@host/", "https://a:b@host/"):
        with pytest.raises(ShardlineError):
            split_url(refused)


@pytest.mark.parametrize(
    ("given", "url"),
    [
        (None, "https://10.0.0.2:7000"),
        ("10.0.0.3", "https://10.0.0.3:7000"),
        ("10.0.0.3:80", "https://10.0.0.3:80"),
        ("node.lan", "https://node.lan:7000"),
        ("node.lan:80", "https://node.lan:80"),
        ("fd00::1", "https://[fd00::1]:7000"),
        ("[fd00::1]:80", "https://[fd00::1]:80"),
        ("[fd00::1]", "https://[fd00::1]:7000"),
        ("https://node.lan:80/", "https://node.lan:80"),
        ("https://node.lan", "https://node.lan:443"),
    ],
)
def test_what_others_are_told(given: str | None, url: str) -> None:
    assert advertised_url(given, "https", "10.0.0.2", 7000) == url


@pytest.mark.parametrize(
    "given", ["", "http://node.lan", "https://n-1@node.lan", "https://node.lan/path", "a b", "a:b"]
)
def test_what_others_cannot_be_told(given: str) -> None:
    with pytest.raises(ShardlineError) as caught:
        advertised_url(given, "https", "10.0.0.2", 7000)
    assert (caught.value.code, caught.value.param) == ("setting_invalid", "advertise")


def test_own_addresses() -> None:
    assert address_towards("127.0.0.1", 9).startswith("127.")
    assert address_towards("localhost", 9) in ("127.0.0.1", "::1")
    assert reachable_address("127.0.0.1") == "127.0.0.1"
    assert reachable_address("node.lan") == "node.lan"
    found = ipaddress.ip_address(reachable_address("0.0.0.0"))
    assert not found.is_unspecified and not found.is_link_local
    with pytest.raises(ShardlineError) as caught:
        address_towards("no.such.host.invalid", 9)
    assert caught.value.code == "setting_invalid"


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        ("10.0.0.1", "10.0.0.1", True),
        ("10.0.0.1", "10.0.0.2", False),
        ("::ffff:10.0.0.1", "10.0.0.1", True),
        ("2001:db8:1:2::1", "2001:db8:1:2:ffff::9", True),
        ("2001:db8:1:2::1", "2001:db8:1:3::1", False),
        ("fe80::1%eth0", "fe80::2%eth0", True),
    ],
)
def test_who_counts_as_one(a: str, b: str, same: bool) -> None:
    assert (network_of(a) == network_of(b)) is same
