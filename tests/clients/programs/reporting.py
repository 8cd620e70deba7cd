"""How a program of this folder says what worked: one JSON line a check, `{"check": …, "error": null or words}`.

A program runs in its client's environment, and is read by test_installed_clients.py. Its arguments are the Gateway's
address, the model, what that says to a greeting, and what it says to the result of a tool; nothing of Shardline can be
imported here.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable

URL, MODEL, GREETING, RESULT = sys.argv[1:]
WEATHER = "How is the weather in Oslo?"
AS_JSON = "Oslo as JSON"


def run(*checks: Callable[[], None]) -> None:
    """Run the checks in order; each is named like its function."""
    for check in checks:
        error = None
        try:
            check()
        except Exception:
            error = traceback.format_exc()[-3000:]
        print(json.dumps({"check": check.__name__, "error": error}), flush=True)
