"""Which way leads to a peer: every combination of facts and settings, and the words that go with it."""

from __future__ import annotations

from typing import Any

import pytest

from uccl_ep_serving.config import Settings
from uccl_ep_serving.errors import ConfigError
from uccl_ep_serving.proxy.transport.select import DIRECT, EFA, ROCE, SHM, TCP, Offer, choose, preview

MAPPED = {"mapped": True, "same_host": True}
UNMAPPED = {"mapped": False, "same_host": True}
REMOTE = {"mapped": False, "same_host": False}


@pytest.mark.parametrize(
    ("facts", "transport", "direct", "taken", "words"),
    [
        (MAPPED, "auto", True, DIRECT, "UCCL_EP_DIRECT=1"),
        (MAPPED, "tcp", True, DIRECT, "UCCL_EP_DIRECT=1"),
        (MAPPED, "auto", False, SHM, "UCCL_EP_DIRECT=0"),
        (MAPPED, "shm", False, SHM, "UCCL_EP_TRANSPORT=shm"),
        (MAPPED, "tcp", False, TCP, "UCCL_EP_TRANSPORT=tcp"),
        (UNMAPPED, "auto", True, TCP, "cannot be mapped"),
        (UNMAPPED, "tcp", True, TCP, "UCCL_EP_TRANSPORT=tcp"),
        (REMOTE, "auto", True, TCP, "another host"),
        (REMOTE, "auto", False, TCP, "another host"),
    ],
)
def test_choice(facts: dict[str, Any], transport: str, direct: bool, taken: str, words: str) -> None:
    choice = choose(Settings(transport=transport, direct=direct), **facts)
    assert choice.transport == taken
    assert choice.reason.startswith(taken)
    assert words in choice.reason


@pytest.mark.parametrize(("facts", "words"), [(UNMAPPED, "cannot be mapped"), (REMOTE, "another host")])
def test_shm_that_cannot_be(facts: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=rf"shm .*{words}.*UCCL_EP_TRANSPORT=auto"):
        choose(Settings(transport="shm"), **facts)


def test_preview_says_what_choose_says() -> None:
    assert [answer.split()[0] for _, answer in preview(Settings())] == ["direct", "tcp", "tcp"]
    assert [answer.split()[0] for _, answer in preview(Settings(direct=False))] == ["shm", "tcp", "tcp"]
    forced = list(preview(Settings(transport="shm", direct=False)))
    assert [answer.split()[0] for _, answer in forced] == ["shm", "impossible:", "impossible:"]
    assert "another host" in forced[2][1]


EFA_NICS = {"efa": Offer(("rdmap79s0",), "EFA", "", True)}
ETHERNET = {"roce": Offer(("bnxt_re0",), "Ethernet", "", True)}
INFINIBAND = {"roce": Offer(("mlx5_0",), "InfiniBand", "", True)}
OLD_EFA = {"efa": Offer((), "", "rdmap79s0 offers no RDMA write", True, unused=True)}
SOFT_ROCE = {"roce": Offer((), "", "rxe0: a software device", True)}
NAMED = {"roce": Offer((), "", "mlx5_0: no active port (UCCL_EP_NICS names mlx5_0)", True, asked="UCCL_EP_NICS")}


@pytest.mark.parametrize(
    ("transport", "mine", "theirs", "taken", "words"),
    [
        ("auto", EFA_NICS, EFA_NICS, EFA, "another host, and both ranks have EFA NICs"),
        ("auto", ETHERNET, ETHERNET, ROCE, "both ranks have Ethernet NICs"),
        ("auto", EFA_NICS | ETHERNET, ETHERNET | EFA_NICS, EFA, "EFA NICs"),
        ("auto", EFA_NICS | ETHERNET, ETHERNET, ROCE, "Ethernet NICs"),
        ("auto", EFA_NICS, ETHERNET, TCP, "not efa: the peer: no device; not roce: this rank: no device"),
        ("auto", ETHERNET, INFINIBAND, TCP, "this rank's NICs are on Ethernet, the peer's on InfiniBand"),
        ("auto", OLD_EFA, EFA_NICS, TCP, "not efa: this rank: rdmap79s0 offers no RDMA write"),
        ("auto", EFA_NICS, OLD_EFA, TCP, "not efa: the peer: rdmap79s0 offers no RDMA write"),
        ("auto", {}, {}, TCP, "(it is on another host)"),
        ("tcp", EFA_NICS, EFA_NICS, TCP, "UCCL_EP_TRANSPORT=tcp"),
        ("efa", EFA_NICS, EFA_NICS, EFA, "UCCL_EP_TRANSPORT=efa"),
        ("roce", ETHERNET, ETHERNET, ROCE, "UCCL_EP_TRANSPORT=roce"),
    ],
)
def test_choice_with_nics(
    transport: str, mine: dict[str, Offer], theirs: dict[str, Offer], taken: str, words: str
) -> None:
    settings = Settings(transport=transport)
    choice = choose(settings, mapped=False, same_host=False, mine=mine, theirs=theirs)
    assert (choice.transport, choice.reason.split()[0]) == (taken, taken)
    assert words in choice.reason
    # The peer chooses the same: the facts are symmetric.
    assert choose(settings, mapped=False, same_host=False, mine=theirs, theirs=mine).transport == taken


@pytest.mark.parametrize(
    ("transport", "mine", "theirs", "words"),
    [
        ("efa", {}, EFA_NICS, "this rank: no device"),
        ("efa", EFA_NICS, {}, "the peer: no device"),
        ("efa", OLD_EFA, EFA_NICS, "this rank: rdmap79s0 offers no RDMA write"),
        ("roce", ETHERNET, INFINIBAND, "Ethernet, the peer's on InfiniBand"),
    ],
)
def test_nics_that_cannot_be_had(transport: str, mine: dict[str, Offer], theirs: dict[str, Offer], words: str) -> None:
    for mapped in (False, True):
        with pytest.raises(ConfigError, match=rf"{transport} cannot reach a peer: .*{words}.*UCCL_EP_TRANSPORT=auto"):
            choose(Settings(transport=transport, direct=False), mapped=mapped, mine=mine, theirs=theirs)


@pytest.mark.parametrize(
    ("mine", "theirs", "words"),
    [
        (OLD_EFA, EFA_NICS, "not efa: this rank: rdmap79s0 offers no RDMA write. Next step"),
        (EFA_NICS, OLD_EFA, "not efa: the peer: rdmap79s0 offers no RDMA write"),
        (OLD_EFA, OLD_EFA, "not efa: this rank"),
        (EFA_NICS, {}, "not efa: the peer: no device"),
        (ETHERNET, INFINIBAND, "on Ethernet, the peer's on InfiniBand"),
        (SOFT_ROCE, SOFT_ROCE, ""),
        ({}, {}, ""),
    ],
)
def test_nics_that_are_there_and_are_not_used_are_a_warning(
    mine: dict[str, Offer], theirs: dict[str, Offer], words: str
) -> None:
    for ours, other in ((mine, theirs), (theirs, mine)):
        choice = choose(Settings(), mapped=False, same_host=False, mine=ours, theirs=other)
        assert choice.transport == TCP
        assert bool(choice.warning) == bool(words)
    assert words in choose(Settings(), mapped=False, same_host=False, mine=mine, theirs=theirs).warning
    # who wants tcp, and who needs no NIC, is not told
    assert not choose(Settings(transport="tcp"), mapped=False, mine=mine, theirs=theirs).warning
    assert not choose(Settings(), mapped=True, mine=mine, theirs=theirs).warning


def test_nics_that_were_asked_for_by_name_are_refused_on_both_ranks() -> None:
    for mine, theirs, who in ((NAMED, ETHERNET, "this rank"), (ETHERNET, NAMED, "the peer"), (NAMED, {}, "this rank")):
        with pytest.raises(
            ConfigError,
            match=rf"UCCL_EP_NICS asks for NICs that cannot be used: {who}: mlx5_0: no active port.*unset UCCL",
        ):
            choose(Settings(), mapped=False, same_host=False, mine=mine, theirs=theirs)
    assert choose(Settings(), mapped=True, mine=NAMED, theirs=NAMED).transport == DIRECT
    assert choose(Settings(transport="tcp"), mapped=False, mine=NAMED, theirs=NAMED).transport == TCP


def test_a_mapped_peer_needs_no_nic() -> None:
    for settings, taken in ((Settings(), DIRECT), (Settings(direct=False), SHM), (Settings(transport="efa"), DIRECT)):
        assert choose(settings, mapped=True, mine=EFA_NICS, theirs=EFA_NICS).transport == taken


def test_preview_with_nics() -> None:
    answers = [answer.split()[0] for _, answer in preview(Settings(), EFA_NICS)]
    assert answers == ["direct", "efa", "efa"]
