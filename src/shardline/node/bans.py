"""Who gave wrong bytes, and for how long it is therefore asked for nothing.

Owns the time of each ban: short at first, since the disk of an honest machine forgets, too, and is scrubbed; longer
each time, so that whoever lies costs a piece a day and no more. It knows names only, whatever the way by which the
bytes came. Pure: the clock is an argument (seconds of one clock). Shown by tests/node/test_bans.py.
"""

from __future__ import annotations

FIRST_S = 300.0
GROWTH = 4
LONGEST_S = 86400.0
NAMES_LIMIT = 1000
"""So many are remembered; of more, those whose ban ends first are forgotten."""


class Bans:
    """All bans of one process."""

    def __init__(self) -> None:
        self._until: dict[str, float] = {}
        self._counts: dict[str, int] = {}

    def ban(self, name: str, now: float) -> bool:
        """It gave wrong bytes. Whether that is news: it was not banned at the moment."""
        if self.holds(name, now):
            return False
        count = self._counts.pop(name, 0)
        self._until[name] = now + min(LONGEST_S, FIRST_S * GROWTH ** min(count, 8))
        self._counts[name] = count + 1
        while len(self._counts) > NAMES_LIMIT:
            first = min((other for other in self._until if other != name), key=self._until.__getitem__)
            del self._until[first], self._counts[first]
        return True

    def holds(self, name: str, now: float) -> bool:
        """Whether it is to be asked for nothing now."""
        return now < self._until.get(name, now)

    def names(self, now: float) -> list[str]:
        """All that are banned now, sorted."""
        return sorted(name for name in self._until if self.holds(name, now))
