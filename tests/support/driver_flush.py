"""A GPU driver whose flush of NICs' writes is called by address, as a proxy does it."""

from __future__ import annotations

import ctypes
from typing import Any

from tests.support.world import World
from uccl_ep_serving.protocol.streams import LL_DISPATCH
from uccl_ep_serving.proxy.fence import DriverFlush, fence_block

_SELECT = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
_FLUSH = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_int)


class Driver:
    """A driver that notes its calls, and how many messages of rank 0 rank 1 could see at each."""

    def __init__(self, world: World, select: int = 0, flush: int = 0) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self._world = world
        self._functions = _SELECT(self._selected(select)), _FLUSH(self._flushed(flush))
        addresses = [ctypes.cast(function, ctypes.c_void_p).value or 0 for function in self._functions]
        self._fence = fence_block(DriverFlush(addresses[0], 0x1234, addresses[1], 0, 100))
        world.services[1].use_fence(0, 0, self._fence.ctypes.data)

    def _selected(self, status: int) -> Any:
        return lambda context: self.calls.append(("select", context)) or status  # type: ignore[func-returns-value]

    def _flushed(self, status: int) -> Any:
        def flush(target: int, scope: int) -> int:
            self.calls.append(("flush", target, scope, self._world.arrived(1, 0, LL_DISPATCH)))
            return status

        return flush
