"""A layer of each mode through a Buffer, as an engine's first request runs it, verified against the oracle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ..bench.card import Card
from ..bench.problem import VARIANTS, FlatProblem, LowLatencyProblem, WrongData
from ..bench.routing import Routing
from ..bench.subjects import LowLatencySubject, NormalSubject, Subject
from ..buffer import Buffer
from ..check import faults
from ..config import Settings
from ..errors import UcclEpError
from .job import Finding, failed
from .meeting import Meeting

__all__ = ["MODES", "try_mode"]

MODES = ("low-latency", "normal")
_TOKENS, _HIDDEN, _LOCAL_EXPERTS, _TOPK = 32, 1024, 4, 4
#: Room for the rows of all ranks; and the time that compiling on a cold node may take.
_SETTINGS: dict[str, Any] = {"heap_bytes": 64 << 20, "round_bytes": 4 << 20, "timeout": 30.0, "connect_timeout": 20.0}


def try_mode(
    mode: str, meeting: Meeting, settings: Settings, device: torch.device, say: Callable[[str], None]
) -> list[Finding]:
    """What this rank has found. Collective."""
    place = meeting.place
    part, where = f"{mode} mode", f"rank {place.rank}"
    say(part)
    card = Card(
        name="check",
        mode=mode,
        against=(),
        ranks=place.ranks,
        tokens=_TOKENS,
        hidden=_HIDDEN,
        experts=_LOCAL_EXPERTS * place.ranks,
        topk=_TOPK,
    )
    own = replace(settings, **_SETTINGS)
    try:
        buffer = Buffer(meeting.exchange(part), low_latency_mode=mode == "low-latency", settings=own)
        try:
            subject = _subject(card, place.rank, buffer, device)
            for variant in range(VARIANTS):
                for phase in subject.phases.values():
                    phase(variant)
                subject.check(variant)
        except BaseException:
            buffer.runtime.close(0.0)
            raise
        subject.close()
    except WrongData as error:
        cause, step = "a defect of a kernel or of the path between these ranks", "uccl-ep check --gpu; then report it"
        return [failed(part, where, expected="the oracle's rows", found=str(error), cause=cause, step=step)]
    except (UcclEpError, OSError, RuntimeError) as error:
        return [Finding(part, where, fault=faults.of(error, f"{where}, {part}"))]
    return [Finding(part, where, f"{VARIANTS} layers of dispatch and combine are right")]


def _subject(card: Card, rank: int, buffer: Buffer, device: torch.device) -> Subject:
    routing = Routing.draw(card)
    if card.mode == "normal":
        return NormalSubject("check", buffer, FlatProblem(card, routing, rank), device)
    return LowLatencySubject("check", buffer, LowLatencyProblem(card, routing, rank), device, True)
