"""The two halves of a low-latency operation on CPU tensors, ready to run: which kernel gets which addresses.

An object of these classes belongs to one operation. Its ``send`` and ``receive`` run one slice of a kernel and are
called until that is over (``Runtime.wait``); ``received`` is called once after that. ``receive`` may run long after the
operation returned to its caller, in a recv hook, and what it reads and writes is kept alive here until then.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from ..handles import LowLatencyHandle
from ..kernels.blocks.low_latency import COUNTS, NUMBER, PAIRS, RETURN_ROWS, RouteBlock, StateBlock
from ..kernels.interface import LowLatencyKernels
from .low_latency_arguments import Coding
from .low_latency_memory import DispatchOutputs
from .low_latency_session import Space

__all__ = ["CombineSteps", "DispatchSteps"]


class DispatchSteps:
    """Sending and receiving of one dispatch.

    Args:
        runtime, kernels, state: of the Buffer, in the present window.
        handle: of this dispatch; its ids and weights are sent.
        coding: how rows travel.
        outputs: what is filled.
        rows: address of the first row to send and bytes from row to row; read by ``send`` only, and kept by the caller.
        counters: addresses of the caller's counters or 0: int32[L] received rows, int64[R] nanoseconds waited.

    Attributes:
        spent: nanoseconds of the operation before ``receive``; whoever sends sets it.
    """

    __slots__ = (
        "_coding",
        "_context",
        "_counters",
        "_handle",
        "_kernels",
        "_outputs",
        "_progress",
        "_route",
        "_rows",
        "_runtime",
        "_state",
        "spent",
    )

    def __init__(
        self,
        runtime: Space,
        kernels: LowLatencyKernels,
        state: StateBlock,
        handle: LowLatencyHandle,
        coding: Coding,
        outputs: DispatchOutputs,
        rows: tuple[int, int],
        counters: tuple[int, int],
    ) -> None:
        self._runtime = runtime
        self._context, self._progress = runtime.context, runtime.progress
        self._kernels = kernels
        self._state = state
        self._handle = handle
        self._route: RouteBlock = handle.route
        self._coding = coding
        self._outputs = outputs
        self._rows = rows
        self._counters = counters
        self.spent = 0

    def send(self, slice_end_ns: int) -> int:
        """Route the tokens, once, and send them; STATUS_*."""
        kernels, context, state, route = self._kernels, self._context, self._state.address, self._route
        handle, coding, (rows, stride) = self._handle, self._coding, self._rows
        ids, weights = handle.topk_idx.data_ptr(), handle.topk_weights
        if route.words[NUMBER] < 0:
            kernels.route(context, state, route.address, ids)
        return kernels.dispatch_send(
            context,
            state,
            route.address,
            self._progress,
            rows,
            stride,
            coding.row if coding.quantised else coding.payload,
            coding.row,
            ids,
            0 if weights is None else weights.data_ptr(),
            coding.dtype,
            slice_end_ns,
        )

    def receive(self, slice_end_ns: int) -> int:
        """Take what has arrived and unpack it; STATUS_*."""
        coding, outputs, (stats, waited) = self._coding, self._outputs, self._counters
        return self._kernels.dispatch_recv(
            self._context,
            self._state.address,
            self._route.address,
            self._progress,
            coding.dtype,
            outputs.values.data_ptr(),
            coding.payload,
            coding.row,
            outputs.scales_address,
            outputs.count.data_ptr(),
            outputs.src_info.data_ptr(),
            outputs.layout_range.data_ptr(),
            stats,
            waited,
            slice_end_ns,
        )

    def received(self, nanoseconds: int) -> None:
        """The dispatch may be combined; count it. ``nanoseconds``: taken by ``receive``."""
        self._handle.received = True
        runtime, route = self._runtime, self._route
        counts, pairs = route.table(COUNTS), route.table(PAIRS)
        runtime.record(
            "ll_dispatch",
            int(self._handle.topk_idx.shape[0]),
            int(counts.sum() - counts[runtime.rank]),
            self.spent + nanoseconds,
            expert_rows=int(pairs.sum() - pairs[runtime.rank]),
        )


class CombineSteps:
    """Sending and receiving of one combine.

    Args:
        runtime, kernels, state: of the Buffer, in the present window.
        handle: of the dispatch.
        coding: how rows travel.
        rows: address of the experts' output; read by ``send`` only, and kept by the caller.
        weights: float32 [tokens, K], read by ``receive``.
        result: [tokens, H], written by ``receive``.
        waited: address of the caller's int64[R] nanoseconds waited, or 0.

    Attributes:
        spent: nanoseconds of the operation before ``receive``; whoever sends sets it.
    """

    __slots__ = (
        "_coding",
        "_context",
        "_handle",
        "_kernels",
        "_progress",
        "_result",
        "_route",
        "_rows",
        "_runtime",
        "_state",
        "_ticket",
        "_waited",
        "_weights",
        "spent",
    )

    def __init__(
        self,
        runtime: Space,
        kernels: LowLatencyKernels,
        state: StateBlock,
        handle: LowLatencyHandle,
        coding: Coding,
        rows: int,
        weights: torch.Tensor,
        result: torch.Tensor,
        waited: int,
    ) -> None:
        self._runtime = runtime
        self._context, self._progress = runtime.context, runtime.progress
        self._kernels = kernels
        self._state = state
        self._handle = handle
        self._route: RouteBlock = handle.route
        self._coding = coding
        self._rows = rows
        self._weights = weights
        self._result = result
        self._waited = waited
        # the number of this combine: written by combine_send, read by combine_recv
        self._ticket: npt.NDArray[np.int64] = np.zeros(1, dtype=np.int64)
        self.spent = 0

    def send(self, slice_end_ns: int) -> int:
        """Send the experts' rows back; STATUS_*."""
        coding = self._coding
        return self._kernels.combine_send(
            self._context,
            self._state.address,
            self._route.address,
            self._ticket.ctypes.data,
            self._progress,
            self._rows,
            coding.payload,
            coding.row,
            coding.dtype,
            slice_end_ns,
        )

    def receive(self, slice_end_ns: int) -> int:
        """Take what has arrived and sum it; STATUS_*."""
        coding = self._coding
        return self._kernels.combine_recv(
            self._context,
            self._state.address,
            self._route.address,
            self._ticket.ctypes.data,
            self._progress,
            self._weights.data_ptr(),
            self._result.data_ptr(),
            coding.payload,
            coding.row,
            coding.dtype,
            self._waited,
            slice_end_ns,
        )

    def received(self, nanoseconds: int) -> None:
        """Count the combine. ``nanoseconds``: taken by ``receive``."""
        runtime = self._runtime
        returned = self._route.table(RETURN_ROWS)
        runtime.record(
            "ll_combine",
            int(self._result.shape[0]),
            int(returned.sum() - returned[runtime.rank]),
            self.spent + nanoseconds,
            reduced=0 if self._handle.topk_weights is None else 1,
        )
