"""The tables of ``docs/architecture/formats.md``, made of the formats so that the page can never lie about a bit.

``make docs`` (``scripts/docs.py``) writes them into the page. Widths and offsets come from the definitions themselves,
words about them from the comments and docstrings beside them.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType

from . import command, context, frame, imm, layout, mailbox, message, ring, streams
from .bitfield import Word

__all__ = ["TABLES"]

#: The example whose region sizes the layout table shows: DeepSeek-V3 decoding on 32 ranks.
_EXAMPLE = layout.LowLatencyPlan(ranks=32, tokens=128, hidden=7168, experts=256, topk=8, element=2)


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table. A ``|`` inside a cell is escaped."""

    def line(cells: Sequence[object]) -> str:
        return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"

    return "\n".join([line(head), "|" + "---|" * len(head), *map(line, rows)])


def _words(*words: Word) -> str:
    """Bits of one or more words."""
    rows = []
    for word in words:
        for field in word:
            last = field.shift + field.width - 1
            bits = str(field.shift) if field.width == 1 else f"{field.shift}-{last}"
            rows.append((word.name, bits, field.name, field.meaning))
        if word.used < word.bits:
            rows.append((word.name, f"{word.used}-{word.bits - 1}", "-", "zero"))
    return _table(("word", "bits", "field", "meaning"), rows)


def _comments(owner: type) -> dict[str, str]:
    """Meaning of each class attribute: the ``#:`` comment above it."""
    meanings: dict[str, str] = {}
    pending: list[str] = []
    for line in inspect.getsource(owner).splitlines():
        text = line.strip()
        if text.startswith("#:"):
            pending.append(text[2:].strip())
        elif found := re.match(r"([A-Z_]+) = ", text):
            meanings[found[1]] = " ".join(pending)
            pending = []
    return meanings


def _docstring_rows(module: ModuleType, first: str) -> list[list[str]]:
    """Rows of the table in a module's docstring: lines that start with ``first``, and their continuations.

    Columns are separated by two spaces or more, and a continuation line belongs to the columns it stands under.
    """
    rows: list[list[str]] = []
    starts: list[int] = []
    for line in (module.__doc__ or "").splitlines():
        if re.match(rf"    {first}", line):
            cells = list(re.finditer(r"\S+(?: \S+)*", line))
            starts = [cell.start() for cell in cells]
            rows.append([cell[0] for cell in cells])
        elif rows and line.startswith(" " * 12):
            for cell in re.finditer(r"\S+(?: \S+)*", line):
                column = max(i for i, start in enumerate(starts) if start <= cell.start())
                rows[-1][column] += " " + cell[0]
        elif rows and not line.strip():
            break
    return rows


def _ring() -> str:
    offsets = {"head": ring.HEAD, "tail": ring.TAIL, "capacity": ring.CAPACITY, "slots": ring.SLOTS}
    rows = []
    for words in _docstring_rows(ring, "byte"):
        # "byte   0" is two cells and "byte 256" one: the name is the first cell that is neither.
        _, name, *rest = [word for word in words if word != "byte"]
        rows.append((offsets[name], name, rest[0], "; ".join(rest[1:])))
    return _table(("byte", "field", "meaning", "who writes, who reads, memory order"), rows)


def _context() -> str:
    rows = []
    for words in _docstring_rows(context, r"\d"):
        name = words[1]
        rows.append((getattr(context, name), name, words[2], "-" if len(words) < 4 else words[3]))
    return _table(("word", "name", "meaning", "later writer"), rows)


def _streams() -> str:
    """Runs of stream ids that differ only in their channel."""
    rows: list[list[object]] = []
    for stream in range(streams.CREDIT):
        name = streams.name_of(stream)
        plain = re.sub(r", channel \d+$", "", name)
        if rows and rows[-1][2] == plain and plain != name:
            rows[-1][1] = stream
        else:
            rows.append([stream, stream, plain])
    used = [row for row in rows if streams.exists(int(str(row[0])))]
    cells: list[Sequence[object]] = [(f"{a}-{b}, one per channel" if a != b else a, what) for a, b, what in used]
    cells.append(
        (
            f"{streams.CREDIT} + s",
            f"credits of stream s, in the opposite direction: each covers {streams.CREDIT_WRITES} writes",
        )
    )
    cells.append((streams.TRANSPORT, "no stream: what the two ends of a transport tell each other beneath the proxies"))
    return _table(("stream id", "carries"), cells)


def _layout() -> str:
    window = layout.WindowLayout(_EXAMPLE.ranks, _EXAMPLE, layout.NormalPlan(ranks=_EXAMPLE.ranks))
    rows = [(region.name, region.meaning, f"{region.nbytes / (1 << 20):,.2f}") for region in window]
    rows.append(("total", "", f"{window.nbytes / (1 << 20):,.2f}"))
    return _table(("region", "holds", "MiB in the example"), rows)


def _headers() -> str:
    rows = []
    for owner, name in (
        (message.LowLatencyHeader, "low-latency dispatch, combine"),
        (message.Notice, "notice"),
        (message.NormalNotify, "normal notify"),
        (message.NormalGrant, "normal grant"),
    ):
        meanings = _comments(owner)
        for word in range(message.HEADER_WORDS):
            for field, meaning in meanings.items():
                if getattr(owner, field) == word and not field.endswith("_TAG") and "OPERATION" not in field:
                    rows.append((name, word, field, meaning or _SHARED_MEANINGS.get(field, "")))
    return _table(("message", "word", "name", "meaning"), rows)


def _frame_rows() -> list[tuple[object, ...]]:
    return [(offset, size, name, meaning) for name, offset, size, meaning in frame.frame_fields()]


#: Words whose meaning does not differ between headers, so it is not repeated at each of them.
_SHARED_MEANINGS = {
    "TAG": "format version and kind of the message",
    "NUMBER": "message number of the phase",
    "CONSUMED_DISPATCH": "dispatch messages of the receiver that the sender has finished reading",
    "CONSUMED_COMBINE": "combine messages likewise",
    "ROW_BYTES": "bytes of a row",
    "META_BYTES": "bytes of a row's meta",
}

#: Name of each table and what makes it.
TABLES: dict[str, Callable[[], str]] = {
    "command": lambda: _words(command.LOW, command.HIGH),
    "immediate": lambda: _words(imm.IMM),
    "ring": _ring,
    "streams": _streams,
    "layout": _layout,
    "headers": _headers,
    "plan": lambda: _words(layout.PLAN),
    "context": _context,
    "mailbox": lambda: _words(mailbox.WORD),
    "frame": lambda: _table(("byte", "bytes", "field", "meaning"), _frame_rows()),
    "handshake": lambda: _table(("frame", "bytes", "contents after the prefix"), frame.handshake_fields()),
}
