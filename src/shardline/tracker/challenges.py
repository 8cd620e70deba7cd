"""When a Node must show what it says it has, and what follows: the docket of challenges.

Owns the rules alone: how many blocks at what time, that one failure is not the end, and what proves a Node again. It
asks nobody (examination.py). A verdict is about one artifact on one Node; its identity is never touched. No I/O; the
clock is an argument (monotonic seconds). docs/tracker.md explains it. Shown by tests/tracker/test_challenges.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

JOIN_BLOCKS = 20
"""Of what was never judged, or has doubled since. Missing half of it is noticed all but once in a million."""
PERIODIC_BLOCKS = 4
SUSPICION_BLOCKS = 60
RETRY_S = 5.0
"""From a first failure to the one further try."""
AGAIN_S = 60.0
"""From one try to prove itself again to the next, and least time between two suspicions."""
_GROWTH = 2


class Subject(NamedTuple):
    """Whom a verdict is about."""

    node: str
    content_id: str


class Summons(NamedTuple):
    """A challenge that is due. Whoever takes it says how it ended: `passed`, `failed` or `unjudged`."""

    subject: Subject
    blocks: int
    of_everything: bool
    """Drawn from all that is advertised; else from the Shard that the Node serves first of all."""


@dataclass(slots=True)
class _Case:
    """What is known of one subject. Only the docket writes here."""

    due: float
    blocks: int = JOIN_BLOCKS
    proven: bool | None = None
    reason: str | None = None
    failures: int = 0
    """In a row."""
    held_bytes: int = 0
    """As advertised last."""
    judged_bytes: int = 0
    """As advertised when it was asked last."""
    asked: bool = False
    """It is being asked now."""
    suspected_at: float | None = None
    suspected: bool = False
    """While it was being asked."""

    def is_clean(self) -> bool:
        """Nothing speaks against it, and nothing is being found out."""
        return self.proven is not False and not self.failures and not self.asked


class Docket:
    """All verdicts of one Tracker. Every method is one event. `every_s`: pause between two challenges in peace."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._cases: dict[Subject, _Case] = {}

    def proven(self, subject: Subject) -> bool | None:
        """The verdict; None: there is none yet."""
        case = self._cases.get(subject)
        return None if case is None else case.proven

    def reason(self, subject: Subject) -> str | None:
        """Why it is not proven, where it failed."""
        case = self._cases.get(subject)
        return None if case is None else case.reason

    def heard(self, subject: Subject, held_bytes: int, now: float) -> None:
        """It advertises so much. What is new, or has doubled since it was judged, is asked for at once."""
        case = self._cases.get(subject)
        if held_bytes == 0 and (case is None or case.is_clean()):
            # It gives nothing away and has said nothing wrong: there is nothing to judge. Who takes all back while it
            # is asked, or between two tries, is not rid of the case.
            self._cases.pop(subject, None)
            return
        if case is None:
            self._cases[subject] = _Case(now, held_bytes=held_bytes)
            return
        case.held_bytes = held_bytes
        if case.proven is not False and not case.failures and held_bytes >= _GROWTH * case.judged_bytes > 0:
            case.due, case.blocks = min(case.due, now), max(case.blocks, JOIN_BLOCKS)

    def joined(self, node: str, now: float) -> None:
        """A Node has registered, again: it is another process, on a disk that may have changed. A failure still counts:
        else whoever registers often enough is never judged."""
        for subject, case in self._cases.items():
            if subject.node == node:
                case.due, case.blocks = now, max(case.blocks, JOIN_BLOCKS)

    def suspect(self, subject: Subject, now: float) -> bool:
        """Somebody says that it gave wrong bytes. Whether it is asked for that: not more often than once a minute."""
        case = self._cases.get(subject)
        if case is None or (case.suspected_at is not None and now - case.suspected_at < AGAIN_S):
            return False
        case.suspected_at = now
        if case.asked:
            case.suspected = True
        else:
            case.due, case.blocks = now, SUSPICION_BLOCKS
        return True

    def take(self, now: float, most: int) -> list[Summons]:
        """The challenges that are due, at most `most` and one a Node at a time, those that wait longest first; each is
        being asked from now."""
        busy = {subject.node for subject, case in self._cases.items() if case.asked}
        due = sorted((case.due, subject) for subject, case in self._cases.items() if case.due <= now)
        taken: list[Summons] = []
        for _, subject in due:
            if len(taken) >= most:
                break
            if subject.node in busy:
                continue
            busy.add(subject.node)
            case = self._cases[subject]
            case.asked = True
            case.judged_bytes = case.held_bytes
            taken.append(Summons(subject, case.blocks, case.blocks >= SUSPICION_BLOCKS))
        return taken

    def passed(self, subject: Subject, now: float) -> None:
        """It showed all blocks: it is proven, whatever was before."""
        case = self._cases.get(subject)
        if case is not None:
            case.asked, case.proven, case.reason, case.failures = False, True, None, 0
            self._next(case, now + self._every_s, PERIODIC_BLOCKS, now)

    def failed(self, subject: Subject, reason: str, now: float) -> bool:
        """It did not. Whether it is unproven from now on: after a further try, which asks for more."""
        case = self._cases.get(subject)
        if case is None:
            return False
        case.asked = False
        case.failures += 1
        if case.proven is not False and case.failures == 1:
            self._next(case, now + RETRY_S, SUSPICION_BLOCKS, now)
            return False
        news = case.proven is not False
        case.proven, case.reason = False, reason
        self._next(case, now + AGAIN_S, SUSPICION_BLOCKS, now)
        return news

    def unjudged(self, subject: Subject, now: float) -> None:
        """It could not be asked, which was not its fault."""
        case = self._cases.get(subject)
        if case is not None:
            case.asked = False
            self._next(case, now + (AGAIN_S if case.proven is False else RETRY_S), case.blocks, now)

    def forget(self, node: str) -> None:
        """The Node is known no more."""
        for subject in [subject for subject in self._cases if subject.node == node]:
            del self._cases[subject]

    def verdicts(self) -> Iterator[tuple[Subject, bool | None]]:
        return ((subject, case.proven) for subject, case in self._cases.items())

    @staticmethod
    def _next(case: _Case, due: float, blocks: int, now: float) -> None:
        """When to ask next; a suspicion that came up meanwhile goes first."""
        case.due, case.blocks = (now, SUSPICION_BLOCKS) if case.suspected else (due, blocks)
        case.suspected = False
