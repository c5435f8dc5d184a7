"""Objects of pyverbs as the control path: on a pyverbs that stands in for the real one, over NICs in memory."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from tests.support.contract import Group, OpenGroup, TransportContract
from tests.support.fake_pyverbs import classes
from tests.support.memory_endpoints import open_endpoints
from tests.support.provider import provider_network as net
from tests.support.provider.provider_library import MemoryNetwork
from uccl_ep_serving.config import Settings
from uccl_ep_serving.errors import ConfigError, TransportError
from uccl_ep_serving.proxy.transport.verbs import bindings
from uccl_ep_serving.proxy.transport.verbs.device import open_device
from uccl_ep_serving.proxy.transport.verbs.library import VerbsLibrary
from uccl_ep_serving.proxy.transport.verbs.objects import AddressHandle, Path, ProtectionDomain


class PyverbsNetwork(MemoryNetwork):
    """NICs whose objects are made by a stand-in for pyverbs; the kinds of ``hidden`` show no struct."""

    def __init__(self, *arguments: Any, hidden: tuple[str, ...] = (), **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.hidden, self.ours = hidden, list[bindings._Objects]()

    def library(self, rank: int) -> VerbsLibrary:
        library = super().library(rank)
        self.ours.append(bindings._Objects(library, classes(library, self.hidden)))
        return library.extended(self.ours[-1].functions, {}, "pyverbs")


class TestContract(TransportContract):
    """The contract of every transport, over objects of pyverbs."""

    @pytest.fixture
    def open_group(self) -> OpenGroup:
        @contextlib.contextmanager
        def open_group(ranks: int, window_bytes: int) -> Iterator[Group]:
            network = PyverbsNetwork(ranks)
            with open_endpoints(network, ranks, window_bytes) as (group, _):
                assert all(one._made for one in network.ours)
                yield group
            assert not any(one._made for one in network.ours), "an object of pyverbs is left"

        return open_group


def test_a_queue_pair_signals_what_asks_for_it_and_no_more() -> None:
    """pyverbs' own default is a completion for every write."""
    network = PyverbsNetwork(2)
    with open_endpoints(network, 2, 1 << 16) as (_, endpoints):
        (link,) = endpoints[0]._rails[0].links[1]
        assert ctypes.c_int64.from_address(link.address + net.QP_SIGNAL_ALL).value == 0


def test_what_shows_no_struct_comes_from_the_library() -> None:
    network = PyverbsNetwork(2, hidden=("PD",))
    with open_endpoints(network, 2, 1 << 16):
        # device and completion queue are objects of pyverbs, and nothing that hangs on the domain is
        assert [len(one._made) for one in network.ours] == [2, 2]
    assert not +network.objects


def test_a_refusal_has_the_errno_that_pyverbs_gives() -> None:
    network = PyverbsNetwork(1)
    library = network.library(0)
    with open_device(library, "mem0") as context:
        network.refuse["ibv_alloc_pd"] = errno.ENOMEM
        with pytest.raises(TransportError, match="ulimit -l") as caught:
            ProtectionDomain(context)
    assert caught.value.errno == errno.ENOMEM


def test_an_address_handle_is_told_all_of_its_path(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    network = PyverbsNetwork(1)
    library = network.library(0)
    given = network.ours[0]._classes

    def ah(of: Any, attr: Any) -> Any:
        told.append(attr)
        raise OSError(errno.EHOSTUNREACH, "none")

    given.AH = ah
    path = Path(port=2, gid_index=3, gid=bytes(range(16)), traffic_class=106, service_level=3)
    with open_device(library, "mem0") as context, ProtectionDomain(context) as pd, pytest.raises(TransportError):
        AddressHandle(pd, path)
    (attr,) = told
    assert (attr.port_num, attr.sl, attr.is_global, attr.dlid) == (2, 3, 1, 0)
    assert (attr.gr.sgid_index, attr.gr.hop_limit, attr.gr.traffic_class) == (3, 255, 106)
    assert attr.gr.dgid == "0001:0203:0405:0607:0809:0a0b:0c0d:0e0f"


def test_a_forked_child_ends_nothing() -> None:
    network = PyverbsNetwork(1)
    context = open_device(network.library(0), "mem0")
    if (pid := os.fork()) == 0:
        os._exit(len(network.ours[0]._made))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert network.ours[0]._made
    context.close()
    assert not +network.objects


class TestStanding:
    @pytest.fixture(autouse=True)
    def anew(self) -> Iterator[None]:
        bindings._bindings.cache_clear()
        yield
        bindings._bindings.cache_clear()

    @pytest.fixture
    def absent(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "pyverbs", None)

    @pytest.mark.usefixtures("absent")
    def test_without_it_auto_takes_ctypes_and_who_demands_it_is_refused(self) -> None:
        library = MemoryNetwork(1).library(0)
        assert bindings.control_path(library, "auto") is library
        assert bindings.standing("auto") == "ctypes: pyverbs is not installed"
        with pytest.raises(ConfigError, match=r"UCCL_EP_VERBS=pyverbs: pyverbs is not installed\. Next step: apt-get"):
            bindings.control_path(library, "pyverbs")

    def test_another_layout_is_no_pyverbs_of_ours(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("pyverbs", "pyverbs.device", "pyverbs.pd"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        assert "does not match" in bindings.standing("auto")

    def test_where_it_is_there_its_import_leaves_logging_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        library = MemoryNetwork(1).library(0)
        for name, value in vars(classes(library)).items():
            module = sys.modules.get(f"pyverbs.{bindings._MODULES[name]}")
            if not isinstance(module, ModuleType) or not hasattr(module, "standing_in"):
                module = ModuleType(f"pyverbs.{bindings._MODULES[name]}")
                module.standing_in = True  # type: ignore[attr-defined]
                monkeypatch.setitem(sys.modules, module.__name__, module)
            setattr(module, name, value)
        monkeypatch.setitem(sys.modules, "pyverbs", ModuleType("pyverbs"))
        found = bindings.importlib.import_module

        def noisy(name: str) -> ModuleType:
            logging.basicConfig(level=logging.DEBUG, force=True)
            return found(name)

        monkeypatch.setattr(bindings.importlib, "import_module", noisy)
        before = list(logging.getLogger().handlers), logging.getLogger().level
        ours = bindings.control_path(library, Settings().verbs)
        assert (list(logging.getLogger().handlers), logging.getLogger().level) == before
        assert ours.name == "memory verbs with pyverbs"
        assert bindings.control_path(library, "ctypes") is library
