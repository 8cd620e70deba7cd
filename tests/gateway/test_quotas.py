"""Limits of a key: exact in any minute, and what is refused counts for nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardline.errors import ShardlineError
from shardline.gateway.keys import ApiKey
from shardline.gateway.quotas import WINDOW_S, Quotas

KEY = ApiKey(name="a", digest="", requests_per_minute=2)
NARROW = ApiKey(name="b", digest="", concurrent=1)


def test_requests_a_minute() -> None:
    quotas = Quotas()
    for now in (0.0, 10.0):
        quotas.enter(KEY, now)
        quotas.leave(KEY, now)
    with pytest.raises(ShardlineError) as caught:
        quotas.enter(KEY, 11.5)
    assert (caught.value.code, caught.value.fault.status) == ("rate_limit_exceeded", 429)
    assert caught.value.details["retry_after"] == 49
    with pytest.raises(ShardlineError):
        quotas.enter(KEY, 59.9)
    quotas.enter(KEY, 60.0)


def test_requests_at_a_time() -> None:
    quotas = Quotas()
    quotas.enter(NARROW, 0.0)
    with pytest.raises(ShardlineError) as caught:
        quotas.enter(NARROW, 0.0)
    assert caught.value.code == "concurrency_limit_exceeded" and caught.value.details["retry_after"] == 1
    quotas.enter(KEY, 0.0)
    quotas.leave(NARROW, 1.0)
    quotas.enter(NARROW, 1.0)


def test_accounts_that_say_nothing_are_dropped() -> None:
    quotas = Quotas()
    quotas.enter(NARROW, 0.0)
    quotas.enter(KEY, 0.0)
    quotas.leave(NARROW, 0.0)
    quotas.leave(KEY, 0.0)
    assert len(quotas) == 1
    quotas.forget_idle(59.0)
    assert len(quotas) == 1
    quotas.forget_idle(60.0)
    assert len(quotas) == 0


@given(
    st.lists(st.integers(0, 300), max_size=60).map(sorted),
    st.integers(1, 5),
)
def test_in_no_minute_are_more_let_in_and_retry_after_is_right(times: list[int], limit: int) -> None:
    quotas, key = Quotas(), ApiKey(name="a", digest="", requests_per_minute=limit)
    entered: list[float] = []
    for now in times:
        try:
            quotas.enter(key, now)
        except ShardlineError as error:
            assert sum(began > now - WINDOW_S for began in entered) == limit
            at = now + error.details["retry_after"]
            assert sum(began > at - WINDOW_S for began in entered) < limit
        else:
            quotas.leave(key, now)
            entered.append(now)
            assert sum(began > now - WINDOW_S for began in entered) <= limit
