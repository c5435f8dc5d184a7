"""What is put for what in the kernels of normal mode, their rules taken out, and in which scene that shows."""

from __future__ import annotations

from typing import NamedTuple

from tests.ptx.faults.sources import Change
from tests.ptx.product.normal_failures import NEVER_SENT, TOO_MANY


class Fault(NamedTuple):
    """What is put for what, and of :data:`normal_scenes.SCENES` the one in which it is noticed."""

    change: Change
    scene: str = "mapped"


FAULTS: dict[str, Fault] = {
    "an operation ends when its rows are there": Fault(
        Change("normal_progress._unwritten", "proxied & (written < shown)", "proxied & (written < 0)"),
        "proxied",
    ),
    "rows land where a write may be repeated": Fault(
        Change("normal_progress.look", "tl.minimum(out_rows, ring)", "out_rows + ring"),
        "proxied",
    ),
    "rows are told of in any order": Fault(Change("words.release_each", "st.release.sys", "st.relaxed.sys")),
    "rows are read in any order": Fault(Change("words.acquire_each", "ld.acquire.sys", "ld.relaxed.sys")),
    "marks are read before they are copied": Fault(
        Change("normal_dispatch._forward", "        settle_plan()\n        marks", "        marks"),
        "nodes",
    ),
    "an operation is opened before all ids are counted": Fault(
        Change(
            "normal_open.open_rows",
            "arrive_last(state + W.ENDED, 1, tl.num_programs(0))",
            "tl.program_id(0) == 0",
        )
    ),
    "programs go on before the first one has opened": Fault(
        Change("normal_open.await_opened", "(opened != number + 1) & (opened != -(number + 1))", "opened == 1 << 40")
    ),
    "a word of the operation before counts": Fault(
        Change("normal_progress._stamped", "tl.where(words >= one.stamp, words - one.stamp, 0)", "words & 0xFFFF")
    ),
    "more rows are put than fit": Fault(
        Change("normal_progress.look", "tl.minimum(freed, sent) + out_rows", "sent + out_rows")
    ),
    "room is told of before it is there": Fault(
        Change("normal_progress.advance", "one.stamp + taken, free", "one.stamp + taken + 1, free")
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
        Change("normal_rows.plan_rows", "N.LIMIT if SENDING else N.ARRIVED", "N.LIMIT"), "nodes"
    ),
}
EQUIVALENT: dict[str, tuple[Change, str]] = {
    "what is read is told at once, and not when the turn is over": (
        Change("normal_turns.end_turn", "    settle()\n", ""),
        "Triton 3.9 puts a barrier of its own before each call of this function, which uses shared memory; with others "
        "it is needed, as words.enter says",
    ),
}
"""What nothing can notice, and why not."""
#: By the rule that is taken out, in which scene.
RULES: dict[str, str] = {
    "normal mode: an operation opens only when every peer's notify has arrived": "mapped",
    "normal mode: ranks that were given other operations part before anything is sent": "other operations",
    "normal mode: rows are those of the handle": "other rows",
    "normal mode: a peer tells of no more rows than it has, and of none that do not fit": TOO_MANY,
    "normal mode: a peer has read no more rows than there were": NEVER_SENT,
    "normal mode: the host is told that more rows came than num_worst_tokens promised": "a broken promise",
    "normal mode: an expert id out of range counts nowhere": "ids of no expert",
    "normal mode: the host is told of an expert id out of range": "ids of no expert",
    "a token crosses once to a node": "nodes",
    "a node sums in float32 and rounds once": "nodes",
    "a sum of one row is that row": "nodes",
    "rows whose marks were not kept are not summed": "a broken promise",
}
