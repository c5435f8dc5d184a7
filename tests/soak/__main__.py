"""The long run: ``make soak``, or ``python -m tests.soak --help``."""

from __future__ import annotations

if __name__ == "__main__":
    from tests.soak.soak_command import app

    app()
