"""Libraries that cannot load here, by fakes that carry their signatures: who is refused and why, what is verified."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import fake_backends
from uccl_ep_serving.bench.card import Card
from uccl_ep_serving.bench.launch import run_ranks
from uccl_ep_serving.bench.measure import back_to_back, from_rest
from uccl_ep_serving.bench.subjects import EXPERTS
from uccl_ep_serving.compare.backends import read_counters, why_not
from uccl_ep_serving.compare.backends.counters import nic_counters

ROOT = Path(__file__).parents[2]
#: Opens each library through its fake, verifies it, then spoils what it returned, one thing at a time.
RANK = """
import json, sys
from pathlib import Path
import torch, torch.distributed as dist
sys.path.insert(0, sys.argv[2])
from tests.support import fake_backends
from uccl_ep_serving.bench import subjects
from uccl_ep_serving.bench.card import Card

finished = []
subjects.finish = finished.append  # before any adapter takes it from there

from uccl_ep_serving.bench.problem import FlatProblem, LowLatencyProblem, WrongData
from uccl_ep_serving.bench.routing import Routing
from uccl_ep_serving.compare.backends import open_backend

dist.init_process_group("gloo")
rank, found, cpu = dist.get_rank(), {}, torch.device("cpu")


def spoilt(value):
    if isinstance(value, tuple):
        return (value[0], value[1] * 2)
    return value.view(torch.uint8).flip(0).view(value.dtype)


def run(subject, variant):
    for name, phase in subject.phases.items():
        finished.clear()
        phase(variant)
        # a clock that stops before the device is done measures a launch
        assert finished, f"{subject.name}: {name} does not wait for its device"


for mode, dtype, names in (
    ("normal", "bf16", ("deepep", "uccl", "deepep_v2", "nixl_ep", "mori")),
    ("normal", "fp8", ("deepep_v2", "nixl_ep")),
    ("low-latency", "bf16", ("deepep", "deepep_v2", "mori")),
    ("low-latency", "fp8", ("uccl", "nixl_ep")),
):
    card = Card(ranks=2, tokens=12, hidden=256, experts=8, topk=3, mode=mode, dtype=dtype, route="zipf:1")
    routing = Routing.draw(card)
    flat = FlatProblem(card, routing, rank)
    low_latency = LowLatencyProblem(card, routing, rank) if mode == "low-latency" else None
    for name in names:
        fake_backends.install(uccl=name == "uccl")
        subject = open_backend(name, card, flat, low_latency, cpu)
        worst = 0.0
        for variant in (0, 1, 2, 0):
            run(subject, variant)
            worst = max(worst, subject.check(variant))
        caught = []
        for what in ("_received", "_rows", "_told", "_everywhere", "_combined"):
            run(subject, 1)
            value = getattr(subject, what, None)
            if value is None or callable(value):
                continue
            setattr(subject, what, spoilt(value))
            try:
                subject.check(1)
            except WrongData as error:
                caught.append(what)
            else:
                caught.append("not noticed: " + what)
        dist.barrier()
        subject.close()
        found[f"{name} {mode} {dtype}"] = [worst, caught]
Path(sys.argv[1], f"{rank}.json").write_text(json.dumps(found))
dist.destroy_process_group()
"""


def test_every_adapter_delivers_what_the_oracle_says_and_notices_when_not(tmp_path: Path) -> None:
    run_ranks([sys.executable, "-c", RANK, str(tmp_path), str(ROOT)], 2, 100.0)
    of_flat = {"deepep_v2": ["_rows", "_told", "_combined"], "mori": ["_rows", "_told", "_everywhere", "_combined"]}
    of_low_latency = {"deepep_v2": ["_received", "_told", "_combined"], "mori": of_flat["mori"]}
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert len(found) == 12
        for who, (worst, caught) in found.items():
            name, mode, _ = who.split(" ")
            assert worst <= 1e-5, who
            expected = of_flat if mode == "normal" else of_low_latency
            assert caught == expected.get(name, ["_received", "_combined"]), who


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes this process one with GPUs and the fakes installed: ``machine(uccl=…, hip=…)``."""

    def make(uccl: bool = False, hip: str | None = None) -> None:
        packages = fake_backends.packages(uccl)
        for name, module in packages.items():
            monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 16)
        monkeypatch.setattr(torch.version, "hip", hip)

    return make


def test_what_stands_for_the_experts_is_not_timed_and_runs_before_the_last_combine() -> None:
    called: list[str] = []

    def phase(name: str) -> Any:
        return lambda variant: called.append(name)

    subject: Any = types.SimpleNamespace(phases={name: phase(name) for name in ("dispatch", EXPERTS, "combine")})
    group: Any = types.SimpleNamespace(start_together=lambda: None)
    subject.touch = lambda name, variant: called.append(f"touch {name}")
    assert set(back_to_back(subject, group, 0, 3, checked=True)) == {"dispatch", "combine"}
    assert called == ["dispatch", "combine"] * 2 + ["dispatch", EXPERTS, "combine"]
    called.clear()
    assert set(from_rest(subject, group, 0)) == {"dispatch", "combine"}
    assert called == ["touch dispatch", "dispatch", EXPERTS, "touch combine", "combine"]


LIBRARIES = ("deepep", "deepep_v2", "nixl_ep", "mori", "uccl")


class TestWhyNot:
    def test_an_installed_package_with_the_known_signatures_can_run(self, machine: Any) -> None:
        machine(hip="6.4")
        for name in ("deepep", "deepep_v2", "mori"):
            assert why_not(name, Card()) == "", name
        assert why_not("nixl_ep", Card(mode="low-latency")) == ""
        assert why_not("nixl_ep", Card(ranks=16)) == ""
        assert why_not("uccl", Card()) == "the installed deep_ep is DeepEP's own"
        machine(uccl=True)
        assert why_not("uccl", Card()) == ""
        assert why_not("deepep", Card()) == "the installed deep_ep is UCCL's: name it uccl"
        assert "no ElasticBuffer" in why_not("deepep_v2", Card())

    @pytest.mark.parametrize("name", LIBRARIES)
    def test_a_package_that_is_not_there_is_named(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        package = {"deepep": "deep_ep", "deepep_v2": "deep_ep"}.get(name, name)
        assert why_not(name, Card()) == f"{package} is not installed"

    @pytest.mark.parametrize(
        ("name", "values", "reason"),
        [
            ("deepep", {"dtype": "f32"}, "it has no f32 rows"),
            ("deepep_v2", {"dtype": "fp8", "mode": "low-latency"}, "it does not quantise"),
            ("nixl_ep", {}, "between nodes of 8 GPUs, not for 2 ranks"),
            ("nixl_ep", {"mode": "low-latency", "tokens": 5}, "no multiple of 4"),
            ("mori", {"dtype": "fp8"}, "moved as bf16 here"),
            ("mori", {}, "this torch is not ROCm's"),
            ("deepep", {"ranks": 32, "experts": 64}, "16 CUDA devices for 32 ranks"),
        ],
    )
    def test_a_card_that_it_cannot_run_is_refused(
        self, name: str, values: dict[str, Any], reason: str, machine: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
        machine()
        assert reason in why_not(name, Card(**values))

    def test_another_version_is_told_by_its_signatures(self, machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        machine()

        def dispatch(self: Any, x: torch.Tensor, topk_idx: torch.Tensor) -> None: ...

        monkeypatch.setattr(fake_backends.ElasticBuffer, "dispatch", dispatch)
        assert why_not("deepep_v2", Card()).startswith("deep_ep.ElasticBuffer.dispatch takes no topk_weights, num_")
        monkeypatch.delattr(fake_backends._Buffer, "low_latency_dispatch")
        assert "deep_ep has no Buffer.low_latency_dispatch" in why_not("deepep", Card())

    def test_a_package_that_fails_when_imported_says_how(
        self, machine: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        machine()
        (tmp_path / "deep_ep.py").write_text("raise AssertionError('No libnccl.so found')")
        monkeypatch.delitem(sys.modules, "deep_ep")
        monkeypatch.syspath_prepend(str(tmp_path))
        reason = why_not("deepep", Card())
        assert reason == "deep_ep cannot be imported: AssertionError: No libnccl.so found"

    def test_a_nic_that_is_not_there(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("uccl_ep_serving.compare.backends.ours.nic_transports", lambda settings: ("roce",))
        assert why_not("uccl_ep:efa", Card()) == "this host has no NIC for efa"
        assert why_not("uccl_ep:roce", Card()) == ""


class TestCounters:
    def test_nics_count_in_bytes_and_once_for_a_host(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for place, value in (
            ("mlx5_0/ports/1/counters/port_xmit_data", "10"),
            ("mlx5_0/ports/2/counters/port_xmit_data", "1"),
            ("rdmap0/ports/1/hw_counters/tx_bytes", "7"),
            ("rdmap0/ports/1/hw_counters/rdma_write_bytes", "N/A"),
        ):
            file = tmp_path / place
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(value + "\n")
        counted = {"mlx5_0 port_xmit_data": 44, "rdmap0 tx_bytes": 7}
        assert nic_counters(tmp_path) == counted
        monkeypatch.setattr("uccl_ep_serving.compare.backends.counters.nic_counters", lambda: counted)
        subject: Any = object()
        monkeypatch.setenv("LOCAL_RANK", "0")
        assert read_counters(subject) == counted
        monkeypatch.setenv("LOCAL_RANK", "1")
        assert read_counters(subject) == {}
