"""One thread writes data and then a flag; another sees the flag: does it see the data?"""

from __future__ import annotations

from tests.ptx.litmus.litmus import CTAS, ONE_CTA, RANKS, Litmus


def _mp(name: str, flag: str, look: str, allowed: bool, at: tuple[str, ...] = CTAS, data: str = "weak") -> Litmus:
    """``flag`` and ``look`` may begin with a fence."""
    writer = f"st.{data} x, 1; {flag} f, 1"
    *_, reads = look.split("; ")
    reader = (
        f"{look} a, f; ld.{data} b, x"
        if reads.startswith("ld")
        else f"{look.rpartition('; ')[0]} a, f; {reads}; ld.{data} b, x"
    )
    return Litmus(f"MP {name}", (writer, reader), "a=1 b=0", allowed, at)


MESSAGE_PASSING = (
    _mp("weak", "st.weak", "ld.weak", True),
    _mp("relaxed", "st.relaxed.gpu", "ld.relaxed.gpu", True, data="relaxed.gpu"),
    _mp("volatile", "st.volatile", "ld.volatile", True, RANKS),
    _mp("release, acquire", "st.release.gpu", "ld.acquire.gpu", False),
    _mp("release, relaxed", "st.release.gpu", "ld.relaxed.gpu", True),
    _mp("relaxed, acquire", "st.relaxed.gpu", "ld.acquire.gpu", True),
    _mp("weak flag, acquire", "st.weak", "ld.acquire.gpu", True),
    _mp("release, weak look", "st.release.gpu", "ld.weak", True),
    _mp("cta in a CTA", "st.release.cta", "ld.acquire.cta", False, ONE_CTA),
    _mp("cta between CTAs", "st.release.cta", "ld.acquire.cta", True),
    _mp("release.cta between CTAs", "st.release.cta", "ld.acquire.gpu", True),
    _mp("acquire.cta between CTAs", "st.release.gpu", "ld.acquire.cta", True),
    _mp("sys between CTAs", "st.release.sys", "ld.acquire.gpu", False),
    _mp("sys between ranks", "st.release.sys", "ld.acquire.sys", False, RANKS),
    _mp("gpu between ranks", "st.release.gpu", "ld.acquire.gpu", True, RANKS),
    _mp("release.gpu between ranks", "st.release.gpu", "ld.acquire.sys", True, RANKS),
    _mp("acquire.gpu between ranks", "st.release.sys", "ld.acquire.gpu", True, RANKS),
    _mp("fences", "fence.acq_rel.gpu; st.relaxed.gpu", "ld.relaxed.gpu; fence.acq_rel.gpu", False),
    _mp("fences sc", "fence.sc.gpu; st.relaxed.gpu", "ld.relaxed.gpu; fence.sc.gpu", False),
    _mp("membar", "membar.gl; st.relaxed.gpu", "ld.relaxed.gpu; membar.gl", False),
    _mp("fence, acquire", "fence.acq_rel.gpu; st.relaxed.gpu", "ld.acquire.gpu", False),
    _mp("release, fence", "st.release.gpu", "ld.relaxed.gpu; fence.acq_rel.gpu", False),
    _mp("fence of the writer", "fence.acq_rel.gpu; st.relaxed.gpu", "ld.relaxed.gpu", True),
    _mp("fence of the reader", "st.relaxed.gpu", "ld.relaxed.gpu; fence.acq_rel.gpu", True),
    _mp("fence, weak flag", "fence.acq_rel.gpu; st.weak", "ld.relaxed.gpu; fence.acq_rel.gpu", True),
    _mp("fences cta between CTAs", "fence.acq_rel.cta; st.relaxed.gpu", "ld.relaxed.gpu; fence.acq_rel.cta", True),
    _mp(
        "fences cta in a CTA", "fence.acq_rel.cta; st.relaxed.cta", "ld.relaxed.cta; fence.acq_rel.cta", False, ONE_CTA
    ),
    _mp(
        "fences gpu between ranks",
        "fence.acq_rel.gpu; st.relaxed.sys",
        "ld.relaxed.sys; fence.acq_rel.gpu",
        True,
        RANKS,
    ),
    _mp(
        "fences sys between ranks",
        "fence.acq_rel.sys; st.relaxed.sys",
        "ld.relaxed.sys; fence.acq_rel.sys",
        False,
        RANKS,
    ),
    _mp("fences sys, flag gpu", "fence.acq_rel.sys; st.relaxed.gpu", "ld.relaxed.gpu; fence.acq_rel.sys", True, RANKS),
    Litmus(
        "MP relaxed, then acquire",
        (
            "st.weak x, 1; st.release.gpu f, 1; st.relaxed.gpu g, 1",
            "ld.relaxed.gpu a, f; ld.acquire.gpu c, f; ld.weak b, x",
        ),
        "a=1 b=0",
        False,
    ),
    Litmus(
        "MP acquire of another",
        ("st.weak x, 1; st.release.gpu f, 1", "ld.relaxed.gpu a, f; ld.acquire.gpu c, g; ld.weak b, x"),
        "a=1 b=0",
        True,
    ),
    # a command of a ring: two words by one store, each a release
    Litmus(
        "ring",
        ("st.weak x, 1; st.release.sys.v2 f, 1, 1", "ld.acquire.sys a, f; ld.weak b, x"),
        "a=1 b=0",
        False,
        RANKS,
    ),
    Litmus(
        "ring relaxed",
        ("st.weak x, 1; st.relaxed.sys.v2 f, 1, 1", "ld.acquire.sys a, f; ld.weak b, x"),
        "a=1 b=0",
        True,
        RANKS,
    ),
    Litmus(
        "ring gpu",
        ("st.weak x, 1; st.release.gpu.v2 f, 1, 1", "ld.acquire.sys a, f; ld.weak b, x"),
        "a=1 b=0",
        True,
        RANKS,
    ),
    Litmus("ring, torn", ("st.release.sys.v2 f, 1, 1", "ld.acquire.sys.v2 a, b, f"), "a=1 b=0", True, RANKS),
    Litmus("ring, torn again", ("st.release.sys.v2 f, 1, 1", "ld.acquire.sys.v2 a, b, f"), "a=0 b=1", True, RANKS),
)
