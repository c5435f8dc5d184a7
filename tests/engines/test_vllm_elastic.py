"""Experts that move: vLLM's own load balancer rearranges them, and elastic expert parallelism changes the group."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.engines.vllm_moe import EXPERTS, Case, Layer, difference, group
from tests.support.combinations import first_of

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

InRanks = Callable[..., list[Any]]
CASE = Case(40, 128, 256, 6)


# --- everything below that starts with "engine_" runs in a process that has vLLM --------------------------------------


def replicas(placed: list[int]) -> list[list[int]]:
    """The places that hold each expert."""
    return [[place for place, expert in enumerate(placed) if expert == one] for one in range(EXPERTS)]


def physical(ids: Any, placed: list[int]) -> Any:
    """Ids of experts as ids of places: the tokens of an expert take turns over its replicas, as vLLM's router does."""
    held = replicas(placed)
    mapped = ids.clone()
    for token, row in enumerate(ids.tolist()):
        for slot, expert in enumerate(row):
            mapped[token, slot] = held[expert][token % len(held[expert])]
    return mapped


def engine_balanced(rank: int, ranks: int, rendezvous: str, low_latency: bool, moved: bool) -> dict[str, Any]:
    """Redundant experts, then a new placement by vLLM's policy; its weights travel unless ``moved`` is False."""
    import torch
    import torch.distributed as dist
    from vllm.distributed.eplb.eplb_communicator import TorchDistGlooStagedEplbCommunicator
    from vllm.distributed.eplb.policy.default import DefaultEplbPolicy
    from vllm.distributed.eplb.rebalance_execute import rearrange_expert_weights_inplace

    torch.accelerator.current_stream = lambda: SimpleNamespace(synchronize=lambda: None)
    before = [*range(EXPERTS), *range(4 * ranks)]
    with group(rank, ranks, rendezvous) as buffer:
        layer = Layer(CASE, low_latency, buffer, rank, ranks, placed=before)

        def wrong(seed: int, placed: list[int]) -> str:
            step = layer.step(seed)
            return difference(layer.apply(replace(step, ids=physical(step.ids, placed))), step.expected)

        first = wrong(0, before)
        load = torch.linspace(1.0, 50.0, EXPERTS).flip(0).reshape(1, EXPERTS)  # few experts get most tokens
        old = torch.tensor([before])
        new = DefaultEplbPolicy.rebalance_experts(load, len(before), 1, 1, ranks, old)
        weights = [layer.local1, layer.local2]
        if moved:
            rearrange_expert_weights_inplace(
                old,
                new,
                [weights],
                [torch.empty_like(one) for one in weights],
                dist.group.WORLD,
                TorchDistGlooStagedEplbCommunicator(dist.group.WORLD),
            )
        after = new[0].tolist()
        return {"before": first, "after": wrong(1, after), "other places": before != after}


def engine_resized(rank: int, ranks: int, rendezvous: str, low_latency: bool) -> list[str]:
    """Two ranks, then four, then two: each group's Buffer opens while the one before it still serves.

    As in vLLM, a process has no torch world then: groups are made one by one, outside of it.
    """
    import vllm.distributed.parallel_state as parallel_state
    from vllm.distributed.utils import (
        StatelessProcessGroup,
        stateless_destroy_torch_distributed_process_group,
        stateless_init_torch_distributed_process_group,
    )

    from uccl_ep_serving.demo.server import free_port
    from uccl_ep_serving.engines.vllm import config_hooks, layer_hooks
    from uccl_ep_serving.engines.vllm.all2all import UcclEpAll2AllManager

    config_hooks.accept_names()
    config_hooks.activate()
    layer_hooks.activate()
    written = Path(rendezvous)
    if rank == 0:
        written.with_suffix(".part").write_text(" ".join(str(free_port()) for _ in range(6)))
        written.with_suffix(".part").rename(written)
    deadline = time.monotonic() + 60
    while not written.exists():
        assert time.monotonic() < deadline, "rank 0 has not said which ports are free"
        time.sleep(0.01)
    ports = iter(map(int, written.read_text().split()))
    groups, problems = [], []

    def opened(size: int) -> Layer | None:
        """The layer of a new group of the first ``size`` ranks; None in other ranks."""
        store_port, group_port = next(ports), next(ports)
        if rank >= size:
            return None
        in_group = SimpleNamespace(rank_in_group=rank, world_size=size)
        parallel_state.get_dp_group = lambda: in_group
        parallel_state.get_tp_group = lambda: SimpleNamespace(rank_in_group=0, world_size=1)
        store = StatelessProcessGroup.create("127.0.0.1", store_port, rank, size)
        torch_group = stateless_init_torch_distributed_process_group("127.0.0.1", group_port, rank, size, "gloo")
        groups.append((UcclEpAll2AllManager(torch_group, store), torch_group))
        return Layer(CASE, low_latency, None, rank, size, manager=groups[-1][0])

    def run(layer: Layer | None, seed: int) -> None:
        if layer is not None:
            step = layer.step(seed)
            problems.append(difference(layer.apply(step), step.expected))

    def closed(layer: Layer | None) -> None:
        if layer is not None:
            manager, torch_group = groups.pop(0)
            manager.destroy()
            stateless_destroy_torch_distributed_process_group(torch_group)

    serving = opened(2)
    run(serving, 0)
    for turn, size in enumerate((4, 2), 1):
        standby = opened(size)
        run(serving, 10 * turn)
        closed(serving)
        serving = standby
        run(serving, 10 * turn + 1)
    closed(serving)
    return problems


# --- the tests --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["standard", "batched"])
def test_experts_are_found_where_the_load_balancer_has_put_them(in_engine_ranks: InRanks, form: str) -> None:
    for rank in in_engine_ranks(2, engine_balanced, form == "batched", True):
        assert rank == {"before": "", "after": "", "other places": True}


def test_experts_that_stayed_behind_are_noticed(in_engine_ranks: InRanks) -> None:
    assert all(rank["after"] for rank in in_engine_ranks(2, engine_balanced, False, False))


@pytest.mark.parametrize("form", first_of("batched", "standard"))
def test_a_group_grows_and_shrinks(in_engine_ranks: InRanks, form: str) -> None:
    problems = in_engine_ranks(4, engine_resized, form == "batched")
    assert [len(rank) for rank in problems] == [5, 5, 2, 2]
    assert not any(problem for rank in problems for problem in rank), problems
