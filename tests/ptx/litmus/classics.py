"""The tests that memory models are known by."""

from __future__ import annotations

from tests.ptx.litmus.litmus import CTAS, RANKS, Litmus


def _sb(
    name: str, between: str, allowed: bool, at: tuple[str, ...] = CTAS, also: str | None = None, scope: str = "gpu"
) -> Litmus:
    """Store buffering; ``also`` is between the second thread's accesses."""
    second = between if also is None else also
    first = f"st.relaxed.{scope} x, 1; {between}ld.relaxed.{scope} a, y"
    return Litmus(
        f"SB {name}", (first, f"st.relaxed.{scope} y, 1; {second}ld.relaxed.{scope} b, x"), "a=0 b=0", allowed, at
    )


STORE_BUFFERING = (
    _sb("relaxed", "", True),
    Litmus(
        "SB release, acquire",
        ("st.release.gpu x, 1; ld.acquire.gpu a, y", "st.release.gpu y, 1; ld.acquire.gpu b, x"),
        "a=0 b=0",
        True,
    ),
    _sb("acq_rel", "fence.acq_rel.gpu; ", True),
    _sb("sc", "fence.sc.gpu; ", False),
    _sb("sc of one", "fence.sc.gpu; ", True, also=""),
    _sb("sc.cta", "fence.sc.cta; ", True),
    _sb("sc.gpu, sc.sys", "fence.sc.gpu; ", False, also="fence.sc.sys; "),
    _sb("sc.gpu between ranks", "fence.sc.gpu; ", True, RANKS, scope="sys"),
    _sb("sc.sys between ranks", "fence.sc.sys; ", False, RANKS, scope="sys"),
    _sb("sc.gpu, sc.sys between ranks", "fence.sc.gpu; ", True, RANKS, also="fence.sc.sys; ", scope="sys"),
)

LOAD_BUFFERING = (
    Litmus(
        "LB relaxed",
        ("ld.relaxed.gpu a, x; st.relaxed.gpu y, 1", "ld.relaxed.gpu b, y; st.relaxed.gpu x, 1"),
        "a=1 b=1",
        True,
        beyond="no load sees a later store",
    ),
    Litmus(
        "LB acquire, release",
        ("ld.acquire.gpu a, x; st.release.gpu y, 1", "ld.acquire.gpu b, y; st.release.gpu x, 1"),
        "a=1 b=1",
        False,
    ),
)

_WRITERS = ("st.relaxed.gpu x, 1", "st.relaxed.gpu y, 1")


def _iriw(name: str, load: str, between: str, allowed: bool) -> Litmus:
    readers = (f"{load} a, x; {between}{load} b, y", f"{load} c, y; {between}{load} d, x")
    return Litmus(f"IRIW {name}", _WRITERS + readers, "a=1 b=0 c=1 d=0", allowed)


SEVERAL_WRITERS = (
    _iriw("relaxed", "ld.relaxed.gpu", "", True),
    _iriw("acquire", "ld.acquire.gpu", "", True),
    _iriw("acq_rel", "ld.relaxed.gpu", "fence.acq_rel.gpu; ", True),
    _iriw("sc", "ld.relaxed.gpu", "fence.sc.gpu; ", False),
    Litmus(
        "2+2W relaxed",
        ("st.relaxed.gpu x, 1; st.relaxed.gpu y, 2", "st.relaxed.gpu y, 1; st.relaxed.gpu x, 2"),
        "x=1 y=1",
        True,
    ),
    Litmus(
        "2+2W release",
        ("st.release.gpu x, 1; st.release.gpu y, 2", "st.release.gpu y, 1; st.release.gpu x, 2"),
        "x=1 y=1",
        True,
    ),
    Litmus(
        "2+2W sc",
        (
            "st.relaxed.gpu x, 1; fence.sc.gpu; st.relaxed.gpu y, 2",
            "st.relaxed.gpu y, 1; fence.sc.gpu; st.relaxed.gpu x, 2",
        ),
        "x=1 y=1",
        False,
    ),
    Litmus(
        "S relaxed",
        ("st.relaxed.gpu x, 2; st.relaxed.gpu f, 1", "ld.relaxed.gpu a, f; st.relaxed.gpu x, 1"),
        "a=1 x=2",
        True,
    ),
    Litmus(
        "S release, acquire",
        ("st.relaxed.gpu x, 2; st.release.gpu f, 1", "ld.acquire.gpu a, f; st.relaxed.gpu x, 1"),
        "a=1 x=2",
        False,
    ),
    Litmus(
        "R relaxed",
        ("st.relaxed.gpu x, 1; st.relaxed.gpu y, 1", "st.relaxed.gpu y, 2; ld.relaxed.gpu a, x"),
        "a=0 y=2",
        True,
    ),
    Litmus(
        "R sc",
        (
            "st.relaxed.gpu x, 1; fence.sc.gpu; st.relaxed.gpu y, 1",
            "st.relaxed.gpu y, 2; fence.sc.gpu; ld.relaxed.gpu a, x",
        ),
        "a=0 y=2",
        False,
    ),
)

COHERENCE = (
    Litmus("CoRR", ("st.relaxed.gpu x, 1", "ld.relaxed.gpu a, x; ld.relaxed.gpu b, x"), "a=1 b=0", False),
    Litmus("CoRR weak", ("st.weak x, 1", "ld.weak a, x; ld.weak b, x"), "a=1 b=0", True),
    Litmus(
        "CoRR gpu between ranks",
        ("st.relaxed.gpu x, 1", "ld.relaxed.gpu a, x; ld.relaxed.gpu b, x"),
        "a=1 b=0",
        True,
        RANKS,
    ),
    Litmus(
        "CoRR sys between ranks",
        ("st.relaxed.sys x, 1", "ld.relaxed.sys a, x; ld.relaxed.sys b, x"),
        "a=1 b=0",
        False,
        RANKS,
    ),
    Litmus(
        "CoRR of two",
        (
            "st.relaxed.gpu x, 1",
            "st.relaxed.gpu x, 2",
            "ld.relaxed.gpu a, x; ld.relaxed.gpu b, x",
            "ld.relaxed.gpu c, x; ld.relaxed.gpu d, x",
        ),
        "a=1 b=2 c=2 d=1",
        False,
    ),
    Litmus("CoWR", ("st.relaxed.gpu x, 1; ld.relaxed.gpu a, x", "st.relaxed.gpu x, 2"), "a=0", False),
    Litmus(
        "CoWR of a later one", ("st.relaxed.gpu x, 1; ld.relaxed.gpu a, x", "st.relaxed.gpu x, 2"), "a=2 x=1", False
    ),
    Litmus("CoRW1", ("ld.relaxed.gpu a, x; st.relaxed.gpu x, 1",), "a=1", False),
    Litmus("CoRW2", ("ld.relaxed.gpu a, x; st.relaxed.gpu x, 2", "st.relaxed.gpu x, 1"), "a=1 x=1", False),
    Litmus("CoWW", ("st.relaxed.gpu x, 1; st.relaxed.gpu x, 2", "st.relaxed.gpu y, 1"), "x=1", False),
    Litmus(
        "CoRR, told",
        ("st.relaxed.gpu x, 1", "ld.relaxed.gpu a, x; st.release.gpu f, 1", "ld.acquire.gpu b, f; ld.relaxed.gpu c, x"),
        "a=1 b=1 c=0",
        False,
    ),
)
