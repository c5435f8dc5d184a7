"""The peer of pyverbs on ports that no machine of the tests has; on soft-RoCE: tests/rdma/test_roce_pyverbs.py."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from unittest.mock import MagicMock

import msgspec
import pytest

from uccl_ep_serving.preflight.pyverbs_peer import PyverbsPeer

ETHERNET, INFINIBAND = 2, 1
PARTS = ("enums", "addr", "cq", "device", "mr", "pd", "qp", "wr")


@pytest.mark.parametrize(
    ("link", "flags", "routed"),
    [(ETHERNET, 0, 1), (INFINIBAND, 0, 0), (INFINIBAND, 1, 1)],
    ids=["Ethernet", "InfiniBand", "InfiniBand that asks for the global header"],
)
def test_lids_are_told_and_used(link: int, flags: int, routed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pyverbs = {name: MagicMock() for name in PARTS}
    pyverbs["enums"].IBV_LINK_LAYER_ETHERNET = ETHERNET
    pyverbs["enums"].IBV_ACCESS_LOCAL_WRITE, pyverbs["enums"].IBV_ACCESS_REMOTE_WRITE = 1, 2
    port = SimpleNamespace(lid=7, link_layer=link, flags=flags)
    context = pyverbs["device"].Context.return_value
    context.query_port.return_value = port
    context.query_gid.return_value.gid = "fe80::1"
    pyverbs["mr"].MR.return_value = SimpleNamespace(buf=4096, lkey=3, rkey=5)
    pyverbs["qp"].QP.return_value.qp_num = 9
    monkeypatch.setitem(sys.modules, "pyverbs", SimpleNamespace(**pyverbs))
    for name, module in pyverbs.items():
        monkeypatch.setitem(sys.modules, f"pyverbs.{name}", module)
    peer = PyverbsPeer("mlx5_0", 0, 64, pkey_index=2)
    assert pyverbs["qp"].QPAttr.return_value.pkey_index == 2
    there = msgspec.msgpack.decode(peer.address(), strict=False)
    assert there["rails"][0]["lid"] == 7
    there["rails"][0].update(lid=8, numbers={1: [11]})
    peer.connect(msgspec.msgpack.encode(there))
    (told,) = pyverbs["addr"].AHAttr.call_args_list
    assert (told.kwargs["dlid"], told.kwargs["is_global"]) == (8, routed)
