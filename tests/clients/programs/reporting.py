"""How a program of this folder says what worked: one JSON line a check, `{"check": …, "error": null or words}`.

A program runs in its client's environment, with the Gateway's address and the model as arguments, and is read by
test_installed_clients.py. Nothing of Shardline can be imported here.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable

URL, MODEL = [*sys.argv, "", ""][1:3]
GREETING = "Grüße 😀 from two Nodes."
RESULT = "It is 21 degrees in Oslo."
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
