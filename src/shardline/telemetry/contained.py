"""Work in a task group that must not take the group down: a fault of ours ends with a log line, and where it happened.

Owns the one place that does so. For tasks of one session or one message in a group that carries all of them; errors
of the catalogue are handled by the work itself. Shown by tests/telemetry/test_contained.py.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import structlog

log = structlog.get_logger(__name__)


async def contained(
    work: Coroutine[Any, Any, None], name: str, on_fault: Callable[[Exception], None] = lambda error: None
) -> None:
    """Run `work`; an exception is logged under `name`, told to `on_fault`, and goes no further."""
    try:
        await work
    except Exception as error:  # the boundary of one task: its neighbours must live
        log.exception("task_failed", task=name, exc_info=error)
        on_fault(error)
