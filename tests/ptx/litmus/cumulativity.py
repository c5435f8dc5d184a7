"""What is told on: chains of threads, barriers, and read-modify-writes."""

from __future__ import annotations

from tests.ptx.litmus.litmus import ONE_CTA, RANKS, Litmus

_MIXED = ("0.0", "0.0", "0.1")
#: two threads of one CTA and one of another rank
_SENDERS = ("0.0", "0.0", "1.0")
_RECEIVERS = ("0.0", "1.0", "1.0")

CHAINS = (
    Litmus(
        "WRC relaxed",
        ("st.relaxed.gpu x, 1", "ld.relaxed.gpu a, x; st.relaxed.gpu f, 1", "ld.acquire.gpu b, f; ld.relaxed.gpu c, x"),
        "a=1 b=1 c=0",
        True,
    ),
    Litmus(
        "WRC acquire",
        ("st.release.gpu x, 1", "ld.acquire.gpu a, x; st.release.gpu f, 1", "ld.acquire.gpu b, f; ld.relaxed.gpu c, x"),
        "a=1 b=1 c=0",
        False,
    ),
    Litmus(
        "WRC weak",
        ("st.weak x, 1", "ld.weak a, x; st.release.gpu f, 1", "ld.acquire.gpu b, f; ld.weak c, x"),
        "a=1 b=1 c=0",
        True,
    ),
    Litmus(
        "WRC cta",
        ("st.relaxed.gpu x, 1", "ld.relaxed.gpu a, x; st.release.cta f, 1", "ld.acquire.gpu b, f; ld.relaxed.gpu c, x"),
        "a=1 b=1 c=0",
        True,
    ),
    Litmus(
        "ISA2",
        (
            "st.weak x, 1; st.release.gpu f, 1",
            "ld.acquire.gpu a, f; st.release.gpu g, 1",
            "ld.acquire.gpu b, g; ld.weak c, x",
        ),
        "a=1 b=1 c=0",
        False,
    ),
    Litmus(
        "ISA2 mixed scopes",
        (
            "st.weak x, 1; st.release.cta f, 1",
            "ld.acquire.cta a, f; st.release.gpu g, 1",
            "ld.acquire.gpu b, g; ld.weak c, x",
        ),
        "a=1 b=1 c=0",
        False,
        _MIXED,
    ),
    Litmus(
        "ISA2 cta between CTAs",
        (
            "st.weak x, 1; st.release.cta f, 1",
            "ld.acquire.cta a, f; st.release.gpu g, 1",
            "ld.acquire.gpu b, g; ld.weak c, x",
        ),
        "a=1 b=1 c=0",
        True,
    ),
    Litmus(
        "ISA2 relaxed in the middle",
        (
            "st.weak x, 1; st.release.gpu f, 1",
            "ld.relaxed.gpu a, f; st.release.gpu g, 1",
            "ld.acquire.gpu b, g; ld.weak c, x",
        ),
        "a=1 b=1 c=0",
        True,
    ),
    Litmus(
        "ISA2 between ranks",
        (
            "st.weak x, 1; st.release.sys f, 1",
            "ld.acquire.sys a, f; st.release.sys g, 1",
            "ld.acquire.sys b, g; ld.weak c, x",
        ),
        "a=1 b=1 c=0",
        False,
        RANKS,
    ),
)

BARRIERS = (
    Litmus("bar", ("st.weak x, 1; barrier.sync 0", "barrier.sync 0; ld.weak a, x"), "a=0", False, ONE_CTA),
    Litmus(
        "bar, of one that arrives",
        ("st.weak x, 1; barrier.arrive 1, 2", "barrier.sync 1, 2; ld.weak a, x"),
        "a=0",
        False,
        ONE_CTA,
    ),
    Litmus(
        "bar, before it arrives",
        ("barrier.arrive 1, 2; st.weak x, 1", "barrier.sync 1, 2; ld.weak a, x"),
        "a=0",
        True,
        ONE_CTA,
    ),
    Litmus("no bar", ("st.weak x, 1", "ld.weak a, x"), "a=0", True, ONE_CTA),
    Litmus("bar overwrites", ("ld.weak a, x; barrier.sync 0", "barrier.sync 0; st.weak x, 1"), "a=1", False, ONE_CTA),
    Litmus(
        "bar, then release",
        ("st.weak x, 1; barrier.sync 0", "barrier.sync 0; st.release.sys f, 1", "ld.acquire.sys a, f; ld.weak b, x"),
        "a=1 b=0",
        False,
        _SENDERS,
    ),
    Litmus(
        "release without bar",
        ("st.weak x, 1", "st.release.sys f, 1", "ld.acquire.sys a, f; ld.weak b, x"),
        "a=1 b=0",
        True,
        _SENDERS,
    ),
    Litmus(
        "bar, then release.gpu",
        ("st.weak x, 1; barrier.sync 0", "barrier.sync 0; st.release.gpu f, 1", "ld.acquire.sys a, f; ld.weak b, x"),
        "a=1 b=0",
        True,
        _SENDERS,
    ),
    Litmus(
        "acquire, then bar",
        ("st.weak x, 1; st.release.sys f, 1", "ld.acquire.sys a, f; barrier.sync 0", "barrier.sync 0; ld.weak b, x"),
        "a=1 b=0",
        False,
        _RECEIVERS,
    ),
    Litmus(
        "relaxed, then bar",
        ("st.weak x, 1; st.release.sys f, 1", "ld.relaxed.sys a, f; barrier.sync 0", "barrier.sync 0; ld.weak b, x"),
        "a=1 b=0",
        True,
        _RECEIVERS,
    ),
)

ATOMICS = (
    Litmus(
        "release sequence",
        ("st.weak x, 1; st.release.gpu f, 1", "atom.relaxed.gpu.add c, f, 1", "ld.acquire.gpu a, f; ld.weak b, x"),
        "a=2 b=0",
        False,
    ),
    Litmus(
        "release sequence, of a store",
        (
            "st.weak x, 1; st.release.gpu f, 1",
            "ld.relaxed.gpu c, f; st.relaxed.gpu f, 2",
            "ld.acquire.gpu a, f; ld.weak b, x",
        ),
        "a=2 b=0 c=1",
        True,
    ),
    Litmus(
        "release sequence, own store",
        ("st.weak x, 1; st.release.gpu f, 1; st.relaxed.gpu f, 2", "ld.acquire.gpu a, f; ld.weak b, x"),
        "a=2 b=0",
        False,
    ),
    Litmus(
        "release sequence, of atom.cta",
        ("st.weak x, 1; st.release.gpu f, 1", "atom.relaxed.cta.add c, f, 1", "ld.acquire.gpu a, f; ld.weak b, x"),
        "a=2 b=0",
        True,
    ),
    Litmus(
        "the last to arrive",
        ("st.weak x, 1; atom.acq_rel.gpu.add c, f, 1", "atom.acq_rel.gpu.add a, f, 1; ld.weak b, x"),
        "a=1 b=0",
        False,
    ),
    Litmus(
        "the last of three",
        (
            "st.weak x, 1; atom.acq_rel.gpu.add c, f, 1",
            "atom.acq_rel.gpu.add d, f, 1",
            "atom.acq_rel.gpu.add a, f, 1; ld.weak b, x",
        ),
        "a=2 b=0",
        False,
    ),
    Litmus(
        "the last to arrive, relaxed",
        ("st.weak x, 1; atom.relaxed.gpu.add c, f, 1", "atom.relaxed.gpu.add a, f, 1; ld.weak b, x"),
        "a=1 b=0",
        True,
    ),
    Litmus(
        "the last to arrive, fenced",
        (
            "st.weak x, 1; fence.acq_rel.gpu; red.relaxed.gpu.add f, 1",
            "atom.relaxed.gpu.add a, f, 1; fence.acq_rel.gpu; ld.weak b, x",
        ),
        "a=1 b=0",
        False,
    ),
    Litmus(
        "the last to arrive, by a reduction",
        ("st.weak x, 1; st.release.gpu f, 1", "red.relaxed.gpu.add f, 1; fence.acq_rel.gpu; ld.weak b, x"),
        "f=2 b=0",
        True,
    ),
    Litmus(
        "MP read by an atomic",
        ("st.relaxed.gpu x, 1; st.relaxed.gpu f, 1", "ld.relaxed.gpu a, f; atom.relaxed.gpu.add b, x, 0"),
        "a=1 b=0",
        True,
    ),
    Litmus(
        "MP released, read by an atomic",
        ("st.relaxed.gpu x, 1; st.release.gpu f, 1", "ld.acquire.gpu a, f; atom.relaxed.gpu.add b, x, 0"),
        "a=1 b=0",
        False,
    ),
    Litmus(
        "MP by atomics",
        ("red.relaxed.gpu.add x, 1; st.relaxed.gpu f, 1", "ld.relaxed.gpu a, f; atom.relaxed.gpu.add b, x, 0"),
        "a=1 b=0",
        True,
        beyond="it comes behind those that have read already",
    ),
    Litmus(
        "SB read by atomics",
        ("st.relaxed.gpu x, 1; atom.gpu.add a, y, 0", "st.relaxed.gpu y, 1; atom.gpu.add b, x, 0"),
        "a=0 b=0",
        True,
    ),
    Litmus(
        "S exchange",
        ("st.relaxed.gpu x, 2; st.relaxed.gpu f, 1", "ld.relaxed.gpu a, f; atom.gpu.exch b, x, 1"),
        "a=1 x=2",
        True,
    ),
    Litmus("atomicity", ("atom.gpu.add a, x, 1", "atom.gpu.add b, x, 1"), "x=1", False),
    Litmus("atomicity, cta between CTAs", ("atom.cta.add a, x, 1", "atom.gpu.add b, x, 1"), "x=1", True),
    Litmus("atomicity, gpu between ranks", ("atom.gpu.add a, x, 1", "atom.gpu.add b, x, 1"), "x=1", True, RANKS),
    Litmus("atomicity, sys between ranks", ("atom.sys.add a, x, 1", "atom.sys.add b, x, 1"), "x=1", False, RANKS),
    Litmus("a store in a read-modify-write", ("atom.gpu.add a, x, 4", "st.relaxed.gpu x, 1"), "a=0 x=4", False),
    Litmus(
        "a store in one of gpu scope, between ranks",
        ("atom.gpu.add a, x, 4", "st.relaxed.sys x, 1"),
        "a=0 x=4",
        True,
        RANKS,
    ),
    Litmus("exchange", ("atom.gpu.exch a, x, 1", "atom.gpu.exch b, x, 2"), "a=0 b=0", False),
    Litmus("compare and swap", ("atom.gpu.cas a, x, 0, 1", "atom.gpu.cas b, x, 0, 2"), "a=0 b=0", False),
)
