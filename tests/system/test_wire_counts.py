"""Eight ranks as if each were a node: what is on the wire, against one message for each (token, expert)."""

from __future__ import annotations

from typing import Any

import torch

from tests.support import bodies
from tests.support.ranks import Ranks
from tests.system.test_group import PATHS
from uccl_ep_serving.bench.card import Card
from uccl_ep_serving.bench.problem import LowLatencyProblem
from uccl_ep_serving.bench.routing import Routing
from uccl_ep_serving.bench.subjects import LowLatencySubject
from uccl_ep_serving.bench.wire import count_wire, per_token_expert
from uccl_ep_serving.control_plane.bootstrap import StoreExchange
from uccl_ep_serving.protocol.message import HEADER_BYTES, counts_bytes, meta_bytes

RANKS = 8
HIDDEN = 512  # as small as that, headers weigh more than in the benchmark


def card() -> Card:
    """The ``wire-ep8`` card of the benchmarks, with shorter rows."""
    return Card.from_mapping(
        {
            "name": "wire",
            "mode": "low-latency",
            "ranks": RANKS,
            "tokens": 128,
            "hidden": HIDDEN,
            "experts": 64,
            "topk": 8,
            "paths": ["shm"],
            "iterations": 1,
            "warmup": 0,
        }
    )


def counted(exchange: StoreExchange, overrides: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Messages, writes and bytes of each phase of one call, summed over all ranks."""

    def meet() -> None:
        exchange.all_gather(b"")

    def gather(values: list[float]) -> list[list[float]]:
        return [list(map(float, row.split())) for row in exchange.all_gather(" ".join(map(str, values)).encode())]

    buffer = bodies.opened(exchange, overrides)
    problem = LowLatencyProblem(card(), Routing.draw(card()), exchange.rank)
    subject = LowLatencySubject("shm", buffer, problem, torch.device("cpu"), True)
    for phase in subject.phases.values():  # the first call lays the windows out
        phase(0)
    found = count_wire(subject, buffer, meet, gather)
    buffer.destroy()
    return {phase: wire._asdict() for phase, wire in found.items()}


def test_a_token_goes_once_to_each_rank_in_one_message_for_each_rank(ranks: Ranks) -> None:
    """To the byte; and at most 3/4 of the bytes and 1/50 of the messages of one for each (token, expert)."""
    found = ranks.run(RANKS, counted, PATHS["shm"])
    assert all(one == found[0] for one in found)
    routing = Routing.draw(card())
    owners = [ids // (card().experts // RANKS) for ids in routing.topk_idx]
    rows = sum(
        int((owner == peer).any(dim=1).sum())
        for rank, owner in enumerate(owners)
        for peer in range(RANKS)
        if peer != rank
    )
    row = card().row_bytes
    messages = RANKS * (RANKS - 1)
    counts = messages * counts_bytes(card().experts // RANKS)
    expected = {"dispatch": rows * (row + meta_bytes(card().topk)) + counts, "combine": rows * row}
    naive = per_token_expert(card(), routing)
    for phase, wire in found[0].items():
        assert wire["messages"] == messages, phase
        assert wire["nbytes"] == expected[phase] + messages * HEADER_BYTES, phase
        assert wire["messages"] <= naive[phase].messages / 50
        assert wire["nbytes"] <= 0.75 * naive[phase].nbytes
