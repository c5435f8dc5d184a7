"""How ranks find each other: addresses, stores, disagreement; every wait is bounded, named and can be interrupted."""

from __future__ import annotations

import datetime
import signal
import threading
import time
from collections.abc import Iterator
from importlib import metadata
from types import FrameType
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
import torch
import torch.distributed as dist

from tests.support.control_threads import ThreadExchange, in_threads
from uccl_ep_serving.config import Settings
from uccl_ep_serving.control_plane import bootstrap
from uccl_ep_serving.control_plane.bootstrap import StoreExchange, TorchExchange, introduce
from uccl_ep_serving.errors import BootstrapError, ConfigError
from uccl_ep_serving.protocol.message import FORMAT_VERSION


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


def test_a_rank_that_listens_on_loopback_is_refused_by_other_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "_host_identity", lambda: str(threading.get_ident()))

    def body(exchange: ThreadExchange) -> Any:
        address = "127.0.0.1" if exchange.rank == 0 else "10.0.0.1"
        introduce(exchange, Settings(), socket_name="s", address=address, port=1, chosen="lo, a guess", sizes={})

    zero, one = in_threads(2, body)
    for error in (zero, one):
        assert isinstance(error, BootstrapError)
        assert "rank 0 on" in str(error)
        assert "listens on 127.0.0.1 (lo, a guess)" in str(error)
        assert "UCCL_EP_SOCKET_IFNAME" in str(error)


def test_two_hosts_with_one_address_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both have chosen their bridge: each would connect to itself."""

    def body(exchange: ThreadExchange) -> Any:
        exchange = Altered(exchange, host=str(exchange.rank), host_name=f"node{exchange.rank}")
        introduce(exchange, Settings(), socket_name="s", address="172.17.0.1", port=1, chosen="docker0", sizes={})

    for error in in_threads(2, body):
        assert isinstance(error, BootstrapError)
        assert "rank 1 on node1 listens on 172.17.0.1 (docker0), and so does rank 0 on node0 (docker0)" in str(error)


def test_one_machine_that_counts_as_several_hosts_may_have_one_address() -> None:
    """As in a sandbox that hides the boot id."""

    def body(exchange: ThreadExchange) -> int:
        exchange = Altered(exchange, host=str(exchange.rank))
        known = introduce(exchange, Settings(), socket_name="s", address="10.0.0.1", port=1, sizes={})
        return len(known.cards)

    assert in_threads(2, body) == [2, 2]


def test_a_sandbox_that_hides_the_boot_id_makes_every_rank_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    def hidden(self: object) -> str:
        raise FileNotFoundError

    assert bootstrap._host_identity() == bootstrap._host_identity()
    monkeypatch.setattr(bootstrap.Path, "read_text", hidden)
    assert bootstrap._host_identity() != bootstrap._host_identity()


@pytest.mark.parametrize(
    ("field", "words"), [("version", "package version: rank 0 has"), ("formats", "wire formats: rank 0 has")]
)
def test_ranks_of_another_version_are_refused_on_every_rank(field: str, words: str) -> None:
    """Rank 1's card is what another version of the package would send."""

    def body(exchange: ThreadExchange) -> None:
        if exchange.rank == 1:
            exchange = Altered(exchange, **{field: -1 if field == "formats" else "another"})
        introduce(exchange, Settings(), socket_name="s", address="127.0.0.1", port=1, sizes={})

    for error in in_threads(3, body):
        assert isinstance(error, ConfigError), error
        assert words in str(error)
        assert repr({"version": metadata.version("uccl_ep_serving"), "formats": FORMAT_VERSION}[field]) in str(error)
        assert "rank 1 on" in str(error)
        assert "has 'another'" in str(error) or "has -1" in str(error)


def test_an_exchange_that_breaks_down_hides_no_reason(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        rank, size = 1, 2

        def all_gather(self, payload: bytes) -> list[bytes]:
            raise ConnectionResetError("the launcher is gone")

    with pytest.raises(ConfigError, match="heap"), bootstrap.refusing(Broken()):
        raise ConfigError("heap_bytes is negative")
    assert "rank 1 could not tell the others so: ConnectionResetError: the launcher is gone" in caplog.text


def test_a_card_that_cannot_be_read_is_taken_for_another_version() -> None:
    def body(exchange: ThreadExchange) -> None:
        if exchange.rank == 1:
            exchange = Altered(exchange, pid="another")
        introduce(exchange, Settings(), socket_name="s", address="127.0.0.1", port=1, sizes={})

    for error in in_threads(2, body):
        assert isinstance(error, BootstrapError), error
        assert "different versions of uccl_ep_serving" in str(error)


class Altered(ThreadExchange):
    """Sends its rank's card with some fields changed."""

    def __init__(self, exchange: ThreadExchange, **fields: Any) -> None:
        super().__init__(exchange.rank, exchange._barrier, exchange._board)
        self._fields = fields

    def all_gather(self, payload: bytes) -> list[bytes]:
        return super().all_gather(msgspec.msgpack.encode(msgspec.msgpack.decode(payload) | self._fields))


def a_group(rank: int, port: int) -> dist.ProcessGroup:
    """Of two ranks, which ``torch.distributed`` itself does not know."""
    store = dist.TCPStore("localhost", port, is_master=False)
    gloo = dist.ProcessGroupGloo(store, rank, 2, datetime.timedelta(seconds=20))
    group = dist.ProcessGroup(store, rank, 2)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    return group


def test_a_group_outside_of_torchs_world_will_do() -> None:
    """As engines make them that change size while they serve."""
    server = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)

    def body(exchange: ThreadExchange) -> tuple[int, int, str, list[bytes]]:
        rode = TorchExchange(a_group(exchange.rank, server.port))
        assert rode.all_gather(b"") == [b"", b""]
        return rode.rank, rode.size, rode.store_host, rode.all_gather(b"x" * (1 + 9 * exchange.rank))

    assert not dist.is_initialized()
    assert in_threads(2, body) == [(rank, 2, "localhost", [b"x", b"x" * 10]) for rank in range(2)]


def test_a_group_in_which_a_rank_was_interrupted_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process would end in gloo, which takes what was left for an answer of another length."""
    server = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    group: list[dist.ProcessGroup] = []

    def body(exchange: ThreadExchange) -> None:
        group.append(a_group(exchange.rank, server.port))

    in_threads(2, body)
    monkeypatch.setattr(bootstrap.time, "sleep", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        TorchExchange(group[0]).all_gather(b"x")
    with pytest.raises(BootstrapError, match=r"was interrupted while the ranks opened it.*Next step: make it again"):
        TorchExchange(group[0]).all_gather(b"x")


def test_a_store_exchange_that_was_interrupted_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that read the part of the call before would take it for one of the next."""
    exchange = StoreExchange(dist.HashStore(), 0, 2)
    with monkeypatch.context() as patch:
        patch.setattr(bootstrap.time, "sleep", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            exchange.all_gather(b"x")
    with pytest.raises(BootstrapError, match=r"was interrupted. Next step: make another StoreExchange, with a new"):
        exchange.all_gather(b"x")
