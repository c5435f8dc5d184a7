"""Words of the blocks, for code inside kernels: ``from .blocks import S_META`` is a ``tl.constexpr``.

    S_*  byte offset of a word of the low-latency state     T_*  index of one of its tables
    P_*  byte offset of a word of a plan, or of the route that it is copied to     R_*  index of a table of a route
    W_*  byte offset of a word of the normal-mode state     N_*  index of one of its tables
    I_*  byte offset of a word of what an opening tells the host

They are made from their declarations in ``kernels.blocks``. A kernel reads them as bare global names. ``block.META``
works as well, but not safely: Triton keeps what it compiled under a key of the source and of the values of the bare
``tl.constexpr`` names in it (3.6, 3.8 and 3.9). The value of an attribute is not in that key. After a word has moved,
kernels compiled before would be taken from the cache, and read the wrong word.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..blocks import low_latency, low_latency_device, normal_device


def __getattr__(name: str) -> tl.constexpr:
    prefix, _, word = name.partition("_")
    if prefix in ("S", "P"):
        block = low_latency_device if hasattr(low_latency_device, word) else low_latency
        return tl.constexpr(8 * getattr(block, word))
    if prefix == "W":
        return tl.constexpr(8 * getattr(normal_device, word))
    if prefix == "I":
        return tl.constexpr(8 * getattr(normal_device, f"INFO_{word}"))
    tables = {"T": low_latency_device.STATE_TABLES, "R": low_latency_device.ROUTE_TABLES, "N": normal_device.TABLES}
    if word not in tables.get(prefix, ()):
        raise AttributeError(f"{__name__} has no {name}")
    return tl.constexpr(tables[prefix].index(word))


_STATE_EXPERTS = tl.constexpr(low_latency_device.STATE_EXPERTS)
_STATE_PEERS = tl.constexpr(low_latency_device.STATE_PEERS)
_STATE_TABLES = tl.constexpr(len(low_latency_device.STATE_TABLES))
_ROUTE_WORDS = tl.constexpr(low_latency_device.ROUTE_WORDS)
_ROUTE_TABLES = tl.constexpr(len(low_latency_device.ROUTE_TABLES))


@triton.jit
def state_table(state: tl.tensor, table: tl.tensor, peers: tl.tensor) -> tl.tensor:
    """Addresses of the peers' entries in a table of the state block."""
    return state + 8 * (_STATE_PEERS + peers * _STATE_TABLES + table)


@triton.jit
def expert_count(state: tl.tensor, experts: tl.tensor) -> tl.tensor:
    """Addresses of the experts' counts, int32, in the state block."""
    return state + 8 * _STATE_EXPERTS + 4 * experts


@triton.jit
def route_table(route: tl.tensor, table: tl.tensor, ranks: tl.tensor) -> tl.tensor:
    """Addresses of the ranks' entries in a table of the route block."""
    return route + 8 * (_ROUTE_WORDS + ranks * _ROUTE_TABLES + table)
