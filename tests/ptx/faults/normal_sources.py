"""What is put for what in the kernels of normal mode, and on which path that shows."""

from __future__ import annotations

from dataclasses import dataclass

from tests.ptx.faults.sources import Change


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        change: of the source.
        path: of :data:`trials.PATHS`.
        held: rows are there long before their writes are over.
        narrow: rings hold a few rows.
        nodes: rows cross once to a node.
    """

    change: Change
    path: str = "mapped"
    held: bool = False
    narrow: bool = False
    nodes: bool = False


FAULTS: dict[str, Fault] = {
    "an operation ends when its rows are there": Fault(
        Change("normal_progress._unwritten", "proxied & (written < shown)", "proxied & (written < 0)"),
        "proxied",
        held=True,
    ),
    "rows land where a write may be repeated": Fault(
        Change("normal_progress.look", "tl.minimum(out_rows, ring)", "out_rows + ring"),
        "proxied",
        held=True,
        narrow=True,
    ),
    "what is read is told at once, and not when the turn is over": Fault(
        Change("normal_turns.end_turn", "    settle()\n", "")
    ),
    "rows are told of in any order": Fault(Change("words.release_each", "st.release.sys", "st.relaxed.sys")),
    "rows are read in any order": Fault(Change("words.acquire_each", "ld.acquire.sys", "ld.relaxed.sys")),
    "marks are read before they are copied": Fault(
        Change("normal_dispatch._forward", "        settle_plan()\n        marks", "        marks"),
        "proxied",
        nodes=True,
    ),
    "programs go on before the first one has opened": Fault(
        Change("normal_open.await_opened", "(opened != number + 1) & (opened != -(number + 1))", "opened == 1 << 40")
    ),
    "a word of the operation before counts": Fault(
        Change("normal_progress._stamped", "tl.where(words >= one.stamp, words - one.stamp, 0)", "words & 0xFFFF")
    ),
    "more rows are put than fit": Fault(
        Change("normal_progress.look", "tl.minimum(freed, sent) + out_rows", "sent + out_rows"), narrow=True
    ),
    "room is told of before it is there": Fault(
        Change("normal_progress.advance", "one.stamp + taken, free", "one.stamp + taken + 1, free"), narrow=True
    ),
    "a message of rows is told of too early": Fault(
        Change(
            "normal_progress.look",
            "count - get_each(one, N.MESSAGES_TAKEN + table",
            "1 + count - get_each(one, N.MESSAGES_TAKEN + table",
        ),
        "proxied",
    ),
    "a sum takes what has not come": Fault(
        Change("normal_rows.plan_rows", "N.LIMIT if SENDING else N.ARRIVED", "N.LIMIT"), "proxied", nodes=True
    ),
}
