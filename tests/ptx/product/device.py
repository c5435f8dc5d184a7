"""The memory of a GPU for the model machine: what the host allocates and maps is what kernels may touch."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from uccl_ep_serving.gpu.interpreted_memory import InterpretedMemory

#: Those whose result nobody has written yet.
_EMPTY = {torch.ops.aten.empty.memory_format, torch.ops.aten.empty_strided.default, torch.ops.aten.new_empty.default}


class Allocations(TorchDispatchMode):
    """Inside, every tensor that is made is memory of the device: kernels may touch it, and no more.

    What is made stays allocated as long as this object, so that no two tensors of a run have the same address.

    Args:
        memory: of the machine.
        name: of the owner, for reports.
    """

    def __init__(self, memory: Any, name: str) -> None:
        super().__init__()
        self._memory, self._name = memory, name
        self._kept: dict[int, torch.Tensor] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for one in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(one, torch.Tensor):
                self._keep(one, func in _EMPTY)
        return result

    def _keep(self, tensor: torch.Tensor, fresh: bool) -> None:
        storage = tensor.untyped_storage()
        address, nbytes = storage.data_ptr(), storage.nbytes()
        if nbytes == 0 or address in self._kept:
            return
        self._kept[address] = tensor
        if fresh:
            # whatever was there: as floats NaN or more than any sum, as numbers no index
            ctypes.memset(address, 0x7F, nbytes)
        name = f"tensor {len(self._kept)} of {self._name}, {tensor.dtype} {list(tensor.shape)}"
        self._memory.register(name, address, nbytes, watched=False, fresh=fresh)


class ModelMemory(InterpretedMemory):
    """Device memory and mapped host memory of one rank: host memory that the machine is told of."""

    def __init__(self, memory: Any, rank: int) -> None:
        super().__init__()
        self._memory, self._rank = memory, rank

    def map_host(self, address: int, nbytes: int) -> int:
        """Ranks of one process map the same windows, each for itself."""
        cover(self._memory, f"host memory of rank {self._rank}", address, nbytes)
        return address

    def unmap_host(self, address: int) -> None:
        """Who else has mapped it may still touch it."""

    def allocate(self, nbytes: int) -> int:
        address = super().allocate(nbytes)
        self._memory.register(f"device memory of rank {self._rank}", address, nbytes)
        return address

    def free(self, address: int) -> None:
        self._memory.unregister(address)
        super().free(address)


def cover(memory: Any, name: str, address: int, nbytes: int) -> None:
    """Register what is not registered yet of ``nbytes`` bytes from ``address``."""
    at, end = address, address + nbytes
    for one in sorted(memory.regions, key=lambda one: one.start):
        if one.end <= at or one.start >= end:
            continue
        if at < one.start:
            memory.register(name, at, one.start - at)
        at = one.end
    if at < end:
        memory.register(name, at, end - at)
