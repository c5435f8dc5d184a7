"""The normal-mode kernels for CPU tensors: what the host calls."""

from __future__ import annotations

from ...native.groups import Group
from .normal_exchange import exchange, exchange_nodes
from .normal_open import open_operation, place, prepare, prepare_nodes
from .routing import layout, route_nodes, route_rows

__all__ = [
    "NORMAL",
    "NORMAL_NODES",
    "exchange",
    "exchange_nodes",
    "layout",
    "open_operation",
    "place",
    "prepare",
    "prepare_nodes",
    "route_nodes",
    "route_rows",
]

#: What every group calls once the layout is known, and what groups of several nodes call as well.
NORMAL = Group("normal mode", route_rows, prepare, open_operation, place, exchange)
NORMAL_NODES = Group("normal mode between nodes", route_nodes, prepare_nodes, exchange_nodes)
