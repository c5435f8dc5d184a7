"""Messages and bytes on the wire: what our counters say, and what one message per (token, expert) would be."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

from uccl_ep_serving.bench.card import Card
from uccl_ep_serving.bench.routing import Routing
from uccl_ep_serving.bench.subjects import EXPERTS, Subject, timed

__all__ = ["Wire", "count_wire", "per_token_expert"]

#: DeepEP's low-latency message: a 16-byte header (int4) before the row; combine sends the bare row
#: (csrc/kernels/internode_ll.cu). Its per-expert count messages are left out here, which favours it.
_DEEPEP_HEADER = 16
#: Calls of each phase that are counted.
_CALLS = 4
_SETTLE_SECONDS = 5.0


class Wire(NamedTuple):
    """Per call of a phase, summed over all ranks.

    Attributes:
        messages: messages sent. writes: writes they were split into. nbytes: payload bytes, headers of ours included.
    """

    messages: float
    writes: float
    nbytes: float


def per_token_expert(card: Card, routing: Routing) -> dict[str, Wire]:
    """What DeepEP's low-latency kernels send for this routing over the network, ranks being nodes of their own.

    One message for each (token, expert of another rank), in dispatch and in combine; rows of a combine are in the
    card's combine dtype.
    """
    local = card.experts // card.ranks
    pairs = sum(int(((ids >= 0) & (ids // local != rank)).sum()) for rank, ids in enumerate(routing.topk_idx))
    return {
        "dispatch": Wire(pairs, pairs, pairs * (card.row_bytes + _DEEPEP_HEADER)),
        "combine": Wire(pairs, pairs, pairs * card.combine_row_bytes),
    }


def _settled(buffer: Any) -> tuple[int, int, int]:
    """(messages, writes, bytes) sent so far, once everything that was enqueued has completed locally.

    Raises:
        TimeoutError: something is still under way after five seconds.
    """
    deadline = time.monotonic() + _SETTLE_SECONDS
    while True:
        stats = buffer.stats()
        waiting = [stats.get(name, 0) for name in ("ring_depth", "queue_depth", "writes_in_flight")]
        if not any(waiting):
            return tuple(int(stats.get(name, 0)) for name in ("messages_sent", "writes", "bytes_sent"))  # type: ignore[return-value]
        if time.monotonic() > deadline:
            raise TimeoutError(f"the proxies of rank {stats['rank']} do not come to rest: {waiting}")
        time.sleep(0.001)


def count_wire(
    subject: Subject, buffer: Any, meet: Callable[[], None], gather: Callable[[list[float]], list[list[float]]]
) -> dict[str, Wire]:
    """Run the phases of ``subject`` and read the counters of its Buffer around each.

    Args:
        meet: a barrier. gather: every rank's list of numbers, by rank.
    """
    totals = {name: [0.0, 0.0, 0.0] for name in timed(subject)}
    for call in range(_CALLS):
        for name, phase in subject.phases.items():
            if name == EXPERTS:
                phase(call % 3)
                continue
            meet()
            before = _settled(buffer)
            # no rank may start before every rank has read its counters: receiving makes a rank send credits
            meet()
            phase(call % 3)
            meet()
            after = _settled(buffer)
            for index in range(3):
                totals[name][index] += after[index] - before[index]
        subject.check(call % 3)
    counted = {}
    for name, total in totals.items():
        sums = [sum(column) / _CALLS for column in zip(*gather(total), strict=True)]
        counted[name] = Wire(*sums)
    return counted
