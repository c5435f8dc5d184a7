"""What a normal-mode dispatch returns, on the device, and when it is allocated and filled."""

from __future__ import annotations

import torch

from ..handles import NormalGpuHandle
from ..kernels.blocks.normal_device import NormalTensors
from .normal_arguments import DispatchArguments
from .normal_gpu_route import Steps

__all__ = ["Outputs", "Received", "address_of"]

Received = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


class Outputs:
    """The tensors of one dispatch. Only ids and weights have content before its kernels have run: -1 and 0.

    These are small, and so they are allocated, and filled behind the opening, before it is known how many rows come.
    What returns is their beginning, unless more come than were expected.

    Args:
        args: of the dispatch.
        expected: rows for which ids and weights are allocated.
        device: of all tensors.

    Attributes:
        rows: [capacity, hidden]; allocated, as all that returns, by :meth:`allocate`.
        scales: [capacity, ...] of float8 rows, else None.
        topk_idx, topk_weights: int64 and float32 [capacity, K], or None.
    """

    rows: torch.Tensor
    scales: torch.Tensor | None = None
    topk_idx: torch.Tensor | None = None
    topk_weights: torch.Tensor | None = None

    def __init__(self, args: DispatchArguments[NormalGpuHandle], expected: int, device: torch.device) -> None:
        self._args, self._device = args, device
        self.filling = self._allocate_ids(expected)

    def _allocate_ids(self, rows: int) -> Steps:
        """What fills them."""
        topk = self._args.form.topk
        if not topk:
            return ()
        self.topk_idx = ids = torch.empty(rows, topk, dtype=torch.int64, device=self._device)
        self.topk_weights = weights = torch.empty(rows, topk, dtype=torch.float32, device=self._device)
        return lambda: ids.fill_(-1), weights.zero_

    def allocate(self, capacity: int) -> Steps:
        """What returns, of ``capacity`` rows. Returns what has to be filled still."""
        rows, scales = self._args.rows, self._args.scales
        self.rows = torch.empty(capacity, rows.shape[1], dtype=rows.dtype, device=self._device)
        if scales is not None:
            self.scales = torch.empty(capacity, scales.shape[1], dtype=scales.dtype, device=self._device)
        if self.topk_idx is None or self.topk_weights is None or len(self.topk_idx) == capacity:
            return ()
        if len(self.topk_idx) < capacity:
            return self._allocate_ids(capacity)
        # no views: autograd lets nobody write to those
        for one in self.slots:
            one.resize_(capacity, one.shape[1])
        return ()

    @property
    def x(self) -> Received:
        """As dispatch's caller gets it."""
        return self.rows if self.scales is None else (self.rows, self.scales)

    @property
    def slots(self) -> list[torch.Tensor]:
        """What is filled."""
        return [one for one in (self.topk_idx, self.topk_weights) if one is not None]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All of them."""
        return [self.rows, *([] if self.scales is None else [self.scales]), *self.slots]

    @property
    def addresses(self) -> NormalTensors:
        """With what is sent."""
        args = self._args
        return NormalTensors(
            args.rows.data_ptr(),
            address_of(args.topk_idx),
            address_of(args.topk_weights),
            address_of(args.scales),
            self.rows.data_ptr(),
            address_of(self.topk_idx),
            address_of(self.topk_weights),
            address_of(self.scales),
        )


def address_of(tensor: torch.Tensor | None) -> int:
    """0 for none."""
    return 0 if tensor is None else tensor.data_ptr()
