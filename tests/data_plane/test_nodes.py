"""Which groups of ranks are nodes, and what the setting that simulates them does to the ways between ranks."""

from __future__ import annotations

import pytest

from uccl_ep_serving.config import Settings
from uccl_ep_serving.data_plane.nodes import equal_nodes, on_one_node
from uccl_ep_serving.errors import ConfigError
from uccl_ep_serving.proxy.transport.select import DIRECT, SHM, TCP, choose


def mapped(*groups: set[int]) -> list[set[int]]:
    """By rank, the others of its group."""
    owner = {rank: group for group in groups for rank in group}
    return [owner[rank] - {rank} for rank in range(len(owner))]


@pytest.mark.parametrize(
    ("direct", "expected"),
    [
        (mapped({0, 1}, {2, 3}), 2),
        (mapped({0, 1, 2}, {3, 4, 5}, {6, 7, 8}), 3),
        (mapped({0, 1, 2, 3}), 4),
        (mapped({0}, {1}, {2}), 1),
        (mapped({0}), 1),
        (mapped({0, 1}, {2}), 1),
        (mapped({0, 1, 2}, {3}), 1),
        (mapped({0}, {1, 2, 3}), 1),
        (mapped({0, 2}, {1, 3}), 1),
        (mapped({0, 1}, {2}, {3}), 1),
        # not everybody sees it alike
        ([{1}, {0}, {3}, set()], 1),
    ],
)
def test_equal_nodes(direct: list[set[int]], expected: int) -> None:
    assert equal_nodes(direct) == expected


def test_simulated_nodes_part_ranks_whose_windows_are_mapped() -> None:
    for transport, way in (("auto", SHM), ("shm", SHM), ("tcp", TCP)):
        settings = Settings(transport=transport, node_ranks=2)
        assert choose(settings, mapped=True, same_node=on_one_node(2, 3, 2)).transport == DIRECT
        assert choose(settings, mapped=True, same_node=on_one_node(1, 2, 2)).transport == way
    assert "UCCL_EP_NODE_RANKS=2" in choose(Settings(node_ranks=2), mapped=True, same_node=False).reason
    assert all(on_one_node(rank, peer, 0) for rank in range(3) for peer in range(3))


def test_settings() -> None:
    settings = Settings.from_environment({"UCCL_EP_HIERARCHY": "off", "UCCL_EP_NODE_RANKS": "4"})
    assert (settings.hierarchy, settings.node_ranks) == ("off", 4)
    assert {"UCCL_EP_HIERARCHY", "UCCL_EP_NODE_RANKS"} <= settings.agreed().keys()
    with pytest.raises(ConfigError, match="UCCL_EP_HIERARCHY"):
        Settings.from_environment({"UCCL_EP_HIERARCHY": "on"})
