"""Backends of ``uccl-ep compare``: each delivers what the oracle says for any route, and notices when it does not."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from uccl_ep_serving.bench.card import Card
from uccl_ep_serving.bench.launch import run_ranks
from uccl_ep_serving.compare.backends import why_not
from uccl_ep_serving.compare.backends.all_to_all import expert_counts
from uccl_ep_serving.compare.names import BACKENDS
from uccl_ep_serving.proxy.transport.select import NIC_TRANSPORTS

RANK = """
import json, sys
from pathlib import Path
import torch, torch.distributed as dist
from uccl_ep_serving.bench.card import Card
from uccl_ep_serving.bench.problem import FlatProblem, WrongData
from uccl_ep_serving.bench.routing import Routing
from uccl_ep_serving.compare.backends import open_backend

dist.init_process_group("gloo")
rank, found = dist.get_rank(), {}
for dtype in ("bf16", "fp8"):
    for route in ("uniform", "zipf:2"):
        card = Card(ranks=2, tokens=24, hidden=256, experts=8, topk=4, dtype=dtype, route=route)
        flat = FlatProblem(card, Routing.draw(card), rank)
        for name in ("gloo", "gloo-gather", "uccl_ep:direct"):
            subject = open_backend(name, card, flat, None, torch.device("cpu"))
            worst = 0.0
            for variant in (0, 1, 2, 0):
                for phase in subject.phases.values():
                    phase(variant)
                worst = max(worst, subject.check(variant))
            caught = []
            for spoilt in ("_combined", "_counts", "_choices", "_all_ids"):
                if name == "uccl_ep:direct" or not hasattr(subject, spoilt):
                    continue
                for phase in subject.phases.values():
                    phase(1)
                value = getattr(subject, spoilt)
                setattr(subject, spoilt, [one + 1 for one in value] if isinstance(value, list) else value + 1)
                try:
                    subject.check(1)
                except WrongData as error:
                    caught.append(str(error).split(": ")[1].split(",")[0])
            found[f"{name} {dtype} {route}"] = [worst, caught]
            dist.barrier()
            subject.close()
Path(sys.argv[1], f"{rank}.json").write_text(json.dumps(found))
dist.destroy_process_group()
"""


def test_every_backend_delivers_what_the_oracle_says(tmp_path: Path) -> None:
    run_ranks([sys.executable, "-c", RANK, str(tmp_path)], 2, 100.0)
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert len(found) == 12
        for who, (worst, caught) in found.items():
            assert worst <= (1e-5 if "gather" in who else 5e-6)
            expected = {
                "gloo": ["combine", "dispatch", "dispatch"],
                "gloo-gather": ["combine", "dispatch"],
                "uccl_ep:direct": [],
            }
            assert caught == expected[who.split(" ")[0]], who


def test_counts_are_of_local_experts() -> None:
    ids = torch.tensor([[0, 1], [1, 3], [2, 3]])
    one = Card(ranks=2, tokens=3, hidden=128, experts=4, topk=2)
    assert expert_counts(one, ids, 0).tolist() == [1, 2]
    assert expert_counts(one, ids, 1).tolist() == [1, 2]
    assert expert_counts(one, ids.int()[:0], 1).tolist() == [0, 0]


@pytest.mark.parametrize("name", BACKENDS)
def test_who_cannot_run_says_why(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    reason = why_not(name, Card())
    transport = name.partition(":")[2]
    if name.startswith("nccl"):
        assert "no CUDA device" in reason
    elif name.startswith(("deepep", "nixl_ep", "mori", "uccl")) and not name.startswith("uccl_ep"):
        assert reason.endswith("is not installed") or "no CUDA device" in reason or "normal mode" in reason
    elif transport in NIC_TRANSPORTS:
        assert reason in ("", f"this host has no NIC for {transport}")
    elif name != "mpi":
        assert reason == ""
