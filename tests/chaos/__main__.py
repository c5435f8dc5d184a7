"""Faults of a running group: ``make chaos``, or ``python -m tests.chaos --help``."""

from __future__ import annotations

if __name__ == "__main__":
    from tests.chaos.command import app

    app()
