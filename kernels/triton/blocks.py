"""Words of the blocks, for code inside kernels, which reads ``S.META`` as a ``tl.constexpr``.

    S       byte offset of a word of the low-latency state       T   index of one of its tables
    P       byte offset of a word of a plan, or of the route that it is copied to       R   index of a table of a route
    W       byte offset of a word of the normal-mode state       N   index of one of its tables
    INFO    byte offset of a word of what an opening tells the host

They are made from their declarations in ``kernels.blocks``. A kernel reads them from these objects and from no module:
``block.META`` works as well, but not safely. Triton keeps what it compiled under a key of the source and of the text of
each ``tl.constexpr`` that is a global name in it (3.6, 3.8 and 3.9). What stands in a module is not in that key.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import triton
import triton.language as tl

from ..blocks import low_latency, low_latency_device, normal_device


class Words(tl.constexpr):  # type: ignore[misc]
    """Numbers by name. All stand in its text, and so in Triton's key of each kernel that reads one: after a word has
    moved, no kernel is taken from the cache that was compiled before."""

    def __init__(self, numbers: dict[str, int]) -> None:
        super().__init__(SimpleNamespace(**{name: tl.constexpr(number) for name, number in numbers.items()}))

    def __getattr__(self, name: str) -> Any:
        # Triton copies what kernels read: a copy has no value at first
        if name == "value" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.value, name)


def _words(*declared: ModuleType, prefix: str = "") -> Words:
    """Byte offsets of the words that modules declare under names with ``prefix``."""
    numbers = [pair for module in declared for pair in vars(module).items() if isinstance(pair[1], int)]
    return Words({name.removeprefix(prefix): 8 * number for name, number in numbers if name.startswith(prefix)})


def _tables(names: Sequence[str]) -> Words:
    return Words({name: index for index, name in enumerate(names)})


S = P = _words(low_latency, low_latency_device)
W, INFO = _words(normal_device), _words(normal_device, prefix="INFO_")
T, R = _tables(low_latency_device.STATE_TABLES), _tables(low_latency_device.ROUTE_TABLES)
N = _tables(normal_device.TABLES)

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
