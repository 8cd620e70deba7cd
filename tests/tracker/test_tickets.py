"""Tickets as a Node will read them, and whose word about a failure counts."""

from __future__ import annotations

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from shardline.errors import ShardlineError
from shardline.tracker import tickets as tickets_module
from shardline.tracker.coverage import choose
from shardline.tracker.selection import Candidate, Link, Query
from shardline.tracker.tickets import ROUTE_GRACE_S, RouteBook, TicketOffice, blames
from shardline.wire.messages import Outcome, RouteAnswer, RouteRequest, Ticket
from shardline.wire.tickets import verify
from tests.tracker.cluster_values import NO_LINKS, candidate, links_of

THREE = [
    candidate("a", 0, 10, prefill_chunk=64, context_length=4096),
    candidate("b", 10, 20, prefill_chunk=32),
    candidate("c", 20, 30, prefill_chunk=128, context_length=1000),
]
REQUEST = RouteRequest(model="tiny", kv_tokens=77, gateway="g-1")


def issue(office: TicketOffice, group: list[Candidate]) -> RouteAnswer:
    links = links_of({("a", "b"): Link(rtt_ms=3.0), ("a", "c"): Link(rtt_ms=5.0)})
    return office.issue(choose(group, links, Query(), "tiny"), REQUEST, links, 1000.0)


def test_each_hop_has_one_ticket_with_its_neighbours_urls() -> None:
    office = TicketOffice(Ed25519PrivateKey.generate(), 30.0)
    answer = issue(office, THREE)
    tickets = [verify(office.public_key, "ticket", text, Ticket) for text in answer.tickets]
    assert [t.node for t in tickets] == ["a", "b", "c"]
    assert [(t.hop, t.hops, t.first, t.last) for t in tickets] == [(0, 3, 0, 10), (1, 3, 10, 20), (2, 3, 20, 30)]
    assert tickets[0].previous is None
    assert [t.previous.url for t in tickets[1:] if t.previous] == [THREE[0].url, THREE[1].url]
    # The ring closes: the tail pushes to the head.
    assert [t.next.url for t in tickets] == [THREE[1].url, THREE[2].url, THREE[0].url]
    assert len({t.id for t in tickets}) == 3
    for t in tickets:
        assert (t.kv_tokens, t.gateway, t.not_after, t.prefill_chunk) == (77, "g-1", 1030.0, 32)
        assert t.route == answer.route.id
    assert tickets[0].layout_out == tickets[1].layout_in != tickets[0].layout_in


def test_the_route_record_joins_its_hops() -> None:
    route = issue(TicketOffice(Ed25519PrivateKey.generate(), 30.0), THREE).route
    assert (route.prefill_chunk, route.context_length, route.vocab_size) == (32, 1000, 100)
    assert route.text_digest == THREE[0].shard.text_digest
    # From a measured, from b not measured at all, from the tail back as the head measured it.
    assert [hop.rtt_ms for hop in route.hops] == [3.0, None, 5.0]
    assert route.estimate_ms_per_token == pytest.approx(30.0 + 1.5 + 5.0 + 2.5)


def test_a_route_of_one_hop_returns_to_itself() -> None:
    office = TicketOffice(Ed25519PrivateKey.generate(), 30.0)
    answer = issue(office, [candidate("w", 0, 30)])
    ticket = verify(office.public_key, "ticket", answer.tickets[0], Ticket)
    assert (ticket.previous, ticket.next.node, ticket.hops) == (None, "w", 1)
    assert answer.route.hops[0].rtt_ms is None


def test_every_start_is_another_epoch() -> None:
    key = Ed25519PrivateKey.generate()
    assert TicketOffice(key, 30.0).epoch != TicketOffice(key, 30.0).epoch


def test_a_route_is_ended_once_by_a_report_about_itself() -> None:
    book = RouteBook(session_s=100.0)
    route = issue(TicketOffice(Ed25519PrivateKey.generate(), 30.0), THREE).route
    book.add(route, 0.0)
    for wrong in (Outcome(status="failed", node="z"), Outcome(status="failed", link=("a", "c"))):
        with pytest.raises(ShardlineError) as error:
            book.close(route.id, wrong, 1.0)
        assert error.value.code == "invalid_value"
    # The return edge is a link of the route.
    given = book.close(route.id, Outcome(status="failed", link=("c", "a")), 1.0)
    assert given.nodes == ("a", "b", "c")
    for route_id in (route.id, "r-unknown"):
        with pytest.raises(ShardlineError) as gone:
            book.close(route_id, Outcome(status="completed"), 1.0)
        assert gone.value.code == "session_not_found"


def test_routes_are_forgotten_by_age_and_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tickets_module, "ROUTE_LIMIT", 2)
    office = TicketOffice(Ed25519PrivateKey.generate(), 30.0)
    routes = [issue(office, THREE).route for _ in range(3)]
    book = RouteBook(session_s=100.0)
    for route in routes:
        book.add(route, 0.0)
    with pytest.raises(ShardlineError):
        book.close(routes[0].id, Outcome(status="completed"), 0.0)
    book.close(routes[1].id, Outcome(status="completed"), 0.0)
    with pytest.raises(ShardlineError):
        book.close(routes[2].id, Outcome(status="completed"), 100.0 + ROUTE_GRACE_S)


@pytest.mark.parametrize(
    ("status", "code", "guilty"),
    [
        ("failed", "node_lost", True),
        ("failed", "engine_out_of_memory", True),
        ("failed", None, True),
        ("failed", "a_code_of_later", True),
        ("failed", "kv_exhausted", False),
        ("failed", "gateway_lost", False),
        ("failed", "invalid_value", False),
        ("cancelled", "node_lost", False),
        ("completed", None, False),
    ],
)
def test_blame(status: str, code: str | None, guilty: bool) -> None:
    assert blames(Outcome(status=status, code=code, node="a")) is guilty  # type: ignore[arg-type]


def test_no_links_are_no_measurements() -> None:
    office = TicketOffice(Ed25519PrivateKey.generate(), 30.0)
    choice = choose(THREE, NO_LINKS, Query(), "tiny")
    assert {hop.rtt_ms for hop in office.issue(choice, REQUEST, NO_LINKS, 0.0).route.hops} == {None}
