"""Who can be compared, by name: why one cannot run here, and how it is opened.

All have one boundary, what a layer sees: a dispatch begins with rows, ids and weights of the router, a combine with
what the experts made of them; the layout and the exchange of counts are inside. What a dispatch delivers differs, and
the docstrings of the modules say how: rows once per (token, rank) or once per (token, expert), counts on the host or on
the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from uccl_ep_serving.bench.card import Card
from uccl_ep_serving.bench.peers import open_deepep
from uccl_ep_serving.bench.problem import FlatProblem, LowLatencyProblem
from uccl_ep_serving.bench.subjects import Subject
from uccl_ep_serving.compare.backends.collectives import open_collective, why_not_collective
from uccl_ep_serving.compare.backends.counters import read_counters
from uccl_ep_serving.compare.backends.deepep import why_not_deepep, why_not_uccl
from uccl_ep_serving.compare.backends.deepep_v2 import open_deepep_v2, why_not_deepep_v2
from uccl_ep_serving.compare.backends.mori import open_mori, why_not_mori
from uccl_ep_serving.compare.backends.nixl_ep import open_nixl_ep, why_not_nixl_ep
from uccl_ep_serving.compare.backends.ours import open_ours, why_not_ours

__all__ = ["open_backend", "read_counters", "why_not"]


@dataclass(frozen=True, slots=True)
class _Backend:
    """Attributes:
    why_not: of (name, card). open: of the arguments of :func:`open_backend`.
    """

    why_not: Callable[[str, Card], str]
    open: Callable[[str, Card, FlatProblem, LowLatencyProblem | None, torch.device], Subject]


_OURS, _COLLECTIVE = _Backend(why_not_ours, open_ours), _Backend(why_not_collective, open_collective)
#: By name; those of ours, which name a path, begin with "uccl_ep".
_BACKENDS: Mapping[str, _Backend] = {
    **dict.fromkeys(("gloo", "gloo-gather", "mpi", "nccl", "nccl-gather"), _COLLECTIVE),
    "deepep": _Backend(lambda _, card: why_not_deepep(card), open_deepep),
    "uccl": _Backend(lambda _, card: why_not_uccl(card), open_deepep),
    "deepep_v2": _Backend(lambda _, card: why_not_deepep_v2(card), open_deepep_v2),
    "nixl_ep": _Backend(lambda _, card: why_not_nixl_ep(card), open_nixl_ep),
    "mori": _Backend(lambda _, card: why_not_mori(card), open_mori),
}


def _find(name: str) -> _Backend:
    return _OURS if name.partition(":")[0] == "uccl_ep" else _BACKENDS[name]


def why_not(name: str, card: Card) -> str:
    """Why backend ``name``, one of names.BACKENDS, cannot run in this process, "" when it can.

    Starts nothing; a package that can run here is imported.
    """
    return _find(name).why_not(name, card)


def open_backend(
    name: str, card: Card, flat: FlatProblem, low_latency: LowLatencyProblem | None, device: torch.device
) -> Subject:
    """Backend ``name``, for which :func:`why_not` was "" on every rank. Collective.

    Args:
        flat, low_latency: what is moved and must come out; ``low_latency`` is None in normal mode.
        device: of tensors of backends that have rows on a GPU.

    Raises:
        UcclEpError: our Buffer could not be opened. What other libraries raise is theirs.
    """
    return _find(name).open(name, card, flat, low_latency, device)
