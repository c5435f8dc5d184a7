"""The long run in small, and that it fails when something does not hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from tests.soak import soak_adversarial, soak_command, soak_layers
from tests.soak.soak_samples import Sample, growth, not_flat
from tests.support import ll_cases
from tests.support.ranks import Ranks
from uccl_ep_serving.bench.machine import describe
from uccl_ep_serving.errors import PeerLost, UcclEpError
from uccl_ep_serving.proxy.transport.fake import Adversary

MIB = 1 << 20


@pytest.mark.long
@pytest.mark.timeout(240)
def test_a_small_run_holds_and_writes_its_figures(tmp_path: Path) -> None:
    output = tmp_path / "soak.json"
    arguments = ["--cases", "24", "--layers", "96", "--ranks", "2", "--stretch", "8", "--output", str(output)]
    done = CliRunner().invoke(soak_command.app, arguments)
    assert done.exit_code == 0, done.output
    assert "everything held" in done.output
    found = json.loads(output.read_text())
    assert sum(found["adversarial"]["ends"].values()) == 24
    assert found["adversarial"]["ends"]["recovers: finished"] > 5
    assert found["layers"]["transports"] == ["tcp"]
    assert len(found["layers"]["by_rank"]) == 2
    for part in ("adversarial", "layers"):
        assert found[part]["machine"]["commit"] == describe()["commit"]
        assert len(found[part]["machine"]["load_after"]) == 3
    for rank in found["layers"]["by_rank"]:
        assert rank["messages_sent"] > 96
        assert len(rank["held"]["threads"]) == len(rank["held"]["descriptors"]) == 1


def broken_check(_case: Any, _inputs: Any, _rank: int, _combined: torch.Tensor) -> None:
    raise AssertionError("differs")


@pytest.fixture
def wrong_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every low-latency result counts as wrong."""
    monkeypatch.setattr(ll_cases, "check_combined", broken_check)


def test_wrong_data_fails_the_case_and_names_its_seed(wrong_data: None) -> None:
    seed = next(seed for seed in range(100) if soak_adversarial.draw(seed).trouble == "recovers" and _mixed(seed))
    done = soak_adversarial.stretch(None, range(seed, seed + 1), 1)
    assert done.failure.startswith(f"seed {seed}: recovers")
    assert "differs" in done.failure


def _mixed(seed: int) -> bool:
    return isinstance(soak_adversarial.draw(seed).operations[0], ll_cases.Case)


def test_a_failure_ends_with_the_command_that_repeats_it() -> None:
    class Pool:
        """Answers every stretch with a failure of its second seed."""

        def run(self, _size: int, _body: Any, seeds: range, _repeat: int, timeout: float) -> list[Any]:
            held = Sample(0, 0, 1, 1)
            return [soak_adversarial.Stretch(held, failure=f"seed {seeds[1]}: kill, 2 ranks\nFailed: no name")]

    with pytest.raises(soak_command.SoakFailed, match=r'make soak ARGS="--layers 0 --seed 41 --cases 1 --repeat 20"'):
        soak_command.run_cases(Pool(), 40, 100, 1, MIB)  # type: ignore[arg-type]


def test_wrong_layer_is_named_with_its_rank() -> None:
    pool = Ranks()
    expected = r"(?s)rank \d, layer 4\d.*--seed 3 --ranks 2 --first-layer 4"
    plan = soak_layers.LayerPlan(3, 2, 40, {"direct": True, "heap_bytes": 8 * MIB})
    try:
        pool.run(2, soak_layers.stretch, plan, 0, 4, False)
        with pytest.raises(soak_command.SoakFailed, match=expected):
            soak_command.run_layers(_Spoilt(pool), plan, 12, 1, 4, MIB)  # type: ignore[arg-type]
    finally:
        pool.close()


class _Spoilt:
    """A pool whose ranks find that combine differs."""

    def __init__(self, pool: Ranks) -> None:
        self._pool = pool

    def run(self, size: int, _body: Any, *arguments: Any, timeout: float) -> list[Any]:
        return self._pool.run(size, spoilt_stretch, *arguments, timeout=timeout)


def spoilt_stretch(*arguments: Any) -> Any:
    """A stretch of layers for which the oracle says something else."""
    state = soak_layers._state
    assert state is not None
    state.pool.low_latency = [(*one[:3], one[3] + 1) for one in state.pool.low_latency]
    return soak_layers.stretch(*arguments)


def case_of(trouble: str, **adversary: Any) -> soak_adversarial.AdversarialCase:
    """Some case, with another trouble and adversary."""
    case = soak_adversarial.draw(0)
    fields = {name: getattr(case, name) for name in case.__dataclass_fields__}
    return soak_adversarial.AdversarialCase(**{**fields, "trouble": trouble, "adversary": Adversary(**adversary)})


@pytest.mark.parametrize(
    ("case", "errors", "complaint"),
    [
        (case_of("recovers"), {0: PeerLost("rank 1 is gone", peer=1)}, "this wire loses nothing"),
        (case_of("kill", kill=2, kill_after=3), {0: PeerLost("rank 1 is gone", peer=1)}, "no error names it"),
        (case_of("lose", lose=0.1), {0: UcclEpError("something")}, "must end in the error of a peer"),
    ],
)
def test_ends_that_the_wire_does_not_explain(
    case: soak_adversarial.AdversarialCase, errors: dict[int, UcclEpError], complaint: str
) -> None:
    with pytest.raises(soak_adversarial.Failed, match=complaint):
        soak_adversarial._judge(case, soak_adversarial.Result(0.0, 0.0, [], errors))


def test_a_seed_gives_one_case() -> None:
    for seed in range(200):
        assert soak_adversarial.draw(seed) == soak_adversarial.draw(seed)
    cases = [soak_adversarial.draw(seed) for seed in range(2000)]
    assert {case.trouble for case in cases} == {"recovers", "drop", "lose", "kill"}
    assert {case.ranks for case in cases} == {2, 3, 4, 5, 8}
    assert len({case.settings.channels for case in cases}) == 5


def test_growth_is_seen() -> None:
    flat = [Sample(step, 100 * MIB + (step % 3) * MIB, 5, 30) for step in range(40)]
    assert not_flat(flat, 2 * MIB) == []
    warming = [Sample(step, min(step, 8) * 10 * MIB, 5, 30) for step in range(40)]
    assert not_flat(warming, 2 * MIB) == []
    growing = [Sample(step, 100 * MIB + step * MIB, 5, 30) for step in range(40)]
    assert growth(growing) == 20 * MIB
    assert "memory grew by 20.0 MiB" in not_flat(growing, 8 * MIB)[0]
    leaking = [Sample(step, 100 * MIB, 5 + step // 30, 30 + step // 39) for step in range(40)]
    assert [text.split()[0] for text in not_flat(leaking, 8 * MIB)] == ["threads", "descriptors"]
    with pytest.raises(ValueError, match="eight at least"):
        not_flat(flat[:7], MIB)
