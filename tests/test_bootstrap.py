"""How ranks find each other: addresses, stores, disagreement; every wait is bounded, named and can be interrupted."""

from __future__ import annotations

import datetime
import signal
import socket
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest
import torch.distributed as dist
from test_control import ThreadExchange, in_threads

from uccl_ep_serving import bootstrap
from uccl_ep_serving.bootstrap import StoreExchange, introduce, local_host
from uccl_ep_serving.config import Settings
from uccl_ep_serving.errors import BootstrapError


@pytest.fixture
def ctrl_c_soon() -> Iterator[None]:
    """KeyboardInterrupt in the main thread after 0.3 s, as soon as Python lets it through."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    # and again, should the first one fall into a destructor, which swallows it
    signal.setitimer(signal.ITIMER_REAL, 0.3, 0.3)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def _store(seconds: float) -> dist.HashStore:
    store = dist.HashStore()
    store.set_timeout(datetime.timedelta(seconds=seconds))
    return store


def test_the_rank_that_does_not_reach_the_store_is_named() -> None:
    store = _store(0.3)
    dist.PrefixStore("uccl_ep", store).set("1/1", "")
    with pytest.raises(BootstrapError, match=r"rank 2 of 3 has not reached the store within 0\.3 s"):
        StoreExchange(store, 0, 3).all_gather(b"zero")


def test_ctrl_c_ends_a_wait_for_the_store(ctrl_c_soon: None) -> None:
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        StoreExchange(_store(20), 0, 2).all_gather(b"zero")
    signal.setitimer(signal.ITIMER_REAL, 0)
    assert time.monotonic() - start < 2


def test_a_master_whose_name_is_loopback_here_does_not_make_this_rank_unreachable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On Debian the master's own name resolves to 127.0.1.1 on the master itself."""
    monkeypatch.setattr(bootstrap, "_addresses", lambda interface: ["10.1.2.3"])
    found = (socket.AF_INET, socket.SOCK_DGRAM, 0, "", ("127.0.1.1", 9))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: [found])
    assert local_host(Settings.from_environment({"MASTER_ADDR": "node0"})) == "10.1.2.3"
    assert local_host(Settings.from_environment({"MASTER_ADDR": "127.0.0.1"})) == "127.0.0.1"


def test_a_rank_that_listens_on_loopback_is_refused_by_other_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "_host_identity", lambda: str(threading.get_ident()))

    def body(exchange: ThreadExchange) -> Any:
        address = "127.0.0.1" if exchange.rank == 0 else "10.0.0.1"
        introduce(exchange, Settings(), socket_name="s", address=address, port=1, sizes={})

    zero, one = in_threads(2, body)
    for error in (zero, one):
        assert isinstance(error, BootstrapError)
        assert "rank 0 on" in str(error)
        assert "UCCL_EP_SOCKET_IFNAME" in str(error)


def test_a_sandbox_that_hides_the_boot_id_makes_every_rank_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    def hidden(self: object) -> str:
        raise FileNotFoundError

    assert bootstrap._host_identity() == bootstrap._host_identity()
    monkeypatch.setattr(bootstrap.Path, "read_text", hidden)
    assert bootstrap._host_identity() != bootstrap._host_identity()
