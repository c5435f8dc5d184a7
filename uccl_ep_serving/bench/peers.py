"""What we are compared with, in the same run: collectives that move the same rows, and DeepEP where it runs.

A collective peer gathers rows once per (token, destination rank), exchanges them with one all-to-all whose counts are
known beforehand, and for combine sums what returns in float32. It carries no expert ids, weights or counts and unpacks
nothing per expert: less than what a dispatch does, never more.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from uccl_ep_serving.bench.any_order import AnyOrderLowLatency
from uccl_ep_serving.bench.card import Card
from uccl_ep_serving.bench.launch import local_place, mpi_missing
from uccl_ep_serving.bench.problem import FlatProblem, LowLatencyProblem, payload, sent_rows
from uccl_ep_serving.bench.subjects import NormalSubject, Phases, Subject, finish, read

__all__ = [
    "AllToAll",
    "CollectiveSubject",
    "gpus_missing",
    "mpi_all_to_all",
    "open_deepep",
    "open_peer",
    "torch_all_to_all",
    "why_not",
]

AllToAll = Callable[[torch.Tensor, torch.Tensor, Sequence[int], Sequence[int]], None]
"""``(received, sent, rows received by source, rows sent by destination)``, uint8 [n, bytes of a row]."""

#: Set by mpirun and mpiexec for the processes that they start: Open MPI, then MPICH and Intel MPI.
_MPI_RANK = ("OMPI_COMM_WORLD_RANK", "PMI_RANK")
#: Bytes of float32 sums that a core's cache holds beside what is added to them.
_SUM_BYTES = 1 << 20


def gpus_missing(card: Card) -> str:
    """What this host lacks for a GPU for each of its ranks, "" when it has them."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        return "no CUDA device"
    here = int(os.environ.get("LOCAL_WORLD_SIZE", card.ranks))
    return f"{count} CUDA devices for {here} ranks on this host" if count < here else ""


def _why_not_mpi(card: Card) -> str:
    started = any(name in os.environ for name in _MPI_RANK)
    return mpi_missing() or ("" if started else "the ranks were not started by mpirun")


def _why_not_nccl(card: Card) -> str:
    return gpus_missing(card) or ("" if dist.is_nccl_available() else "this torch has no NCCL")


def _why_not_deepep(card: Card) -> str:
    if importlib.util.find_spec("deep_ep") is None:
        return "deep_ep is not installed"
    if card.dtype not in ("bf16", "fp8"):
        return f"DeepEP has no {card.dtype} rows"
    return gpus_missing(card)


def why_not(name: str, card: Card) -> str:
    """Why peer ``name`` cannot run in this process, "" when it can. Looks only; starts nothing."""
    checks: Mapping[str, Callable[[Card], str]] = {
        "gloo": lambda card: "" if dist.is_gloo_available() else "this torch has no gloo",
        "mpi": _why_not_mpi,
        "nccl": _why_not_nccl,
        "deepep": _why_not_deepep,
    }
    return checks[name](card)


class CollectiveSubject:
    """Dispatch and combine by gather, ``all_to_all`` and a sum in ascending order of ranks.

    Args:
        name: of the peer.
        problem: whose rows to move.
        all_to_all: the collective.
        device: on which the rows lie.
        stop: called by :meth:`close`.
    """

    def __init__(
        self,
        name: str,
        problem: FlatProblem,
        all_to_all: AllToAll,
        device: torch.device,
        stop: Callable[[], None] = lambda: None,
    ) -> None:
        self.name = name
        self._problem, self._all_to_all, self._device, self._stop = problem, all_to_all, device, stop
        self._x = [one.to(device) for one in sent_rows(problem)]
        self._y = [payload(one).to(device) for one in problem.outputs]
        self._order = torch.cat(problem.send_tokens).to(device)
        self._send_rows = [len(tokens) for tokens in problem.send_tokens]
        self._gathered = self._x[0].new_zeros(len(self._order), self._x[0].shape[1])
        self._received = self._x[0].new_zeros(sum(problem.recv_rows), self._x[0].shape[1])
        self._returned = self._y[0].new_zeros(len(self._order), self._y[0].shape[1])
        hidden = problem.card.hidden
        # rows summed at once: on a CPU as many as stay in its cache, which is several times faster than all together
        self._step = max(_SUM_BYTES // (4 * hidden), 1) if device.type == "cpu" else problem.card.tokens
        self._sum = torch.zeros(min(self._step, problem.card.tokens), hidden, dtype=torch.float32, device=device)
        self._combined = torch.zeros_like(problem.combined[0], device=device)
        self._pieces = self._cut(problem.send_tokens)

    def _cut(self, send_tokens: Sequence[torch.Tensor]) -> list[list[tuple[int, int, torch.Tensor | None]]]:
        """Per piece of ``_step`` tokens and per rank: which returned rows belong to it, and to which of its tokens
        (None: to all, in order). ``send_tokens``: by rank, in ascending order, the tokens that it was sent."""
        pieces = []
        for begin in range(0, self._problem.card.tokens, self._step):
            end = min(begin + self._step, self._problem.card.tokens)
            piece: list[tuple[int, int, torch.Tensor | None]] = []
            first = 0
            for tokens in send_tokens:
                low, high = (int(torch.searchsorted(tokens, bound)) for bound in (begin, end))
                where = None if high - low == end - begin else (tokens[low:high] - begin).to(self._device)
                piece.append((first + low, first + high, where))
                first += len(tokens)
            pieces.append(piece)
        return pieces

    @property
    def phases(self) -> Phases:
        return {"dispatch": self._dispatch, "combine": self._combine}

    def _dispatch(self, variant: int) -> None:
        torch.index_select(self._x[variant], 0, self._order, out=self._gathered)
        self._all_to_all(self._received, self._gathered, self._problem.recv_rows, self._send_rows)
        finish(self._device)

    def _exchange_back(self, variant: int) -> None:
        self._all_to_all(self._returned, self._y[variant], self._send_rows, self._problem.recv_rows)

    def _combine(self, variant: int) -> None:
        self._exchange_back(variant)
        returned = self._returned.view(self._problem.outputs[variant].dtype)
        for number, piece in enumerate(self._pieces):
            target = self._combined[number * self._step : (number + 1) * self._step]
            total = self._sum[: len(target)].zero_()
            for low, high, where in piece:
                if where is None:
                    total.add_(returned[low:high])
                else:
                    total.index_add_(0, where, returned[low:high].float())
            target.copy_(total)
        finish(self._device)

    def touch(self, phase: str, variant: int) -> None:
        read(self._x[variant] if phase == "dispatch" else self._y[variant])

    def check(self, variant: int) -> float:
        card = self._problem.card
        received, scales = self._received.cpu(), None
        if card.dtype == "fp8":
            scales = received[:, card.hidden :].contiguous().view(torch.float32)
            received = received[:, : card.hidden].contiguous()
        rows = received.view(self._problem.x[variant].dtype)
        worst = self._problem.check_dispatch(self.name, variant, rows, scales)
        return max(worst, self._problem.check_combine(self.name, variant, self._combined.cpu()))

    def close(self) -> None:
        self._stop()


def torch_all_to_all(group: dist.ProcessGroup) -> AllToAll:
    def all_to_all(received: torch.Tensor, sent: torch.Tensor, come: Sequence[int], go: Sequence[int]) -> None:
        dist.all_to_all_single(received, sent, list(come), list(go), group=group)

    return all_to_all


def mpi_all_to_all(ranks: int, rank: int) -> AllToAll:
    """``Alltoallv`` of mpi4py. Raises RuntimeError when the launcher numbered the ranks differently."""
    mpi: Any = importlib.import_module("mpi4py.MPI")
    world = mpi.COMM_WORLD
    if (world.Get_size(), world.Get_rank()) != (ranks, rank):
        raise RuntimeError(f"rank {rank} of {ranks} is rank {world.Get_rank()} of {world.Get_size()} for MPI")

    def all_to_all(received: torch.Tensor, sent: torch.Tensor, come: Sequence[int], go: Sequence[int]) -> None:
        width = sent.shape[1]
        row = mpi.BYTE.Create_contiguous(width).Commit()  # counts of MPI are 32 bits: in rows, not bytes
        world.Alltoallv([sent.numpy(), list(go), row], [received.numpy(), list(come), row])
        row.Free()

    return all_to_all


def open_deepep(
    name: str, card: Card, flat: FlatProblem, low_latency: LowLatencyProblem | None, device: torch.device
) -> Subject:
    """The Buffer of the installed ``deep_ep`` in the card's mode. In low-latency mode it learns weights at combine."""
    deep_ep: Any = importlib.import_module("deep_ep")
    group = dist.new_group(backend="nccl" if device.type == "cuda" else "gloo")
    if low_latency is not None:
        size = deep_ep.Buffer.get_low_latency_rdma_size_hint(card.tokens, card.hidden, card.ranks, card.experts)
        buffer = deep_ep.Buffer(
            group, 0, size, low_latency_mode=True, num_qps_per_rank=card.experts // card.ranks, explicitly_destroy=True
        )
        return AnyOrderLowLatency(name, buffer, low_latency, device)
    row = card.hidden * 2
    configs = (deep_ep.Buffer.get_dispatch_config(card.ranks), deep_ep.Buffer.get_combine_config(card.ranks))
    nvl = max(config.get_nvl_buffer_size_hint(row, card.ranks) for config in configs)
    rdma = max(config.get_rdma_buffer_size_hint(row, card.ranks) for config in configs)
    buffer = deep_ep.Buffer(group, nvl, rdma, explicitly_destroy=True)
    return NormalSubject(name, buffer, flat, device)


def open_peer(
    name: str, card: Card, flat: FlatProblem, low_latency: LowLatencyProblem | None, device: torch.device | None = None
) -> Subject:
    """Peer ``name``, for which :func:`why_not` was "" on every rank. Collective.

    Args:
        device: overrides where nccl and deepep keep their tensors (default: the CUDA device of this local rank).
    """
    if name == "gloo":
        return CollectiveSubject("gloo", flat, torch_all_to_all(dist.new_group(backend="gloo")), torch.device("cpu"))
    if name == "mpi":
        return CollectiveSubject("mpi", flat, mpi_all_to_all(card.ranks, flat.rank), torch.device("cpu"))
    if device is None:
        device = torch.device("cuda", local_place(os.environ)[0])
        torch.cuda.set_device(device)
    if name == "nccl":
        group = dist.new_group(backend="nccl")
        return CollectiveSubject(
            "nccl", flat, torch_all_to_all(group), device, lambda: dist.destroy_process_group(group)
        )
    return open_deepep(name, card, flat, low_latency, device)
