"""How many programs move rows: what the slowest way needs, whatever the number of tokens, and what bounds it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from uccl_ep_serving.gpu.program_budget import LINK_BANDWIDTH, PCIE_BANDWIDTH, PROXY_BANDWIDTH, budget, row_traffic

ROW = 2 * 7168
PREFILL = 4096 * ROW


def programs(tokens: int, ranks: int, link: float, far: float, mapped: int = 0, node_ranks: int = 0) -> int:
    traffic = row_traffic(tokens, ROW, min(8, ranks), ranks, mapped or ranks, node_ranks, True)
    return budget(traffic, 2, link, far, 1 << 16).programs


def test_bytes_of_two_ranks_that_write_each_other() -> None:
    """Own rows once; those for the peer are stored in its window, and as many come and are copied to the output."""
    assert row_traffic(4096, ROW, 2, 2, 2, 0, True) == (3 * PREFILL, PREFILL, 0)
    # windows in host memory, reached over PCIe, or a peer behind proxies
    assert row_traffic(4096, ROW, 2, 2, 2, 0, False) == (3 * PREFILL, PREFILL, 0)
    assert row_traffic(4096, ROW, 2, 2, 1, 0, True) == (3 * PREFILL, 0, PREFILL)
    assert row_traffic(4096, ROW, 2, 2, 1, 0, False) == (3 * PREFILL, PREFILL, PREFILL)


def test_between_nodes_a_row_crosses_once() -> None:
    """16 ranks, nodes of 8, top-8: a token goes to half of the ranks, so to 4 of each node, but once to the other."""
    direct = row_traffic(4096, ROW, 8, 16, 8, 0, True)
    crossed = row_traffic(4096, ROW, 8, 16, 8, 8, True)
    assert direct.far == 4 * PREFILL
    assert crossed.far == PREFILL
    # 3.5 copies inside the node, and of the 4 that a rank takes of other nodes' rows 1 in 8 it forwards itself
    assert crossed.link == pytest.approx((3.5 + 3.5) * PREFILL)
    assert crossed.copied == pytest.approx((0.5 + 2 * 3.5 + 1 + 4) * PREFILL)


def test_the_bound_is_bytes_over_bandwidth() -> None:
    """Two ranks: 3 bytes are copied for each that crosses, so a way of 25 GB/s keeps 75 GB/s of copies busy, which is 5
    programs of 15 GB/s; one of 10 GB/s keeps 2."""
    traffic = row_traffic(4096, ROW, 2, 2, 1, 0, False)
    assert budget(traffic, 2, PCIE_BANDWIDTH, 25e9, 99) == (5, "enough to saturate the bottleneck, NICs and proxies")
    links = "enough to saturate the bottleneck, the links to windows of other ranks"
    assert budget(traffic, 2, 10e9, PCIE_BANDWIDTH, 99) == (2, links)
    # a program more as soon as the way is a little faster
    assert budget(traffic, 2, PCIE_BANDWIDTH, 25.1e9, 99).programs == 6
    assert budget(traffic, 2, PCIE_BANDWIDTH, 25e9, 5).programs == 5
    assert budget(traffic, 2, PCIE_BANDWIDTH, 25e9, 4).programs == 4


def test_a_batch_of_prefill_takes_24_programs_at_most() -> None:
    """Over NVLink whatever is allowed; between hosts, and without NVLink, fewer."""
    traffic = row_traffic(4096, ROW, 8, 8, 8, 0, True)
    found = budget(traffic, 2, LINK_BANDWIDTH, PROXY_BANDWIDTH, 24)
    assert found.programs == 24
    assert "the bottleneck, the links to windows of other ranks, would keep more busy" in found.reason
    assert programs(4096, 8, PCIE_BANDWIDTH, PROXY_BANDWIDTH) == 8
    assert programs(4096, 2, LINK_BANDWIDTH, 50e9, mapped=1) == 10
    assert programs(4096, 2, LINK_BANDWIDTH, PROXY_BANDWIDTH, mapped=1) == 1


def test_little_to_move_takes_as_long_as_its_steps() -> None:
    assert programs(0, 8, LINK_BANDWIDTH, PROXY_BANDWIDTH) == 1
    few = budget(row_traffic(8, ROW, 8, 8, 8, 0, True), 2, LINK_BANDWIDTH, PROXY_BANDWIDTH, 24)
    # 8 own rows copied once and 7 x 8 copied twice are 1.72 MB; a program copies 0.12 MB in the 8 us of two steps
    assert few.programs == 15
    assert few.reason == "enough to saturate the bottleneck, the steps of the operation"
    # a rank alone only copies its own rows: nothing else bounds it
    assert programs(4096, 1, LINK_BANDWIDTH, PROXY_BANDWIDTH) > 100


@given(
    tokens=st.integers(0, 1 << 20),
    ranks=st.sampled_from([1, 2, 3, 8, 16, 64]),
    share=st.integers(1, 8),
    link=st.floats(1e8, 1e12),
    far=st.floats(1e8, 1e12),
    most=st.integers(1, 200),
    crosses=st.booleans(),
)
def test_never_none_and_never_more_than_allowed(
    tokens: int, ranks: int, share: int, link: float, far: float, most: int, crosses: bool
) -> None:
    mapped = ranks // share if share and ranks % share == 0 and ranks >= share else ranks
    node_ranks = mapped if crosses and 1 < mapped < ranks else 0
    traffic = row_traffic(tokens, ROW, min(8, ranks), ranks, mapped, node_ranks, True)
    assert traffic.copied >= traffic.link >= 0
    assert traffic.copied >= traffic.far >= 0
    found = budget(traffic, 1, link, far, most)
    assert 1 <= found.programs <= most
    # a faster link never takes fewer programs, and more allowed never either
    assert budget(traffic, 1, 2 * link, 2 * far, most).programs >= found.programs
    assert budget(traffic, 1, link, far, most + 1).programs >= found.programs
