"""Which Gateways still live, as far as this Node has heard: of those with sessions here, who beats and who fell silent.

Owns the times alone. Called late, this Node itself stood still: what it has not heard meanwhile says nothing of any
Gateway, so each has its whole time once more. Pure: times are arguments. Shown by tests/node/test_gateway_watch.py.
"""

from __future__ import annotations

from collections.abc import Iterable

from shardline.errors import ShardlineError
from shardline.settings import Settings

_KEPT = 64


class GatewayWatch:
    """`now`: monotonic seconds, everywhere."""

    def __init__(self, settings: Settings, now: float) -> None:
        self._settings = settings
        self._heard: dict[str, float] = {}
        """When each was last heard, or had to be given its time anew."""
        self.due = now + settings.beat_interval_s
        """When to look next."""

    def opened(self, gateway: str, now: float) -> None:
        """Opening a session is a sign of life."""
        self._heard[gateway] = now

    def beat(self, gateway: str, now: float) -> None:
        """Unknown ones are ignored: they have no session here."""
        if gateway in self._heard:
            self._heard[gateway] = now

    def silent(self, now: float, used: Iterable[str]) -> set[str]:
        """Those that have been silent for too long, and are forgotten. `used`: all that have sessions here."""
        late = now - self.due > self._settings.late_timer_s
        self.due = now + self._settings.beat_interval_s
        if late:
            self._heard = dict.fromkeys(self._heard, now)
            return set()
        silent = {g for g, last in self._heard.items() if now - last > self._settings.beat_timeout_s}
        for gateway in silent:
            del self._heard[gateway]
        if len(self._heard) > _KEPT:
            left = set(used)
            self._heard = {g: t for g, t in self._heard.items() if g in left}
        return silent


def silence_of_gateway(node_id: str, settings: Settings) -> ShardlineError:
    message = f"Node {node_id} has heard nothing of the Gateway for {settings.beat_timeout_s:g} s"
    return ShardlineError("gateway_lost", message, limit="heartbeat")
