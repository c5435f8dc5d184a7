"""What looks at the dispatches of a Buffer where a setting asks for it: the recorder of traces, and advice."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..config import Settings
from ..handles import EventOverlap
from .advice import Shape, advise, device_name, transport_name
from .recorder import Recorder, open_recorder
from .trace import MODES

__all__ = ["Observer", "observer"]

_log = logging.getLogger("uccl_ep_serving")

#: Shapes about which something may be said.
_MOST_SHAPES = 64


class Observer:
    """Sees every dispatch that succeeded.

    Args:
        recorder: None: nothing is recorded.
        stats: of the Buffer, where advice is wanted on this rank.
        ranks: of the group.
    """

    def __init__(self, recorder: Recorder | None, stats: Callable[[], Mapping[str, Any]] | None, ranks: int) -> None:
        self._recorder, self._stats, self._ranks = recorder, stats, ranks
        self._advised: set[tuple[Any, ...]] = set()

    def saw(
        self,
        mode: str,
        layer: int | None,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        experts: int,
        *,
        use_fp8: bool = False,
        previous: EventOverlap | None = None,
    ) -> None:
        """Take note of a dispatch. Raises nothing, and waits for nothing.

        Args:
            mode: one of ``trace.MODES``.
            layer: of the model; None for a dispatch of no layer, of which nothing is noted.
            x: [T, H] as dispatch was given it. use_fp8: it travels as float8.
            topk_idx: int64 [T, K]. experts: E.
            previous: what the tensors are ready after, if that is not the current stream.
        """
        if layer is None:
            return
        if self._recorder is not None:
            self._recorder.record(layer, MODES.index(mode), topk_idx, experts, previous)
        if self._stats is not None:
            dtype = torch.float8_e4m3fn if use_fp8 else x.dtype
            # once for about as many tokens: a measurement speaks for twice as many
            key = (mode, x.shape[0].bit_length(), x.shape[1], experts, topk_idx.shape[1], dtype)
            if key not in self._advised and len(self._advised) < _MOST_SHAPES and x.shape[0]:
                self._advised.add(key)
                self._advise(mode, x, topk_idx.shape[1], experts, dtype)

    def _advise(self, mode: str, x: torch.Tensor, topk: int, experts: int, dtype: torch.dtype) -> None:
        assert self._stats is not None
        tokens, hidden = x.shape
        name = str(dtype).removeprefix("torch.")
        try:
            transport, device = transport_name(self._stats()), device_name(x.device)
            said = advise(Shape(mode, self._ranks, hidden, experts, topk, name, transport, device, tokens))
        except Exception as error:  # advice is worth no failure
            _log.warning("UCCL_EP_ADVICE: nothing is known of this shape (%s: %s)", type(error).__name__, error)
            return
        if said:
            _log.info("UCCL_EP_ADVICE: %s", said)

    def close(self) -> None:
        """Write what is recorded, within some seconds. May be called twice."""
        if self._recorder is not None:
            self._recorder.close()


def observer(settings: Settings, rank: int, ranks: int, stats: Callable[[], Mapping[str, Any]]) -> Observer | None:
    """What ``settings`` ask for; None for nothing. Advice is given on rank 0."""
    recorder = None
    if settings.trace:
        whole = settings.trace_what == "whole"
        recorder = open_recorder(settings.trace, every=settings.trace_every, whole=whole, rank=rank, ranks=ranks)
    wanted = stats if settings.advice and rank == 0 else None
    return Observer(recorder, wanted, ranks) if recorder is not None or wanted is not None else None
