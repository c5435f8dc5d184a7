"""Bulk copies: whose writes do they read, and who finds what they have written?"""

from __future__ import annotations

from tests.ptx.litmus.litmus import CTAS, ONE_CTA, RANKS, Litmus

_FENCE, _SHARED, _GLOBAL = "fence.proxy.async", "fence.proxy.async.shared::cta", "fence.proxy.async.global"


def _out(
    name: str, between: str, allowed: bool, at: tuple[str, ...] = CTAS, scope: str = "gpu", end: str = ""
) -> Litmus:
    """A copy from shared memory, then a flag: does who sees the flag see the copy's writes?"""
    writer = f"st.shared s, 1; {_FENCE}; copy.out x, s; {between}; st.release.{scope} f, 1{end}"
    return Litmus(f"MP bulk {name}", (writer, "ld.acquire.sys a, f; ld.weak b, x"), "a=1 b=0", allowed, at)


def _in(name: str, before: str, allowed: bool, writes: str = "st.weak x, 1") -> Litmus:
    """A flag, then a copy to shared memory: does it read what came before the flag?"""
    reads = f"init m; ld.acquire.gpu a, f; {before}expect m; copy.in s, x, m; phase m; ld.shared b, s"
    return Litmus(f"MP bulk read {name}", (f"{writes}; st.release.gpu f, 1", reads), "a=1 b=0", allowed)


_READ, _OUT = "; wait_group.read", f"st.shared s, 1; {_FENCE}; copy.out x, s; commit; wait_group"

BULK_COPIES = (
    # what a copy has written
    _out("waited for", "commit; wait_group", False),
    _out("not waited for", "commit", True, end=_READ),
    _out("waited for until it has read", "commit; wait_group.read", True),
    _out("of no group", "wait_group", True, end=f"; commit{_READ}"),
    _out("waited for, sys between ranks", "commit; wait_group", False, RANKS, "sys"),
    _out("waited for, gpu between ranks", "commit; wait_group", True, RANKS),
    _out("between ranks, until it has read", "commit; wait_group.read", True, RANKS, "sys"),
    Litmus(
        "MP by two bulk copies",
        (
            f"st.shared s, 1; {_FENCE}; copy.out x, s; commit; copy.out f, s; commit; wait_group",
            "ld.acquire.gpu a, f; ld.weak b, x",
        ),
        "a=1 b=0",
        True,
    ),
    # what it reads in shared memory
    Litmus(
        "bulk without a fence",
        (f"st.shared s, 1; {_FENCE}; st.shared s, 2; copy.out x, s; commit; wait_group",),
        "x=1",
        True,
    ),
    Litmus(
        "bulk behind a fence",
        (f"st.shared s, 1; {_FENCE}; st.shared s, 2; {_SHARED}; copy.out x, s; commit; wait_group",),
        "x=1",
        False,
    ),
    Litmus(
        "bulk behind a fence of global memory",
        (f"st.shared s, 1; {_FENCE}; st.shared s, 2; {_GLOBAL}; copy.out x, s; commit; wait_group",),
        "x=1",
        True,
    ),
    Litmus(
        "bulk behind a fence and a barrier",
        (
            f"st.shared s, 1; {_FENCE}; st.shared s, 2; {_FENCE}; barrier.sync 0",
            "barrier.sync 0; copy.out x, s; commit; wait_group",
        ),
        "x=1",
        False,
        ONE_CTA,
    ),
    Litmus(
        "bulk behind a barrier and a fence",
        (
            f"st.shared s, 1; {_FENCE}; st.shared s, 2; barrier.sync 0",
            f"barrier.sync 0; {_FENCE}; copy.out x, s; commit; wait_group",
        ),
        "x=1",
        False,
        ONE_CTA,
    ),
    Litmus(
        "bulk behind a barrier alone",
        (
            f"st.shared s, 1; {_FENCE}; st.shared s, 2; barrier.sync 0",
            "barrier.sync 0; copy.out x, s; commit; wait_group",
        ),
        "x=1",
        True,
        ONE_CTA,
    ),
    Litmus(
        "shared memory again, once it is read",
        (f"st.shared s, 1; {_FENCE}; copy.out x, s; commit; wait_group.read; st.shared s, 2; wait_group",),
        "x=2",
        False,
    ),
    Litmus(
        "shared memory again, at once",
        (f"st.shared s, 1; {_FENCE}; copy.out x, s; commit; st.shared s, 2; {_FENCE}; wait_group",),
        "x=2",
        True,
    ),
    # what it reads in global memory, and who finds it in shared memory
    _in("behind a fence", f"{_FENCE}; ", False),
    _in("behind a fence of global memory", f"{_GLOBAL}; ", False),
    _in("behind a fence of shared memory", f"{_SHARED}; ", True),
    _in("without a fence", "", True),
    _in("behind a fence of another CTA", "", True, f"st.weak x, 1; {_FENCE}"),
    _in("of what a bulk copy wrote", "", True, _OUT),
    _in("of what a bulk copy wrote, behind a fence", f"{_FENCE}; ", False, _OUT),
    Litmus(
        "bulk before the phase is over",
        (f"init m; st.weak x, 1; st.shared s, 0; {_FENCE}; expect m; copy.in s, x, m; ld.shared a, s; phase m",),
        "a=0",
        True,
    ),
    Litmus(
        "bulk once the phase is over",
        (f"init m; st.weak x, 1; st.shared s, 0; {_FENCE}; expect m; copy.in s, x, m; phase m; ld.shared a, s",),
        "a=0",
        False,
    ),
    Litmus(
        "bulk, a relaxed look at the phase",
        (
            f"init m; st.weak x, 1; st.shared s, 0; {_FENCE}; expect m; copy.in s, x, m; phase.relaxed m; "
            "ld.shared a, s",
        ),
        "a=0",
        True,
    ),
    Litmus(
        "bulk in and out again",
        (
            f"init m; st.weak x, 1; st.shared s, 0; {_FENCE}; expect m; copy.in s, x, m; phase m; copy.out y, s; "
            "commit; wait_group",
        ),
        "y=0",
        False,
    ),
)
