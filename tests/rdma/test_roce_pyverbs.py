"""A peer written with pyverbs, which shares no code with the transport but the format of addresses and immediates."""

from __future__ import annotations

import socket
import sys
import time

import numpy as np
import pytest

from tests.support.contract import Group, Port, pattern
from tests.support.device_endpoints import MAX_WRITE, devices
from uccl_ep_serving.config import Settings
from uccl_ep_serving.preflight.pyverbs_peer import PyverbsPeer
from uccl_ep_serving.proxy.transport.base import ACCEPTED, ARRIVED, SENT
from uccl_ep_serving.proxy.transport.nic.roce import NicPort, RoceEndpoint

# Debian's package, for the interpreter of the same version
sys.path.append("/usr/lib/python3/dist-packages")
pytestmark = [pytest.mark.rdma, pytest.mark.slow, pytest.mark.timeout(300)]

WINDOW = 1 << 16
ROUNDS = 32


def test_a_pyverbs_program_receives_what_we_send_and_sends_what_we_receive() -> None:
    window = np.zeros(WINDOW, np.uint8)
    names = devices()
    ours = RoceEndpoint(
        0, 2, 0, window=window.ctypes.data, window_bytes=WINDOW, peers=[1], settings=Settings(),
        nics=[NicPort(names[0])],
        max_write=MAX_WRITE,
    )  # fmt: skip
    try:
        # the devices' tables are alike
        pytest.importorskip("pyverbs.enums", reason="apt-get install python3-pyverbs")
        peer = PyverbsPeer(names[-1], ours._rails[0].gid.index, WINDOW)
        peer.connect(ours.address())
        ours.connect([None, peer.address()], time.monotonic() + 5)
        ours.established()
        port = Port(Group([ours], [window], lambda rank: None), 0)
        deadline = time.monotonic() + 120
        for number in range(ROUNDS):
            place, nbytes = number % 8 * 2048, 16 * (1 + number * 37 % 128)
            there, here = pattern(number, nbytes), pattern(1000 + number, nbytes)
            window[place : place + nbytes] = there
            assert port.post(1, place, 32768 + place, nbytes, number, number) == ACCEPTED
            port.flush()
            peer.window.write(here.tobytes(), nbytes, place)
            peer.write(place, nbytes, 32768 + place, 1 << 20 | number)
            seen: set[str] = set()
            while len(seen) < 4:
                for event in port.poll():
                    if event.kind == SENT:
                        assert event.value == number
                        seen.add("our write completed")
                    elif event.kind == ARRIVED:
                        assert (event.value, event.peer, event.status) == (1 << 20 | number, 1, nbytes)
                        assert np.array_equal(window[32768 + place : 32768 + place + nbytes], here)
                        seen.add("its write arrived")
                for entry in peer.poll():
                    if entry.opcode == peer.enums.IBV_WC_RECV_RDMA_WITH_IMM:
                        assert socket.ntohl(entry.imm_data) == number
                        assert peer.window.read(nbytes, 32768 + place) == there.tobytes()
                        seen.add("our write arrived")
                    else:
                        seen.add("its write completed")
                assert time.monotonic() < deadline, (number, seen)
    finally:
        ours.close()
