"""How kernels publish where a store cannot be predicated: a lane that sends nothing stores to a sink of one word."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from tests.support.interpreter_process import interpreted
from uccl_ep_serving.protocol.command import Command

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
]


def _run() -> tuple[Any, int]:
    from tests.kernels import publish_kernels
    from uccl_ep_serving.kernels.blocks import low_latency_device as blocks

    return publish_kernels.run(), blocks.SINK


def test_lanes_that_send_nothing_change_nothing_but_the_sink() -> None:
    (commands, flags, changed), sink = interpreted(_run)
    assert commands == [
        Command(rank=peer, stream=3, source=64, target=128 * peer, length=32, last=True) for peer in (1, 4, 2)
    ]
    assert flags == [7, 0, 0, 7, 0]
    assert changed == [sink]


def _run_messages() -> Any:
    from tests.kernels import publish_kernels

    return publish_kernels.run_messages()


def test_where_no_peer_is_proxied_the_ring_is_left_alone() -> None:
    """Its head lies in host memory, and storing it takes a way over PCIe."""
    assert interpreted(_run_messages) == ([1, 3], [1] * 5, [2, 0, 16])
