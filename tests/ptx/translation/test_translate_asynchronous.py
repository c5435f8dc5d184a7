"""Bulk copies and mbarriers: the events that they are, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ptx.translation.event import SHARED
from tests.ptx.translation.host_code import Kernel
from tests.ptx.translation.instructions import assemble, kernel_text, run_threads
from tests.ptx.translation.operands import PtxError

BEFORE = ".shared .align 8 .b8 fixed[40];\n.extern .shared .align 128 .b8 dynamic[];"
REGISTERS = """
.reg .b32 %s, %n, %d; .reg .b64 %g, %w; .reg .pred %p;
mov.b32 %s, 64; mov.b64 %g, 4096; mov.b32 %n, 32; mov.b64 %w, 0x100000010;
"""
LOAD = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
STORE = "cp.async.bulk.global.shared::cta.bulk_group"

#: Instruction, how many results it has, its operands; addresses with what is added to them.
EVENTS = [
    (f"{LOAD} [%s+16], [%g+32], %n, [%s+8];", 0, [80, 4128, 32, 72]),
    (f"{LOAD.replace('cluster', 'cta')} [dynamic], [%g], 16, [fixed+8];", 0, [128, 4096, 16, 8]),
    (f"{STORE} [%g], [%s], %n;", 0, [4096, 64, 32]),
    ("cp.async.bulk.commit_group;", 0, []),
    ("cp.async.bulk.wait_group 3;", 0, [3]),
    ("cp.async.bulk.wait_group.read 0;", 0, [0]),
    ("mbarrier.init.shared::cta.b64 [%s], 1;", 0, [64, 1]),
    ("mbarrier.init.shared.b64 [%w], %n;", 0, [16, 32]),
    ("mbarrier.inval.shared.b64 [%s+8];", 0, [72]),
    ("mbarrier.arrive.shared::cta.b64 _, [%s];", 0, [64]),
    ("mbarrier.arrive.release.cta.shared::cta.b64 _, [%s], 2;", 0, [64, 2]),
    ("mbarrier.arrive.relaxed.cluster.shared.b64 _, [%s];", 0, [64]),
    ("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%s], %n;", 0, [64, 32]),
    ("mbarrier.test_wait.parity.shared::cta.b64 %p, [%s], 1;", 1, [64, 1]),
    ("mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 %p, [%s], %n;", 1, [64, 32]),
    ("mbarrier.try_wait.parity.shared::cta.b64 %p, [%s], %n, 100;", 1, [64, 32]),
    ("fence.mbarrier_init.release.cluster;", 0, []),
    ("fence.proxy.async;", 0, []),
    ("fence.proxy.async.global;", 0, []),
    ("fence.proxy.async.shared::cta;", 0, []),
    ("elect.sync %d|%p, -1;", 2, [0xFFFFFFFF]),
    ("elect.sync _|%p, 0xffff;", 2, [0xFFFF]),
]


@pytest.mark.parametrize(("text", "results", "values"), EVENTS, ids=[text for text, *_ in EVENTS])
def test_events(text: str, results: int, values: list[int]) -> None:
    whole = kernel_text(REGISTERS + text, before=BEFORE)
    assert assemble(whole) == ""
    kernel = Kernel(whole, weak=False)
    states, events = run_threads(kernel, 1, [0])
    event = kernel.events[int(events[0])]
    assert event.text == text[:-1]
    assert event.parts == tuple(text.split()[0].rstrip(";").split("."))
    assert len(event.dests) == results
    found = [n if how == "imm" else int(states[0, n]) for how, n in event.args]
    assert [one & 0xFFFFFFFF for one in found] == values


@pytest.mark.parametrize(
    "text",
    [
        f"{LOAD}.multicast::cluster [%s], [%g], %n, [%s], 1;",
        f"{STORE}.L2::cache_hint [%g], [%s], %n, %w;",
        "cp.async.ca.shared.global [%s], [%g], 16;",
        "mbarrier.arrive.shared::cta.b64 %w, [%s];",
        "mbarrier.arrive.noComplete.shared::cta.b64 %w, [%s], 1;",
        "mbarrier.test_wait.shared::cta.b64 %p, [%s], %w;",
        "mbarrier.init.b64 [%w], 1;",
        "fence.proxy.alias;",
        "elect.sync %d, -1;",
    ],
)
def test_what_is_not_known_is_refused(text: str) -> None:
    with pytest.raises(PtxError):
        Kernel(kernel_text(REGISTERS + text, before=BEFORE), weak=False)


def test_an_address_of_shared_memory_is_a_generic_one_and_back() -> None:
    """Wherever the host has it."""
    body = """
.reg .b64 %a, %b, %at;
cvta.shared.u64 %a, 48;
cvta.to.shared.u64 %b, %a;
sub.s64 %a, %a, %b;
ld.param.u64 %at, [out];
st.global.b64 [%at], %b;
st.global.b64 [%at+8], %a;
"""
    found = np.zeros(2, np.uint64)
    kernel = Kernel(kernel_text(body), weak=False)
    states, events = run_threads(kernel, 1, [found.ctypes.data])
    assert not events.any()
    assert found.tolist() == [48, int(states[0, SHARED])]
