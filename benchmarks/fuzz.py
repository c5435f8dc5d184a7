"""What ``make fuzz`` (tests/fuzz) has run, as a table: cases by subject, and what was done to them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from uccl_ep_serving.bench.report import markdown_table

__all__ = ["markdown"]

#: What a subject is, by its name.
WHAT = {
    "tcp": "frames of tcp",
    "tcp-macs": "frames of tcp with MACs",
    "handshakes": "handshakes, both roles",
    "control": "control frames",
    "mailboxes": "words in a mailbox of shm",
    "efa": "completions of EFA",
    "roce": "completions of RoCE",
}
_HEADINGS = (
    "what",
    "cases",
    "refused",
    "sent",
    "judged",
    "by the oracle in Python",
    "processor s",
    "sent a processor s",
    "commit",
)


def _row(name: str, one: Mapping[str, Any]) -> list[str]:
    cases, refused, sent, judged = (sum(column) for column in zip(*one["rows"].values(), strict=True))
    seconds = one["processor_seconds"]
    # a handshake is one, whatever it consists of
    sent, judged = (sent, judged) if sent else (cases, cases)
    counts = [f"{value:,}" for value in (cases, refused, sent, judged, one["sampled"])]
    return [WHAT[name], *counts, f"{seconds:,.0f}", f"{sent / seconds:,.0f}", one["commit"]]


def _kinds(name: str, one: Mapping[str, Any]) -> str:
    kinds = ", ".join(f"{kind} {row[0]:,}" for kind, row in one["rows"].items() if row[0])
    return f"* {WHAT[name]}: {kinds}"


def markdown(result: Mapping[str, Any]) -> str:
    """A row per subject, then its cases by what was done to them."""
    subjects = {name: one for name, one in result["subjects"].items() if one["cases"]}
    total = sum(one["cases"] for one in subjects.values())
    return "\n\n".join(
        (
            f"{total:,} cases: each a stream or a handshake, changed as its number says, and sent in chunks to the "
            "parsers of the product. Each ended as it must: taken because a peer could have sent it, or refused by "
            "name; nothing outside of what a taken frame may write changed, and no process crashed or grew.",
            markdown_table(_HEADINGS, [_row(name, one) for name, one in subjects.items()]),
            "Cases by what was changed:\n\n" + "\n".join(_kinds(name, one) for name, one in subjects.items()),
        )
    )
