"""Who may register: every way to be somebody else, to replay, or to make the Tracker call an address."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from shardline.errors import ShardlineError
from shardline.tracker import admission
from shardline.tracker.admission import NONCE_LIMIT, NONCE_TTL_S, NonceBook
from shardline.wire.messages import EngineInfo, KvInfo, NodeProof, Nonce, PeerProbe, ShardInfo, StepTimes
from shardline.wire.tickets import public_bytes, sign
from tests.tracker.cluster_values import SigningNode, shard

URL = "http://127.0.0.1:4000"


@pytest.fixture
def node() -> SigningNode:
    return SigningNode(URL, [shard(0, 15)])


def refusal(call: Any, *arguments: Any, **named: Any) -> ShardlineError:
    with pytest.raises(ShardlineError) as error:
        call(*arguments, **named)
    return error.value


def test_nonces_are_good_once_and_not_for_long() -> None:
    book = NonceBook()
    first, second = book.give(0.0), book.give(1.0)
    assert first != second
    assert book.take(first, 5.0)
    assert not book.take(first, 5.0)
    assert not book.take("0" * 32, 5.0)
    assert not book.take(second, 1.0 + NONCE_TTL_S)


def test_nonces_are_bounded_and_make_room_when_they_are_old() -> None:
    book = NonceBook()
    for _ in range(NONCE_LIMIT):
        book.give(0.0)
    assert refusal(book.give, 1.0).code == "queue_full"
    assert book.give(NONCE_TTL_S)


def test_a_signed_registration_opens(node: SigningNode) -> None:
    registration, key = admission.open_registration(node.register_statement("n", 5.0))
    assert registration.info.id == node.id
    assert key == public_bytes(node.key)


def test_a_registration_signed_by_another_key_is_refused(node: SigningNode) -> None:
    thief = SigningNode(URL, node.shards)
    # The victim's key and id, but the thief's signature.
    statement = sign(thief.key, "register", node.registration("n", 5.0))
    assert refusal(admission.open_registration, statement).code == "registration_refused"
    # The thief's key and signature, but the victim's id.
    registration = thief.registration("n", 5.0, info=node.info())
    error = refusal(admission.open_registration, sign(thief.key, "register", registration))
    assert error.code == "registration_refused"
    assert node.id in error.message


def test_a_statement_of_another_use_is_refused(node: SigningNode) -> None:
    statement = sign(node.key, "heartbeat", node.registration("n", 5.0))
    assert refusal(admission.open_registration, statement).code == "registration_refused"


@pytest.mark.parametrize("statement", ["", ".", "x.y", "é.é", "e30.AAAA", "A" * 1000, "bnVsbA.AA"])
def test_garbage_is_refused(statement: str) -> None:
    assert refusal(admission.open_registration, statement).code in ("registration_refused", "protocol_mismatch")


@pytest.mark.parametrize("key", ["", "zz", "00" * 31, "00" * 33, "ff" * 32])
def test_a_bad_public_key_is_refused(node: SigningNode, key: str) -> None:
    statement = sign(node.key, "register", node.registration("n", 5.0, public_key=key))
    assert refusal(admission.open_registration, statement).code == "registration_refused"


@pytest.mark.parametrize("protocol", [0, 2, 99])
def test_another_protocol_is_refused_with_both_versions(node: SigningNode, protocol: int) -> None:
    node.changes["protocol"] = protocol
    error = refusal(admission.open_registration, node.register_statement("n", 5.0))
    assert error.code == "protocol_mismatch"
    assert (error.details["node_protocol"], error.details["tracker_protocol"]) == (str(protocol), 1)


class _OldInfo(msgspec.Struct):
    id: str


class _OldRegistration(msgspec.Struct):
    info: _OldInfo


def test_no_protocol_at_all_is_refused_as_such(node: SigningNode) -> None:
    error = refusal(admission.open_registration, sign(node.key, "register", _OldRegistration(_OldInfo(node.id))))
    assert error.code == "protocol_mismatch"
    assert "none" in error.message


def test_nonce_and_clock_must_fit(node: SigningNode) -> None:
    book = NonceBook()
    nonce = book.give(0.0)
    registration = node.registration(nonce, 1000.0)
    admission.check_fresh(registration, book, 1.0, 1059.0)
    assert "nonce" in refusal(admission.check_fresh, registration, book, 1.0, 1000.0).message
    for unix in (939.0, 1061.0):
        late = node.registration(book.give(0.0), 1000.0)
        assert "clocks" in refusal(admission.check_fresh, late, book, 1.0, unix).message


@pytest.mark.parametrize(
    "url",
    [
        "",
        "127.0.0.1:4000",
        "ftp://10.0.0.1:4000",
        "http://10.0.0.1",
        "http://10.0.0.1:0",
        "http://10.0.0.1:70000",
        "http://10.0.0.1:4000/",
        "http://10.0.0.1:4000/v1",
        "http://10.0.0.1:4000?x=1",
        "http://10.0.0.1:4000#x",
        "http://user:pass@10.0.0.1:4000",
        "http://10.0.0.1:4000@evil.test:80",
        "http://10.0.0.1:4000\r\nHost: x",
        "http://10.0.0.1:04000",
        "http://[::1:4000",
        "http://exa mple:4000",
        "file:///etc/passwd",
    ],
)
def test_urls_that_are_not_scheme_host_and_port_are_refused(url: str) -> None:
    assert refusal(admission.check_url, url, loopback_ok=True).code == "registration_refused"


@pytest.mark.parametrize(
    "host",
    [
        "169.254.169.254",
        "169.254.1.1",
        "[fe80::1]",
        "[fe80::1%25eth0]",
        "[fd00:ec2::254]",
        "0.0.0.0",
        "[::]",
        "224.0.0.1",
        "[ff02::1]",
        "255.255.255.255",
        "[::ffff:169.254.169.254]",
    ],
)
def test_addresses_that_nobody_may_make_us_call_are_refused(host: str) -> None:
    assert refusal(admission.check_url, f"http://{host}:80", loopback_ok=True).code == "address_refused"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "[::1]", "localhost", "[::ffff:127.0.0.1]"])
def test_loopback_is_for_loopback(host: str) -> None:
    admission.check_url(f"http://{host}:80", loopback_ok=True)
    assert refusal(admission.check_url, f"http://{host}:80", loopback_ok=False).code == "address_refused"


@pytest.mark.parametrize("url", ["http://10.0.0.7:4000", "https://node-1.lan:4000", "http://[2001:db8::1]:80"])
def test_ordinary_urls_pass(url: str) -> None:
    admission.check_url(url, loopback_ok=False)


def test_nodes_of_a_cluster_with_keys_speak_https() -> None:
    admission.check_url("https://10.0.0.7:4000", loopback_ok=False, keys=True)
    for url in ("http://10.0.0.7:4000", "https://n-1@10.0.0.7:4000"):
        assert refusal(admission.check_url, url, loopback_ok=False, keys=True).code == "registration_refused"


def test_an_honest_node_passes(node: SigningNode) -> None:
    admission.check_info(node.info())
    # One that has not loaded yet knows little of its Shard.
    loading = shard(0, 15, state="loading", context_length=0, vocab_size=0, layout_in="", layout_out="", times=None)
    admission.check_info(node.info(shards=[loading]))


@pytest.mark.parametrize(("first", "last"), [(5, 4), (5, 5), (-1, 9), (0, 31), (30, 31)])
def test_bad_layer_ranges_are_refused(node: SigningNode, first: int, last: int) -> None:
    error = refusal(admission.check_info, node.info(shards=[shard(first, last)]))
    assert error.code == "layers_invalid"
    assert f"{first}:{last}" in error.message


def _bad_shards() -> list[list[ShardInfo]]:
    return [
        [shard(0, 15), shard(15, 30)],
        [shard(0, 1, content_id=str(i)) for i in range(17)],
        [shard(0, 15, model="")],
        [shard(0, 15, model="x" * 600)],
        [shard(0, 15, model="a\nb")],
        [shard(0, 15, content_id="")],
        [shard(0, 15, prefill_chunk=0)],
        [shard(0, 15, context_length=-5)],
        [shard(0, 15, kv_bytes_per_token=1 << 60)],
        [shard(0, 15, times=StepTimes(decode_ms=-1.0, prefill_ms_per_row=1.0))],
        [shard(0, 15, times=StepTimes(decode_ms=1.0, prefill_ms_per_row=float("nan")))],
        [shard(0, 15, times=StepTimes(decode_ms=float("inf"), prefill_ms_per_row=1.0))],
    ]


@pytest.mark.parametrize("shards", _bad_shards())
def test_shards_that_cannot_be_are_refused(node: SigningNode, shards: list[ShardInfo]) -> None:
    assert refusal(admission.check_info, node.info(shards=shards)).code == "registration_refused"


def test_figures_that_cannot_be_are_refused(node: SigningNode) -> None:
    no_class = EngineInfo(backend="b", engine_class="", build="", dtype="", quantisation="", device="", threads=1)
    changes: list[dict[str, Any]] = [
        {"kv": KvInfo(capacity_tokens=-1)},
        {"kv": KvInfo(reserved_tokens=10**400)},
        {"memory_bytes": -1},
        {"host": ""},
        {"engine": no_class},
    ]
    for change in changes:
        assert refusal(admission.check_info, node.info(**change)).code == "registration_refused"


def test_heartbeats_are_the_nodes_own(node: SigningNode) -> None:
    key = public_bytes(node.key)
    assert admission.open_heartbeat(node.heartbeat_statement(), key, node.id).count == 1
    other = SigningNode(URL, node.shards)
    for statement in (
        other.heartbeat_statement(),
        sign(node.key, "register", node.heartbeat()),
        node.heartbeat_statement(node=other.id),
        node.heartbeat_statement(info=other.info()),
        "garbage",
    ):
        assert refusal(admission.open_heartbeat, statement, key, node.id).code == "unauthorized"


def test_heartbeats_with_impossible_figures_are_refused(node: SigningNode) -> None:
    key = public_bytes(node.key)
    many = [PeerProbe(peer="n-1", rtt_ms=1.0, ok=True)] * 65
    for peers in (many, [PeerProbe(peer="n-1", rtt_ms=-1.0, ok=True)], [PeerProbe(peer="n-1", rtt_ms=1e300, ok=True)]):
        error = refusal(admission.open_heartbeat, node.heartbeat_statement(peers=peers), key, node.id)
        assert (error.code, error.param) == ("invalid_value", "peers")
    statement = node.heartbeat_statement(info=node.info(shards=[shard(3, 2)]))
    assert refusal(admission.open_heartbeat, statement, key, node.id).code == "layers_invalid"


def test_a_proof_is_for_this_key_nonce_and_url(node: SigningNode) -> None:
    key = public_bytes(node.key)
    admission.check_proof(node.prove("q"), key, "q", URL)
    other = SigningNode(URL, node.shards)
    moved = SigningNode("http://127.0.0.1:4001", node.shards, key=node.key)
    stolen = NodeProof(id=node.id, protocol=1, proof=other.prove("q").proof)
    as_heartbeat = NodeProof(id=node.id, protocol=1, proof=sign(node.key, "heartbeat", Nonce(nonce="q", url=URL)))
    for proof, nonce in (
        (node.prove("other"), "q"),
        (other.prove("q"), "q"),
        (moved.prove("q"), "q"),
        (stolen, "q"),
        (as_heartbeat, "q"),
    ):
        assert refusal(admission.check_proof, proof, key, nonce, URL).code == "registration_refused"
    skewed = NodeProof(id=node.id, protocol=7, proof=node.prove("q").proof)
    assert refusal(admission.check_proof, skewed, key, "q", URL).code == "protocol_mismatch"


def test_a_composite_shard_is_of_its_own_kind(node: SigningNode) -> None:
    """One that says the content id of Shards, or of another name, would stand in a group with those."""
    from shardline.wire.composite import content_id_of

    own: dict[str, Any] = {"n_layers": 1, "text_digest": None, "composite": True, "content_id": content_id_of("m")}
    admission.check_info(node.info(shards=[shard(0, 1, model="m", **own)]))
    for change in ({"model": "other"}, {"content_id": "mac1-0"}, {"composite": False}):
        bad = shard(0, 1, **{"model": "m", **own, **change})
        assert refusal(admission.check_info, node.info(shards=[bad])).code == "registration_refused"
