"""Who gets which tokens, worked out on the device: the tensors of a layout and of a dispatch, and what fills them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from ..handles import About, NormalGpuHandle
from ..kernels.blocks.normal_device import ROUTE_TABLES, NormalOpening
from ..protocol.layout import MAX_EXPERTS
from ..protocol.streams import NORMAL_CHANNELS
from .normal_arguments import Layout
from .row_format import mark_bytes

if TYPE_CHECKING:
    from ..kernels.triton.launch import Launch
    from ..kernels.triton.normal import TritonNormalKernels

__all__ = ["Marks", "Route", "Steps", "all_of", "new_marks", "run_all"]

#: What an operation launches, in the order of its stream.
Steps = tuple[Callable[[], object], ...]


def all_of(launches: tuple[Launch, ...]) -> Steps:
    """Launches as steps."""
    return tuple(launch.run for launch in launches)


def run_all(steps: Steps) -> None:
    """Run steps in order."""
    for step in steps:
        step()


def new_marks(rows: int, node_ranks: int, like: torch.Tensor) -> torch.Tensor:
    """Room for the marks of rows that are forwarded, on the device of ``like``."""
    return torch.empty(rows, mark_bytes(node_ranks), dtype=torch.uint8, device=like.device)


def _version(tensor: torch.Tensor) -> int:
    """How often torch has written to it; torch keeps no count of tensors of its inference mode."""
    return 0 if tensor.is_inference() else tensor._version


class Marks:
    """Counts and marks of a layout, to be filled by kernels."""

    def __init__(self, topk_idx: torch.Tensor, experts: int, ranks: int) -> None:
        device = topk_idx.device
        self._ids, self._experts = topk_idx, experts
        # all that is counted, in one tensor: torch fills it in one launch
        self._counts = torch.zeros(2 + ranks + experts, dtype=torch.int32, device=device)
        # first an int64, ``wrong`` of mark_tokens; then what ranks and experts have
        self.per_rank, self.per_expert = self._counts[2 : 2 + ranks], self._counts[2 + ranks :]
        self.in_rank = torch.empty(topk_idx.shape[0], ranks, dtype=torch.bool, device=device)
        self._version = _version(topk_idx)

    def are_of(self, topk_idx: torch.Tensor, experts: int) -> bool:
        """Whether this was counted of ``topk_idx``, to which torch has not written since."""
        return topk_idx is self._ids and experts == self._experts and _version(topk_idx) == self._version

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All that kernels use."""
        return [self._ids, self._counts, self.in_rank]

    def node_counting(self, counts: torch.Tensor) -> Callable[[], None]:
        """What fills ``counts``, int32 [nodes], with the tokens that have an expert on each node."""

        def count() -> None:
            in_node = self.in_rank.unflatten(1, (len(counts), -1)).any(dim=2)
            torch.sum(in_node, dim=0, dtype=torch.int32, out=counts)

        return count

    def counting(self, kernels: TritonNormalKernels) -> tuple[Launch, ...]:
        """What counts."""
        tokens, topk = self._ids.shape
        return kernels.mark(
            self._ids.data_ptr(),
            tokens,
            topk,
            self._experts,
            self.per_rank.data_ptr(),
            self.per_expert.data_ptr(),
            self.in_rank.data_ptr(),
            self._counts.data_ptr(),
        )

    def add_to(self, opening: NormalOpening, counted: bool) -> NormalOpening:
        """``opening`` with these ids; ``counted``: what :meth:`counting` does is done."""
        wrong = self._counts.data_ptr()
        if counted:
            return opening._replace(wrong=wrong)
        return opening._replace(wrong=wrong, topk_idx=self._ids.data_ptr(), rank_counts=self.per_rank.data_ptr())


class Route:
    """Who gets which tokens, to be filled by kernels: from the ids where there are any, else from the marks.

    Args:
        last: what the last layout was counted to, None for nothing. The same ids are not counted again.
    """

    def __init__(self, layout: Layout, topk_idx: torch.Tensor | None, ranks: int, last: Marks | None) -> None:
        _, in_rank, per_expert = layout
        self._marks: Marks | None = None
        self._is_counted = False
        if topk_idx is not None:
            experts = per_expert.shape[0]
            self._is_counted = last is not None and last.are_of(topk_idx, experts)
            self._marks = last if self._is_counted else Marks(topk_idx, experts, ranks)
        self._given = in_rank, per_expert
        # later operations read it again, whatever the caller has done to its own since
        self.in_rank = torch.empty_like(in_rank) if self._marks is None else self._marks.in_rank
        self.per_expert = torch.empty_like(per_expert) if self._marks is None else self._marks.per_expert

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All that kernels use."""
        marks = [] if self._marks is None else self._marks.tensors
        return [self.in_rank, self.per_expert, *self._given, *marks]

    def add_to(self, opening: NormalOpening) -> NormalOpening:
        """``opening`` with this route."""
        opening = opening._replace(expert_counts=self.per_expert.data_ptr())
        return opening if self._marks is None else self._marks.add_to(opening, self._is_counted)

    @property
    def steps(self) -> Steps:
        """What comes before the opening."""
        if self._marks is not None:
            return ()

        def take() -> None:
            in_rank, per_expert = self._given
            self.in_rank.copy_(in_rank)
            # the peers refuse what cannot be of so many rows
            most = MAX_EXPERTS * self.in_rank.sum(dim=0).view(-1, 1)
            self.per_expert.copy_(torch.minimum(per_expert.view(len(most), -1), most).clamp(min=0).flatten())

        return (take,)

    def new_handle(self, about: About) -> NormalGpuHandle:
        """Of a dispatch that takes this route and has not run: what it receives is not known, and its capacity is 0
        where the host reads back how many rows come."""
        device, ranks, marks = self.in_rank.device, self.in_rank.shape[1], None
        if about.node_ranks:
            # each row that is forwarded goes to a rank of this node, and none of these gets more than the capacity
            marks = new_marks(about.capacity * about.node_ranks, about.node_ranks, self.in_rank)
        return NormalGpuHandle.build(
            about,
            torch.empty(ROUTE_TABLES, ranks, NORMAL_CHANNELS, dtype=torch.int64, device=device),
            self.in_rank,
            torch.empty(1, dtype=torch.int64, device=device),
            marks,
        )
