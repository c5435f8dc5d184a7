"""``roce`` over real verbs: the transport contract, faults of the network, order that is broken on purpose.

Runs where the machine has RDMA devices; ``make test-rdma`` boots a guest that has two soft-RoCE ones.
"""

from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import Iterator

import numpy as np
import pytest

from tests.support import device_endpoints
from tests.support.contract import Group, OpenGroup, Port, Traffic, TransportContract, pattern
from tests.support.device_endpoints import delayed, devices, netem, open_endpoints
from uccl_ep_serving.config import Settings
from uccl_ep_serving.protocol.context import ERROR_WORDS
from uccl_ep_serving.protocol.imm import IMM
from uccl_ep_serving.proxy import words
from uccl_ep_serving.proxy.loop import step
from uccl_ep_serving.proxy.state import ProxyState
from uccl_ep_serving.proxy.transport.base import ACCEPTED, ARRIVED, BUSY, DOWN, SENT
from uccl_ep_serving.proxy.transport.verbs.objects import AddressHandle, Path

pytestmark = [pytest.mark.rdma, pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(params=["ctypes", "pyverbs"], autouse=True)
def verbs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every test both ways: objects made through ctypes, and those of pyverbs."""
    if request.param == "pyverbs":
        # Debian's package, for the interpreter of the same version
        monkeypatch.syspath_prepend("/usr/lib/python3/dist-packages")
        pytest.importorskip("pyverbs.qp", reason="apt-get install python3-pyverbs")
    monkeypatch.setattr(device_endpoints, "VERBS", request.param)
    return str(request.param)


#: Acknowledgement timeout, 4.096 us * 2**n: under emulation a burst takes longer than production's 67 ms to be
#: answered, and what is sent again meanwhile delays it further. The short one is for idle peers.
PATIENT, SHORT = 18, 12


class TestRoceOnDevices(TransportContract):
    """The contract of every transport."""

    @pytest.fixture
    def open_group(self, request: pytest.FixtureRequest) -> OpenGroup:
        timeout = SHORT if {"vanished", "dropped"} & {*request.node.name.split("_")} else PATIENT

        @contextlib.contextmanager
        def open_group(ranks: int, window_bytes: int) -> Iterator[Group]:
            with open_endpoints(ranks, window_bytes, settings=Settings(nic_timeout=timeout)) as (group, _):
                yield group

        return open_group


def test_objects_are_whose_they_should_be(verbs: str) -> None:
    """Those of pyverbs hold the structs that the data path works on, address handles included."""
    with open_endpoints(2, 1 << 16) as (_, endpoints):
        rail = endpoints[0]._rails[0]
        path = Path(port=rail.port.number, gid_index=rail.gid.index, gid=rail.gid.raw)
        with AddressHandle(rail.pd, path) as handle:
            structs = {one.address for one in (rail.context, rail.pd, rail.cq, handle, *rail.links[1])}
            function = rail.context.library._functions["ibv_alloc_pd"]
            made = function.__self__._made if verbs == "pyverbs" else {}
            assert structs & made.keys() == (structs if verbs == "pyverbs" else set())


@pytest.mark.parametrize("qps", [1, 2])
@pytest.mark.parametrize(
    "words", [("loss", "1%"), ("duplicate", "2%"), ("corrupt", "1%"), ("delay", "2ms")], ids=lambda words: words[0]
)
def test_what_the_network_does_is_recovered(words: tuple[str, ...], qps: int) -> None:
    """Both directions at once, every byte checked; the acknowledgement timeout leaves room for lost packets."""
    with open_endpoints(2, 1 << 20, settings=Settings(nic_timeout=15, nic_qps=qps)) as (group, _), netem(*words):
        traffic = Traffic(group)
        for number in range(60):
            nbytes = (16, 1024, 7168)[number % 3]
            traffic.add(number % 2, 1 - number % 2, source=number * 8192, target=(64 + number) * 8192, nbytes=nbytes)
        traffic.run(seconds=120)
        traffic.settle(0.2)
        assert all(write.sent == 1 for write in traffic.writes)


def test_a_message_over_two_queue_pairs_is_not_published_early() -> None:
    """The last write of a message overtakes the first by 300 ms: its immediate is there, its message is not."""
    with open_endpoints(2, 1 << 20, settings=Settings(nic_qps=2)) as (group, endpoints):
        error = np.zeros(ERROR_WORDS, np.int64)
        settings = Settings(
            ring_slots=64,
            quantum=1 << 20,
            bytes_in_flight=1 << 20,
            peer_bytes_in_flight=1 << 20,
            writes_in_flight=64,
        )
        receiver = ProxyState(
            settings,
            rank=1,
            ranks=2,
            proxy=0,
            window=group.windows[1].ctypes.data,
            window_bytes=1 << 20,
            error=error.ctypes.data,
            endpoints=[endpoints[1]],
            route=[0, -1],
        )
        sender = Port(group, 0)
        group.windows[0][:8192] = pattern(1, 8192)
        first = endpoints[1]._rails[0].links[0][0].number
        with delayed("v0", first, 300):
            start = time.monotonic()
            for number in range(2):
                imm = number << IMM["sequence"].shift | (number == 1) << IMM["last"].shift | 8 << IMM["stream"].shift
                assert sender.post(1, number * 4096, number * 4096, 4096, imm, number) == ACCEPTED
            sender.flush()
            overtaken = published = 0.0
            sent = 0
            while not published or sent < 2:
                assert step(receiver.address) >= 0
                now = time.monotonic() - start
                if not overtaken and receiver.counters[_counter("held_back")]:
                    overtaken = now
                if receiver.arrived[0, 8]:
                    published = published or now
                    assert np.array_equal(group.windows[1][:8192], pattern(1, 8192)), "published before its data"
                sent += sum(event.kind == SENT for event in sender.poll())
                assert now < 10, "the message never came"
        print(f"immediate of the last write after {overtaken * 1e3:.0f} ms, message after {published * 1e3:.0f} ms")
        assert 0 < overtaken < 0.25
        assert published >= 0.29
        assert not error.any()


def _counter(name: str) -> int:
    return words.COUNTER_NAMES.index(name)


def test_a_receiver_that_stands_still_costs_no_retries() -> None:
    """Senders wait for credits; the NICs count not one receiver-not-ready."""
    with open_endpoints(2, 1 << 16) as (group, _):
        sender, receiver = Port(group, 0), Port(group, 1)
        posted, deadline = 0, time.monotonic() + 60
        while True:
            status = sender.post(1, 0, 0, 64, posted & 0xFFF | 8 << 12, posted)
            sender.flush()
            sender.poll()
            posted += status == ACCEPTED
            if status == BUSY and posted >= 1024:
                break
            assert time.monotonic() < deadline, posted
        before = _not_ready()
        time.sleep(0.5)
        arrived = 0
        while arrived < posted:
            arrived += sum(event.kind == ARRIVED for event in receiver.poll())
            assert time.monotonic() < deadline
        assert _not_ready() == before == 0


def _not_ready() -> int:
    """Receiver-not-ready answers that soft-RoCE has sent."""
    total = 0
    for name in devices():
        for port in (1,):
            with (
                contextlib.suppress(OSError),
                open(f"/sys/class/infiniband/{name}/ports/{port}/hw_counters/rcvd_rnr_err") as file,
            ):
                total += int(file.read())
    return total


def test_a_route_that_breaks_ends_in_a_named_error_and_a_new_group_works() -> None:
    """Everything is lost: completion status 12 with its causes on either side; afterwards the same process goes on."""
    with open_endpoints(2, 1 << 16, settings=Settings(nic_timeout=10)) as (group, endpoints):
        ports = [Port(group, rank) for rank in range(2)]
        with netem("loss", "100%"):
            assert ports[0].post(1, 0, 0, 64, 8 << 12, 0) == ACCEPTED
            ports[0].flush()
            found: dict[int, int] = {}
            deadline = time.monotonic() + 30
            while len(found) < 2:
                for port in ports:
                    for event in port.poll():
                        if event.kind == DOWN:
                            found[port.rank] = event.status
                assert time.monotonic() < deadline, found
        assert found == {0: errno.ETIMEDOUT, 1: errno.ETIMEDOUT}
        words = endpoints[0].describe(1)
        assert "completion status 12" in words
        assert "no acknowledgement from the peer" in words
    with open_endpoints(2, 1 << 16) as (group, _):
        traffic = Traffic(group)
        traffic.add(0, 1, source=0, target=0, nbytes=64)
        traffic.run()
