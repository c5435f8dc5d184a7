"""Which way leads to a peer: every combination of facts and settings, and the words that go with it."""

from __future__ import annotations

from typing import Any

import pytest

from uccl_ep_serving.config import Settings
from uccl_ep_serving.errors import ConfigError
from uccl_ep_serving.proxy.transport.select import DIRECT, SHM, TCP, choose, preview

MAPPED = {"mapped": True, "same_host": True}
UNMAPPED = {"mapped": False, "same_host": True, "why_not": "memfd of another user namespace"}
LOCAL = {"mapped": False, "same_host": True}
REMOTE = {"mapped": False, "same_host": False}


@pytest.mark.parametrize(
    ("facts", "transport", "direct", "taken", "words"),
    [
        (MAPPED, "auto", True, DIRECT, "UCCL_EP_DIRECT=1"),
        (MAPPED, "tcp", True, DIRECT, "UCCL_EP_DIRECT=1"),
        (MAPPED, "auto", False, SHM, "UCCL_EP_DIRECT=0"),
        (MAPPED, "shm", False, SHM, "UCCL_EP_TRANSPORT=shm"),
        (MAPPED, "tcp", False, TCP, "UCCL_EP_TRANSPORT=tcp"),
        (UNMAPPED, "auto", True, TCP, "another user namespace"),
        (UNMAPPED, "tcp", True, TCP, "UCCL_EP_TRANSPORT=tcp"),
        (LOCAL, "auto", True, TCP, "cannot be mapped"),
        (REMOTE, "auto", True, TCP, "another host"),
        (REMOTE, "auto", False, TCP, "another host"),
    ],
)
def test_choice(facts: dict[str, Any], transport: str, direct: bool, taken: str, words: str) -> None:
    choice = choose(Settings(transport=transport, direct=direct), **facts)
    assert choice.transport == taken
    assert choice.reason.startswith(taken)
    assert words in choice.reason


@pytest.mark.parametrize(("facts", "words"), [(UNMAPPED, "another user namespace"), (REMOTE, "another host")])
def test_shm_that_cannot_be(facts: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=rf"shm .*{words}.*UCCL_EP_TRANSPORT=auto"):
        choose(Settings(transport="shm"), **facts)


def test_preview_says_what_choose_says() -> None:
    assert [answer.split()[0] for _, answer in preview(Settings())] == ["direct", "tcp", "tcp"]
    assert [answer.split()[0] for _, answer in preview(Settings(direct=False))] == ["shm", "tcp", "tcp"]
    forced = list(preview(Settings(transport="shm", direct=False)))
    assert [answer.split()[0] for _, answer in forced] == ["shm", "impossible:", "impossible:"]
    assert "another host" in forced[2][1]
