"""How much normal mode moves on a GPU, by kernels, links and NICs."""

from __future__ import annotations

import pytest

from uccl_ep_serving.gpu.program_budget import row_traffic

ROW = 2 * 7168
PREFILL = 4096 * ROW


def test_bytes_of_two_ranks_that_write_each_other() -> None:
    """Each row is put into a pipe and taken out of it; those for the peer cross the link."""
    assert row_traffic(4096, ROW, 2, 2, 2, 0, True) == (4 * PREFILL, PREFILL, 0)
    # windows in host memory, reached over PCIe, or a peer behind proxies
    assert row_traffic(4096, ROW, 2, 2, 2, 0, False) == (4 * PREFILL, PREFILL, 0)
    assert row_traffic(4096, ROW, 2, 2, 1, 0, True) == (4 * PREFILL, 0, PREFILL)
    assert row_traffic(4096, ROW, 2, 2, 1, 0, False) == (4 * PREFILL, PREFILL, PREFILL)


def test_between_nodes_a_row_crosses_once() -> None:
    """16 ranks, nodes of 8, top-8: a token goes to half of the ranks, so to 4 of each node, but once to the other."""
    direct = row_traffic(4096, ROW, 8, 16, 8, 0, True)
    crossed = row_traffic(4096, ROW, 8, 16, 8, 8, True)
    assert direct.far == 4 * PREFILL
    assert crossed.far == PREFILL
    # of 4 copies for this node and 4 that are forwarded here, 1 in 8 stays in this rank's memory
    assert crossed.link == pytest.approx((3.5 + 3.5) * PREFILL)
    assert crossed.copied == pytest.approx((4 + 1 + 4 + 8) * PREFILL)
