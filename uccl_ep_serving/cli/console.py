"""Where commands print their tables."""

from __future__ import annotations

import sys

from rich.console import Console

__all__ = ["plain", "wide_console"]


def plain(text: str) -> str:
    """``text`` of others, without what a terminal would obey."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def wide_console(columns: int = 160, *, highlight: bool = True) -> Console:
    """The terminal; a file or a pipe has no width, and gets lines of ``columns``."""
    is_terminal = sys.stdout is not None and sys.stdout.isatty()  # None: closed by who started this
    return Console(width=None if is_terminal else columns, highlight=highlight)
