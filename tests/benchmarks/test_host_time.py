"""``benchmarks/host_time.py``: both ways of launching are measured, and the one that is taken is the shorter."""

from __future__ import annotations

import pytest

from benchmarks import host_time
from tests.support.cuda_driver import build

KERNELS = {
    *("dispatch_send", "dispatch_recv", "combine_send", "combine_recv"),
}
OPERATIONS = {"low-latency dispatch": "dispatch_recv", "low-latency combine": "combine_recv"}

ORDER = "streams and events of an operation"


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.skipif(bool(build.LACKING), reason=build.LACKING)
def test_a_launch_at_once_takes_a_part_of_tritons_own_way() -> None:
    found = host_time.measure(rounds=1, times=40, normal=False)
    at_once, by_triton = found["us"][host_time.AT_ONCE], found["us"][host_time.BY_TRITON]
    assert at_once.keys() == by_triton.keys() == KERNELS | OPERATIONS.keys() | {ORDER}
    for kernel in KERNELS:
        # a quarter, and room for a machine with other work
        assert 0 < at_once[kernel]["median"] < by_triton[kernel]["median"] / 2, kernel
    for operation, kernel in OPERATIONS.items():
        assert at_once[operation]["median"] > at_once[kernel]["median"] + at_once[ORDER]["median"]
    table = host_time.markdown(found)
    assert all(f"| {operation} |" in table for operation in OPERATIONS)
    assert "a launch of low latency" in table
