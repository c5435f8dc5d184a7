"""The control path over the in-memory provider: objects, their order of ending, refusals in words."""

from __future__ import annotations

import ctypes
import errno
import os

import numpy as np
import pytest

from tests.support.provider.provider_library import MemoryNetwork
from uccl_ep_serving.errors import ConfigError, TransportError
from uccl_ep_serving.proxy.transport.verbs import codes, library
from uccl_ep_serving.proxy.transport.verbs.abi import CONTEXT, QP
from uccl_ep_serving.proxy.transport.verbs.device import Context, open_device
from uccl_ep_serving.proxy.transport.verbs.library import bind
from uccl_ep_serving.proxy.transport.verbs.objects import (
    CompletionQueue,
    MemoryRegion,
    Path,
    ProtectionDomain,
    QueuePair,
)

ACCESS = codes.ACCESS_LOCAL_WRITE | codes.ACCESS_REMOTE_WRITE


@pytest.fixture
def network() -> MemoryNetwork:
    return MemoryNetwork(2)


def device(network: MemoryNetwork, rank: int = 0) -> Context:
    return open_device(network.library(rank), f"mem{rank}")


def test_devices_are_described(network: MemoryNetwork) -> None:
    with device(network, 1) as context:
        assert (context.limits.vendor, context.limits.firmware, context.limits.ports) == (0xFFFFFF, "1.0", 1)
        port = context.port(1)
        assert (port.link_layer, port.state, port.mtu) == (codes.LINK_ETHERNET, codes.PORT_ACTIVE, 3)
        assert [str(gid.address) for gid in context.gids(1)] == ["fe80::2", "10.0.0.2"]
    assert not +network.objects
    with pytest.raises(ConfigError, match="no RDMA device 'mlx5_0'; memory verbs sees: mem0"):
        open_device(network.library(0), "mlx5_0")


def test_whoever_is_closed_first_takes_its_parts_along(network: MemoryNetwork) -> None:
    """Every order of closing ends with nothing left; the provider refuses to destroy what still has parts."""
    memory = np.zeros(4096, np.uint8)
    for first in range(5):
        context = device(network)
        pd = ProtectionDomain(context)
        mr = MemoryRegion(pd, memory.ctypes.data, memory.nbytes, ACCESS)
        cq = CompletionQueue(context, 16)
        qp = QueuePair(pd, cq, send_depth=4, receive_depth=4)
        assert +network.objects == {"context": 1, "pd": 1, "mr": 1, "cq": 1, "qp": 1}
        objects = [context, pd, mr, cq, qp]
        objects[first].close()
        objects[first].close()
        context.close()
        assert not +network.objects
        assert all(part.address == 0 for part in objects)


@pytest.mark.parametrize("call", ["ibv_alloc_pd", "ibv_reg_mr", "ibv_create_cq", "ibv_create_qp", "ibv_modify_qp"])
def test_a_refused_call_is_named_and_leaves_nothing(network: MemoryNetwork, call: str) -> None:
    memory = np.zeros(4096, np.uint8)
    network.refuse[call] = errno.ENOMEM

    def make_everything() -> None:
        with device(network) as context, ProtectionDomain(context) as pd, CompletionQueue(context, 16) as cq:
            MemoryRegion(pd, memory.ctypes.data, memory.nbytes, ACCESS)
            QueuePair(pd, cq, send_depth=4, receive_depth=4).initialise(1)

    with pytest.raises(TransportError, match=rf"mem0: .*{call}.* errno 12 .*ulimit -l") as caught:
        make_everything()
    assert (caught.value.device, caught.value.errno) == ("mem0", errno.ENOMEM)
    assert not +network.objects


def test_a_struct_that_lies_otherwise_is_noticed_before_it_is_used(
    network: MemoryNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library that has a word more before ``state``: everything behind it is somewhere else."""
    create = network.new_qp

    def shifted(*arguments: int, **options: int) -> int:
        qp = create(*arguments, **options)
        ctypes.memmove(qp + QP["state"] + 4, qp + QP["state"], 8)
        return qp

    monkeypatch.setattr(network, "new_qp", shifted)
    with device(network) as context, ProtectionDomain(context) as pd, CompletionQueue(context, 16) as cq:
        with pytest.raises(TransportError, match=r"ibv_qp\.qp_type of memory verbs is 0x0 where 0x2 .*unknown way"):
            QueuePair(pd, cq, send_depth=4, receive_depth=4)
        assert network.objects["qp"] == 0
    assert not +network.objects


def test_a_queue_pair_goes_through_its_states(network: MemoryNetwork) -> None:
    with device(network) as context, ProtectionDomain(context) as pd, CompletionQueue(context, 16) as cq:
        qp = QueuePair(pd, cq, send_depth=4, receive_depth=4)
        qp.initialise(1)
        gid = context.gids(1)[1]
        qp.connect(Path(port=1, gid_index=gid.index, gid=gid.raw), qp.number, "connecting to itself")
        assert QP.get(qp.address, "state") == codes.QPS_RTS
        with pytest.raises(TransportError, match="preparing a queue pair on port 1"):
            qp.initialise(1)


def test_a_forked_child_lets_go_of_the_device(network: MemoryNetwork) -> None:
    """The kernel keeps queue pairs alive as long as any process holds the device's descriptor."""
    read, write = os.pipe()
    with device(network) as context:
        CONTEXT.set(context.address, "cmd_fd", write)
        child = os.fork()
        if child == 0:
            os._exit(0 if _closed(write) else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert not _closed(write)
    os.close(read)
    os.close(write)


def _closed(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return True
    return False


def test_a_missing_library_is_named_with_its_packages() -> None:
    with pytest.raises(TransportError, match=r"libnothing\.so\.9 cannot be loaded.*apt-get install ibverbs-providers"):
        bind("libnothing.so.9", {}, (), "nothing")
    with pytest.raises(TransportError, match=r"libc\.so\.6 has no ibv_no_such: release 99 is needed"):
        bind("libc.so.6", {"getpid": "i:", "ibv_no_such": "i:"}, (), "release 99")
    functions, addresses = bind("libc.so.6", {"getpid": "i:", "ibv_no_such": "i:"}, {"ibv_no_such"}, "")
    assert functions["getpid"]() == os.getpid()
    assert list(addresses) == ["getpid"]


def test_completion_statuses_have_words_and_causes() -> None:
    assert "no acknowledgement from the peer" in codes.completion_words(12)
    assert "vendor code 0x81" in codes.completion_words(10, 0x81)
    assert "does not name" in codes.completion_words(99)
    assert codes.event_words(8) == "device fatal error"
    assert codes.event_words(77) == "event 77"


def test_the_library_is_told_of_huge_pages_before_it_guards_memory_from_children(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a kernel that does not do so itself it would ask for a part of one, and every such window be refused."""
    told = []
    monkeypatch.delenv("RDMAV_HUGEPAGES_SAFE", raising=False)
    functions = {"ibv_fork_init": lambda: told.append(os.environ["RDMAV_HUGEPAGES_SAFE"]) or 0}
    monkeypatch.setattr(library, "bind", lambda *arguments: (functions, {}))
    library.load_libibverbs.__wrapped__()
    assert told == ["1"]
