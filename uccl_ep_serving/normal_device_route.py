"""Who gets which tokens, worked out on the device: the tensors of a layout and of a dispatch, and what fills them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .handles import DeviceNormalHandle, DispatchOrigin
from .kernels.interface import DeviceNormalKernels, KernelLaunch

__all__ = ["Marks", "Route", "all_of", "run_all"]

#: Of an int64: larger than every position.
_NO_POSITION = (1 << 63) - 1


def all_of(launches: tuple[KernelLaunch, ...]) -> tuple[Callable[[], None], ...]:
    """Launches as steps."""
    return tuple(launch.run for launch in launches)


def run_all(steps: tuple[Callable[[], None], ...]) -> None:
    """Run steps in order."""
    for step in steps:
        step()


class Marks:
    """Counts and marks of a layout, to be filled by kernels."""

    def __init__(self, topk_idx: torch.Tensor, experts: int, ranks: int) -> None:
        device = topk_idx.device
        self._ids, self._experts = topk_idx, experts
        self.per_rank = torch.zeros(ranks, dtype=torch.int32, device=device)
        self.per_expert = torch.zeros(experts, dtype=torch.int32, device=device)
        self.in_rank = torch.empty(len(topk_idx), ranks, dtype=torch.bool, device=device)
        self._bad = torch.full((1,), _NO_POSITION, dtype=torch.int64, device=device)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All that kernels use."""
        return [self._ids, self.per_rank, self.per_expert, self.in_rank, self._bad]

    def launches(self, kernels: DeviceNormalKernels, context: int, state: int) -> tuple[KernelLaunch, ...]:
        """``context`` not 0: the host is told of an id out of range."""
        tokens, topk = self._ids.shape
        return kernels.mark(
            context,
            state,
            self._ids.data_ptr(),
            tokens,
            topk,
            self._experts,
            self.per_rank.data_ptr(),
            self.per_expert.data_ptr(),
            self.in_rank.data_ptr(),
            self._bad.data_ptr(),
        )


class Route:
    """Who gets which tokens, to be filled by kernels: from the ids where there are any, else from the marks."""

    def __init__(
        self, in_rank: torch.Tensor, per_expert: torch.Tensor, topk_idx: torch.Tensor | None, ranks: int
    ) -> None:
        device, tokens = in_rank.device, len(in_rank)
        self._marks = None if topk_idx is None else Marks(topk_idx, len(per_expert), ranks)
        self._given = per_expert
        self.in_rank = in_rank if self._marks is None else self._marks.in_rank
        self.per_expert = per_expert.clone() if self._marks is None else self._marks.per_expert
        self.rows = torch.empty(ranks, dtype=torch.int64, device=device)
        self.lists = torch.empty(ranks, tokens, dtype=torch.int32, device=device)
        self.places = torch.empty(tokens, ranks, dtype=torch.int32, device=device)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All that kernels use."""
        marks = [] if self._marks is None else self._marks.tensors
        return [self.in_rank, self.per_expert, self._given, self.rows, self.lists, self.places, *marks]

    def steps(self, kernels: DeviceNormalKernels, addresses: tuple[int, int]) -> tuple[Callable[[], None], ...]:
        """In the order of the stream."""
        ranks, tokens = self.lists.shape
        marking = () if self._marks is None else self._marks.launches(kernels, *addresses)
        listing = kernels.list(
            self.in_rank.data_ptr(), tokens, self.rows.data_ptr(), self.lists.data_ptr(), self.places.data_ptr()
        )
        if self._marks is not None:
            return all_of(marking + listing)

        def bound() -> None:
            # the peers refuse more rows for an expert than there are rows
            most = self.rows.to(torch.int32).view(ranks, 1)
            self.per_expert.copy_(torch.minimum(self._given.view(ranks, -1), most).clamp_(min=0).view(-1))

        return (*all_of(listing), bound)

    def new_handle(self, origin: DispatchOrigin, copies: int, capacity: int) -> DeviceNormalHandle:
        """Of a dispatch that takes this route and has not run: what it receives is not known.

        Args:
            copies: most ranks that a token goes to.
            capacity: rows that dispatch is going to return, 0 where the host looks first.
        """
        return DeviceNormalHandle(
            self.rows,
            torch.zeros_like(self.rows),
            self.lists,
            self.places,
            self.in_rank,
            torch.empty(1, dtype=torch.int64, device=self.rows.device),
            capacity,
            -1,
            -1,
            copies,
            origin,
        )
