"""The table of litmus tests says what the published model of PTX says, as far as that goes.

Litmus tests with bulk copies and mbarriers are left out: the formal model does not know them (axioms.py).
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.ptx.litmus.axioms import Axiom, allows
from tests.ptx.litmus.litmus import CTAS, ONE_CTA, RANKS, Litmus
from tests.ptx.litmus.tests import ALL

TABLE = {test.name: test for test in ALL if not test.copies}
FORBIDDEN = [test for test in TABLE.values() if not test.allowed]

#: of the second thread another one
_TWO_CTAS = ("0.0", "0.1", "0.0", "0.0")
_THIN_AIR = Litmus(
    "LB of what was read",
    ("ld.weak a, x; st.weak y, a", "ld.weak b, y; st.weak x, b"),
    "a=42 b=42",
    False,
)
_LB_FENCES = Litmus(
    "LB sc, through atomics",
    (
        "ld.relaxed.gpu a, x; fence.sc.gpu; st.relaxed.gpu y, 1",
        "ld.relaxed.gpu b, y; fence.sc.gpu; st.relaxed.gpu x, 1",
        "red.gpu.add x, 1",
        "red.gpu.add y, 1",
    ),
    "a=2 b=2",
    False,
)
#: the first CTA's writes and the other one's are in no order, so no write overwrites what both readers have
_TWO_ORDERS = Litmus(
    "CoRR, of two scopes",
    (
        "st.relaxed.cta x, 1; st.relaxed.cta x, 2",
        "st.relaxed.gpu x, 3; st.relaxed.gpu x, 4",
        "ld.relaxed.cta a, x; ld.relaxed.gpu b, x",
        "ld.relaxed.gpu c, x; ld.relaxed.cta d, x",
    ),
    "a=2 b=3 c=4 d=1",
    False,
    _TWO_CTAS,
)


def _told(name: str, store: str, allowed: bool) -> Litmus:
    """Two writes of one place, both of which the reader is told of."""
    writers = tuple(f"{store} x, {n}; st.release.gpu {flag}, 1" for n, flag in ((1, "f"), (2, "g")))
    reads = "ld.acquire.gpu a, f; ld.acquire.gpu b, g; ld.weak c, x; ld.weak d, x"
    return Litmus(f"told of two, {name}", (*writers, reads), "a=1 b=1 c=1 d=2", allowed)


#: of the ISA, with its section, of the paper, with its figure, and what no litmus test of the table has
EXAMPLES = (
    _THIN_AIR,
    Litmus("8.10.4 LB", ("ld.weak a, x; st.weak y, 1", "ld.weak b, y; st.weak x, 1"), "a=1 b=1", True),
    Litmus(
        "8.10.6 MP",
        ("st.weak x, 1; fence.sys; st.relaxed.sys f, 1", "ld.relaxed.sys a, f; fence.sys; ld.weak b, x"),
        "a=1 b=0",
        False,
        RANKS,
    ),
    Litmus(
        "8.10.6 SB",
        ("st.weak x, 1; fence.sc.sys; ld.weak a, y", "st.weak y, 1; fence.sc.sys; ld.weak b, x"),
        "a=0 b=0",
        False,
        RANKS,
    ),
    Litmus(
        "8.10.6 SB acq_rel",
        ("st.weak x, 1; fence.acq_rel.sys; ld.weak a, y", "st.weak y, 1; fence.acq_rel.sys; ld.weak b, x"),
        "a=0 b=0",
        True,
        RANKS,
    ),
    Litmus(
        "8.11.1 red",
        ("st.weak x, 42; st.release.gpu f, 1", "red.gpu.add f, 1; fence.acquire.gpu; ld.weak b, x"),
        "b=0 f=2",
        True,
    ),
    Litmus(
        "8.11.1 atom",
        ("st.weak x, 42; st.release.gpu f, 1", "atom.gpu.add a, f, 1; fence.acquire.gpu; ld.weak b, x"),
        "b=0 f=2",
        False,
    ),
    Litmus("9a CoRR", ("st.relaxed.gpu x, 1", "ld.relaxed.gpu a, x; ld.weak b, x"), "a=1 b=0", False),
    Litmus("9b CoRW", ("st.relaxed.gpu x, 1", "ld.relaxed.gpu a, x; st.weak x, 2"), "a=1 x=1", False),
    Litmus("9c CoWR", ("st.relaxed.gpu x, 1; ld.weak a, x", "st.relaxed.gpu x, 2"), "a=2 x=1", False),
    Litmus("9d CoWW", ("st.weak x, 1; st.weak x, 2",), "x=1", False),
    _LB_FENCES,
    _TWO_ORDERS,
    # writes that race are in no coherence order: neither is older
    _told("weak", "st.weak", True),
    _told("relaxed", "st.relaxed.gpu", False),
    Litmus("no swap", ("atom.gpu.cas a, x, 0, 1", "atom.gpu.cas b, x, 0, 2"), "a=0 b=1 x=1", True),
    Litmus("no swap, nothing written", ("atom.gpu.cas a, x, 1, 2",), "a=0 x=2", False),
    Litmus("atom without a scope", ("atom.add a, x, 1", "atom.add b, x, 1"), "x=1", False),
    Litmus(
        "SB membar",
        ("st.weak x, 1; membar.gl; ld.weak a, y", "st.weak y, 1; membar.gl; ld.weak b, x"),
        "a=0 b=0",
        False,
    ),
    Litmus(
        "who arrives is told nothing",
        ("st.weak x, 1; barrier.sync 1, 2", "barrier.arrive 1, 2; ld.weak a, x"),
        "a=0",
        True,
        ONE_CTA,
    ),
    Litmus(
        "8.2.4 the second element first",
        ("st.release.gpu.v2 f, 1, 1", "ld.acquire.gpu.v2 a, b, f; ld.acquire.gpu.v2 c, d, f"),
        "a=0 b=1 c=0 d=1",
        True,
    ),
    Litmus(
        "volatile is of the system's scope",
        ("st.weak x, 1; fence.acq_rel.sys; st.volatile f, 1", "ld.volatile a, f; fence.acq_rel.sys; ld.weak b, x"),
        "a=1 b=0",
        False,
        RANKS,
    ),
)


def _named(test: object) -> str | None:
    return test.name.replace(" ", "-") if isinstance(test, Litmus) else None


def _edited(test: Litmus, old: str, new: str) -> Litmus:
    return replace(test, threads=tuple(thread.replace(old, new) for thread in test.threads))


@pytest.mark.parametrize("test", [*TABLE.values(), *EXAMPLES], ids=_named)
def test_allows_what_is_said(test: Litmus) -> None:
    assert allows(test) == test.allowed


@pytest.mark.parametrize("test", [test for test in ALL if test.copies], ids=_named)
def test_bulk_copies_are_refused(test: Litmus) -> None:
    with pytest.raises(ValueError, match="does not know"):
        allows(test)


@pytest.mark.parametrize(
    ("axiom", "test"),
    [
        (Axiom.COHERENCE, TABLE["2+2W sc"]),
        (Axiom.COHERENCE, TABLE["S release, acquire"]),
        (Axiom.ATOMICITY, TABLE["atomicity"]),
        (Axiom.ATOMICITY, TABLE["a store in a read-modify-write"]),
        (Axiom.ATOMICITY, TABLE["exchange"]),
        (Axiom.CAUSALITY, TABLE["MP release, acquire"]),
        (Axiom.CAUSALITY, TABLE["SB sc"]),
        (Axiom.CAUSALITY, TABLE["bar"]),
        (Axiom.CAUSALITY, TABLE["CoRR, told"]),
        # no test of the table has a write that depends on a read, save in one atomic operation
        (Axiom.NO_THIN_AIR, _THIN_AIR),
        # what it forbids in the table, Coherence or Causality forbids too: who observes a write is in causality order
        # with it. Where coherence order is partial, that is not all
        (Axiom.SC_PER_LOCATION, _TWO_ORDERS),
    ],
    ids=lambda one: one.name.replace(" ", "-"),
)
def test_axiom_is_needed(axiom: Axiom, test: Litmus) -> None:
    assert not allows(test)
    assert allows(test, [axiom])


def test_axiom_fence_sc_is_needed_without_coherence() -> None:
    """Where Coherence holds, no test can need it. Let fences be in an order that contradicts causality order.

    * Does one precede itself in causality order even without the order of fences? Then somebody in the cycle observes
      a write that comes later in it, and this write precedes itself, against Coherence. (Barriers alone that wait for
      each other in a cycle wait for ever.)
    * If none does, the fences can be in an order that agrees with causality order. Two fences that change places were
      in a cycle. So the new order relates only what causality order related with the old one, and violates no more.
    """
    assert not allows(_LB_FENCES, [Axiom.COHERENCE])
    assert not allows(_LB_FENCES, [Axiom.FENCE_SC])
    assert allows(_LB_FENCES, [Axiom.COHERENCE, Axiom.FENCE_SC])


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("MP release, acquire", "st.release.gpu", "st.relaxed.gpu"),
        ("MP release, acquire", "st.release.gpu", "st.release.cta"),
        ("MP release, acquire", "ld.acquire.gpu", "ld.relaxed.gpu"),
        ("MP fences", "fence.acq_rel.gpu; st", "fence.acquire.gpu; st"),
        ("MP fences", "fence.acq_rel.gpu; ld", "fence.release.gpu; ld"),
        ("MP relaxed, then acquire", "ld.acquire.gpu c, f", "ld.acquire.gpu c, g"),
        ("SB sc", "fence.sc", "fence.acq_rel"),
        ("R sc", "fence.sc.gpu; st", "fence.sc.cta; st"),
        ("CoRR", "ld.relaxed.gpu a", "ld.weak a"),
        ("CoRR, told", "ld.relaxed.gpu a", "ld.weak a"),
        ("ISA2", "ld.acquire.gpu a", "ld.relaxed.gpu a"),
        ("bar", "barrier.sync 0; ld", "barrier.sync 1; ld"),
        ("release sequence", "atom.relaxed.gpu", "atom.relaxed.cta"),
        ("release sequence, own store", "st.relaxed.gpu f", "st.weak f"),
        ("the last of three", "atom.acq_rel.gpu.add c", "atom.acquire.gpu.add c"),
        ("atomicity", "atom.gpu.add a", "atom.cta.add a"),
        ("ring", "st.release.sys.v2", "st.relaxed.sys.v2"),
    ],
)
def test_what_is_weakened_is_allowed(name: str, old: str, new: str) -> None:
    weakened = _edited(TABLE[name], old, new)
    assert weakened != TABLE[name]
    assert not allows(TABLE[name])
    assert allows(weakened)


@pytest.mark.parametrize(
    ("old", "new"),
    [("st.relaxed", "st.release"), ("ld.relaxed", "ld.acquire"), ("fence.acq_rel", "fence.sc"), (".gpu", ".sys")],
)
def test_what_is_strengthened_stays_forbidden(old: str, new: str) -> None:
    for test in FORBIDDEN:
        assert not allows(_edited(test, old, new)), test.name


def test_scopes_that_hold_all_threads_are_alike() -> None:
    for test in TABLE.values():
        if not any("barrier" in thread for thread in test.threads):
            narrow = replace(_edited(_edited(test, ".sys", ".cta"), ".gpu", ".cta"), at=ONE_CTA)
            wide = replace(_edited(_edited(test, ".gpu", ".sys"), ".cta", ".sys"), at=CTAS)
            assert allows(narrow) == allows(wide), test.name
