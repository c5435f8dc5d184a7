"""How large normal mode's regions of a window are, by the settings. Light: ``uccl-ep plan`` asks as well."""

from __future__ import annotations

from ..config import Settings
from ..errors import ConfigError
from ..protocol.layout import PAGE, NormalPlan
from ..protocol.message import round_up

__all__ = ["normal_plan"]

#: Bytes of normal mode's send staging that more ranks do not exceed while chunks can still shrink: 1 MiB chunks, 4
#: deep, up to 64 ranks. The least chunk holds eight rows of DeepSeek-V3 in bf16.
_STAGING = 256 << 20
_LEAST_CHUNK = 128 << 10


def normal_plan(ranks: int, settings: Settings, heap_bytes: int) -> NormalPlan:
    """Normal-mode sizes from the settings, the same on all ranks.

    The heap is at least the ``heap_bytes`` that the caller asked for. Staging is per peer, so with many ranks chunks
    shrink to keep the send side within ``_STAGING`` (down to ``_LEAST_CHUNK``), and the rounds grow until each slot
    holds a chunk.

    Raises:
        ConfigError: the formats cannot hold such a window.
    """
    heap = round_up(max(settings.heap_bytes, heap_bytes), PAGE)
    chunk = min(settings.chunk_bytes, max(_STAGING // (ranks * settings.chunk_depth) // PAGE * PAGE, _LEAST_CHUNK))
    rounds = max(settings.round_bytes, 2 * ranks * (chunk + PAGE))
    try:
        return NormalPlan(ranks, heap=heap, rounds=round_up(rounds, PAGE), chunk=chunk, depth=settings.chunk_depth)
    except ValueError as error:
        raise ConfigError(str(error)) from error
