"""State folders as a cluster leaves them."""

from __future__ import annotations

from pathlib import Path


def put_credential(state: Path) -> None:
    """Make the folder `state`, one that knows a cluster."""
    state.mkdir(parents=True, mode=0o700)
    path = state / "credential"
    path.write_text("credential-0123456789")
    path.chmod(0o600)
