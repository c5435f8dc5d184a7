"""Mutated frames and handshakes: ``make fuzz``, or ``python -m tests.fuzz --help``."""

from __future__ import annotations

if __name__ == "__main__":
    from tests.fuzz.command import app

    app()
