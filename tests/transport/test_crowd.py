from __future__ import annotations

from dataclasses import dataclass

from shardline.transport.crowd import LOOK, PATIENCE_S, Crowd


@dataclass(eq=False)
class Client:
    heard: int = 0


def test_nobody_makes_way_before_its_time() -> None:
    crowd: Crowd[Client] = Crowd()
    assert crowd.pick(0.0) is None
    client = Client()
    crowd.waits(client, 10.0)
    assert crowd.pick(10.0 + PATIENCE_S / 2) is None
    assert crowd.pick(10.0 + PATIENCE_S) is client


def test_the_oldest_of_those_that_sent_least() -> None:
    crowd: Crowd[Client] = Crowd()
    clients = [Client(heard) for heard in (9, 3, 3, 5)]
    for client in clients:
        crowd.waits(client, 0.0)
    assert crowd.pick(1.0) is clients[1]
    crowd.works(clients[1])
    assert crowd.pick(1.0) is clients[2]
    crowd.waits(clients[2], 1.0)
    assert crowd.pick(1.0) is clients[3], "it begins anew"


def test_served_and_gone_ones_are_not_in_it() -> None:
    crowd: Crowd[Client] = Crowd()
    client = Client()
    crowd.waits(client, 0.0)
    crowd.works(client)
    crowd.works(client)
    assert len(crowd) == 0 and crowd.pick(9.0) is None


def test_a_choice_among_many_looks_at_few() -> None:
    crowd: Crowd[Client] = Crowd()
    many = [Client(1000 - number) for number in range(1000)]
    for client in many:
        crowd.waits(client, 0.0)
    assert crowd.pick(1.0) is many[LOOK - 1]
