"""A mixture-of-experts layer on every rank: vLLM's modular kernel over our prepare / finalize, and a torch reference.

The shape of the test is vLLM's own for its DeepEP backends: random tokens, weights and routing; each rank runs its
tokens through the modular kernel, and through every expert in torch.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

EXPERTS = 32
TOLERANCE = 6e-2
BLOCK = 128


@dataclass(frozen=True)
class Case:
    """One layer and one step. ``tokens`` is that of rank 0; rank r has ``max(0, tokens - skew * r)``."""

    tokens: int
    intermediate: int
    hidden: int
    topk: int
    fp8: bool = False
    skew: int = 0
    weight_input: bool = False
    padding: bool = False  # ids of every third token are -1
    round_robin: bool = False
    idle: bool = False  # no token at all on odd ranks

    def count(self, rank: int) -> int:
        """Tokens of ``rank``."""
        return 0 if self.idle and rank % 2 else max(0, self.tokens - self.skew * rank)


@dataclass
class Step:
    """Inputs of one rank and what must come out."""

    a1: torch.Tensor
    weights: torch.Tensor
    ids: torch.Tensor
    expected: torch.Tensor


def quantised(x: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 of ``x`` [..., M, N] in blocks of ``rows`` x 128, and the blocks' scales."""
    *lead, m, n = x.shape
    padded = x.new_zeros(*lead, -(-m // rows) * rows, -(-n // BLOCK) * BLOCK, dtype=torch.float32)
    padded[..., :m, :n] = x
    blocks = padded.view(*lead, padded.shape[-2] // rows, rows, padded.shape[-1] // BLOCK, BLOCK)
    scales = blocks.abs().amax(dim=(-3, -1)).clamp(min=1e-4) / 448.0
    codes = (blocks / scales[..., :, None, :, None]).view(padded.shape)[..., :m, :n]
    return codes.to(torch.float8_e4m3fn).contiguous(), scales.contiguous()


def multiplied_out(codes: torch.Tensor, scales: torch.Tensor, rows: int) -> torch.Tensor:
    """Inverse of :func:`quantised`."""
    wide = scales.repeat_interleave(rows, -2)[..., : codes.shape[-2], :]
    return codes.float() * wide.repeat_interleave(BLOCK, -1)[..., : codes.shape[-1]]


class Layer:
    """Weights of all experts (the same on every rank), and this rank's part of them in a modular kernel.

    Args:
        case: shapes and formats.
        low_latency: BatchedExperts form, else Standard.
        buffer: of the group; None where ``manager`` has one.
        placed: the expert in each physical place, as an expert load balancer leaves them; default: each in its own.
        manager: stands in for the all-to-all manager of the expert-parallel group.
    """

    def __init__(
        self,
        case: Case,
        low_latency: bool,
        buffer: Any,
        rank: int,
        ranks: int,
        placed: list[int] | None = None,
        manager: Any = None,
    ) -> None:
        import vllm.model_executor.layers.fused_moe.modular_kernel as mk
        from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig, fp8_w8a8_moe_quant_config

        from uccl_ep_serving.demo.vllm_cpu.experts import TorchBatchedExperts, TorchExperts
        from uccl_ep_serving.engines.vllm.layer_hooks import make_prepare_finalize

        self.case, self.rank, self.ranks = case, rank, ranks
        self.placed = list(range(EXPERTS)) if placed is None else placed
        generator = torch.Generator().manual_seed(case.intermediate + case.hidden)
        # results of about 0.5: with vLLM's own factors they are below the tolerance, and a lost row goes unnoticed
        self.w1 = torch.randn(EXPERTS, 2 * case.intermediate, case.hidden, generator=generator) * case.hidden**-0.5
        self.w2 = torch.randn(EXPERTS, case.hidden, case.intermediate, generator=generator) * case.intermediate**-0.5
        places = self._local_places()
        local = [self.placed[place] for place in places]
        if case.fp8:
            w1, s1 = quantised(self.w1, BLOCK)
            w2, s2 = quantised(self.w2, BLOCK)
            self.w1, self.w2 = multiplied_out(w1, s1, BLOCK), multiplied_out(w2, s2, BLOCK)
            quant = fp8_w8a8_moe_quant_config(s1[local], s2[local], block_shape=[BLOCK, BLOCK])
            self.local1, self.local2 = w1[local], w2[local]
        else:
            quant = FusedMoEQuantConfig.make()
            self.w1, self.w2 = self.w1.bfloat16(), self.w2.bfloat16()
            self.local1, self.local2 = self.w1[local], self.w2[local]
        self.expert_map = torch.full((len(self.placed),), -1, dtype=torch.int32)
        self.expert_map[places] = torch.arange(len(places), dtype=torch.int32)
        moe = moe_config(case, low_latency, rank, ranks, len(self.placed))
        tables = None
        if case.round_robin:
            dealt = torch.cat([torch.arange(EXPERTS)[one::ranks] for one in range(ranks)])
            tables = (torch.argsort(dealt), dealt, torch.tensor(local))
        if manager is None:
            manager = manager_of(buffer, rank, ranks)
        self.prepare_finalize = make_prepare_finalize(moe, quant, tables, manager)
        experts = (TorchBatchedExperts if low_latency else TorchExperts)(*expert_arguments(moe, quant, low_latency))
        self.kernel = mk.FusedMoEKernel(self.prepare_finalize, experts)

    def _local_places(self) -> list[int]:
        everywhere = list(range(len(self.placed)))
        each = len(everywhere) // self.ranks
        return everywhere[self.rank :: self.ranks] if self.case.round_robin else everywhere[self.rank * each :][:each]

    def step(self, seed: int) -> Step:
        """Random tokens and routing of this rank, and what torch makes of them."""
        case = self.case
        generator = torch.Generator().manual_seed(seed * 100 + self.rank)
        tokens = case.count(self.rank)
        a1 = torch.randn(tokens, case.hidden, generator=generator).bfloat16()
        scores = torch.randn(tokens, EXPERTS, generator=generator).softmax(-1)
        weights, ids = scores.topk(case.topk)
        weights = weights / weights.sum(1, keepdim=True)
        if case.weight_input:  # of one expert each, so they would all be 1
            weights = weights * (0.5 + torch.rand(weights.shape, generator=generator))
        if case.padding:
            ids[::3] = -1
        return Step(a1, weights, ids, self._reference(a1, weights, ids))

    def _reference(self, a1: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        x = a1 * weights.bfloat16() if self.case.weight_input else a1
        if self.case.fp8 and len(x):
            x = multiplied_out(*quantised(x, 1), 1)
        x = x.to(self.w1.dtype)
        total = torch.zeros(x.shape, dtype=torch.float32)
        for expert in range(EXPERTS):
            token, slot = (ids == expert).nonzero(as_tuple=True)
            gate, value = (x[token] @ self.w1[expert].T).chunk(2, -1)
            rows = (torch.nn.functional.silu(gate) * value) @ self.w2[expert].T
            factor = 1.0 if self.case.weight_input else weights[token, slot].unsqueeze(1)
            total.index_add_(0, token, rows.float() * factor)
        return total.bfloat16()

    def apply(self, step: Step) -> torch.Tensor:
        """The step through vLLM's modular kernel."""
        from vllm.model_executor.layers.fused_moe.activation import MoEActivation

        output: torch.Tensor = self.kernel.apply(
            hidden_states=step.a1,
            w1=self.local1,
            w2=self.local2,
            topk_ids=step.ids,
            topk_weights=step.weights,
            activation=MoEActivation.SILU,
            global_num_experts=len(self.placed),
            expert_map=self.expert_map,
            apply_router_weight_on_input=self.case.weight_input,
        )
        return output


@functools.cache
def manager_of(buffer: Any, rank: int, ranks: int) -> Any:
    """The all-to-all manager of a group whose Buffer is open."""
    from uccl_ep_serving.engines.vllm.all2all import UcclEpAll2AllManager

    manager: Any = object.__new__(UcclEpAll2AllManager)
    manager.rank, manager.world_size, manager.cpu_group = rank, ranks, buffer.group
    manager._buffer, manager._reserved = buffer, set()
    return manager


def moe_config(case: Case, low_latency: bool, rank: int, ranks: int, places: int) -> Any:
    """The layer's ``FusedMoEConfig``, as the model runner would make it; ``places`` are physical experts."""
    import inspect

    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig, RoutingMethodType

    fields = {
        "num_experts": places,
        "experts_per_token": case.topk,
        "hidden_dim": case.hidden,
        "intermediate_size": case.intermediate,
        "num_local_experts": places // ranks,
        "num_logical_experts": EXPERTS,
        "activation": MoEActivation.SILU,
        "device": "cpu",
        "routing_method": RoutingMethodType.Renormalize,
        "in_dtype": torch.bfloat16,
        "max_num_tokens": max(case.tokens, 1),
        "moe_parallel_config": FusedMoEParallelConfig(
            tp_size=1,
            pcp_size=1,
            dp_size=ranks,
            ep_size=ranks,
            tp_rank=0,
            pcp_rank=0,
            dp_rank=rank,
            ep_rank=rank,
            sp_size=1,
            use_ep=True,
            all2all_backend="uccl_ep_low_latency" if low_latency else "uccl_ep",
            enable_eplb=places > EXPERTS,
        ),
    }
    known = inspect.signature(FusedMoEConfig).parameters
    return FusedMoEConfig(**{name: value for name, value in fields.items() if name in known})


def expert_arguments(moe: Any, quant: Any, low_latency: bool) -> tuple[Any, ...]:
    """Batched experts are told how many rows an expert may get."""
    return (moe, quant, moe.max_num_tokens, moe.moe_parallel_config.ep_size) if low_latency else (moe, quant)


@contextlib.contextmanager
def group(rank: int, ranks: int, rendezvous: str) -> Iterator[Any]:
    """The rank's Buffer over gloo. Where vLLM's FP8 kernel needs a GPU, the test's own quantisation stands in."""
    import vllm.model_executor.layers.fused_moe.utils as fused_moe

    from uccl_ep_serving import Buffer
    from uccl_ep_serving.engines.vllm import config_hooks, layer_hooks

    torch.set_num_threads(1)
    config_hooks.accept_names()
    config_hooks.activate()
    layer_hooks.activate()
    fused_moe.per_token_group_quant_fp8 = lambda x, _block, **_options: quantised(x, 1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks)
    try:
        buffer = Buffer(dist.group.WORLD)
        try:
            yield buffer
        finally:
            buffer.destroy()
    finally:
        dist.destroy_process_group()


def difference(got: torch.Tensor, expected: torch.Tensor) -> str:
    """Empty when equal within the tolerance."""
    try:
        torch.testing.assert_close(got, expected, atol=TOLERANCE, rtol=TOLERANCE)
    except AssertionError as error:
        return str(error)
    return ""


def engine_layers(
    rank: int, ranks: int, rendezvous: str, cases: list[Case], low_latency: bool, direct: bool
) -> list[str]:
    """Run every case twice; returns what differs, and how, by case."""
    import os

    os.environ["UCCL_EP_DIRECT"] = "1" if direct else "0"
    problems = []
    with group(rank, ranks, rendezvous) as buffer:
        for case in cases:
            layer = Layer(case, low_latency, buffer, rank, ranks)
            for seed in range(2):
                step = layer.step(seed)
                problem = difference(layer.apply(step), step.expected)
                if problem:
                    problems.append(f"rank {rank}, {case}, step {seed}: {problem}")
    return problems


def engine_lossy(rank: int, ranks: int, rendezvous: str, low_latency: bool) -> bool:
    """Negative control: with the slots of other ranks' experts dropped, does the result differ?"""
    with group(rank, ranks, rendezvous) as buffer:
        layer = Layer(Case(64, 128, 256, 6), low_latency, buffer, rank, ranks)
        step = layer.step(0)
        elsewhere = (step.ids // (EXPERTS // ranks)) != rank
        lossy = replace(step, ids=step.ids.masked_fill(elsewhere, -1))
        return bool(difference(layer.apply(lossy), step.expected))


def engine_two_steps_in_flight(rank: int, ranks: int, rendezvous: str, low_latency: bool) -> list[str]:
    """Dispatch of both micro-batches before either is received, combine likewise, as dual-batch overlap does."""
    from uccl_ep_serving.engines.vllm import high_throughput
    from uccl_ep_serving.engines.vllm import low_latency as low

    module = low if low_latency else high_throughput
    with group(rank, ranks, rendezvous) as buffer:
        case = Case(32, 128, 256, 2)
        layer = Layer(case, low_latency, buffer, rank, ranks)
        made, experts = layer.prepare_finalize, layer.kernel.impl.fused_experts
        problems = []
        for round_ in range(3):
            steps = [layer.step(10 * round_ + one) for one in range(2)]
            prepared, outputs, finished = [], [torch.empty_like(step.a1) for step in steps], []
            for number, step in enumerate(steps):
                module.dbo_current_ubatch_id = lambda number=number: number
                sent = made.prepare_async(
                    step.a1, step.weights, step.ids, EXPERTS, layer.expert_map, False, experts.quant_config, True
                )
                prepared.append(sent if isinstance(sent, tuple) else (lambda: None, sent))
            for number, step in enumerate(steps):
                module.dbo_current_ubatch_id = lambda number=number: number
                hook, receiver = prepared[number]
                hook()
                rows, _, meta, ids, weights = receiver()
                if ids is not None and not ((ids >= 0) & (ids < EXPERTS)).all():
                    problems.append("an id that is no global expert reached the experts")
                ids = step.ids if ids is None else ids
                weights = step.weights if weights is None else weights
                out = torch.zeros(rows.shape, dtype=torch.bfloat16)
                experts.apply(
                    output=out,
                    hidden_states=rows,
                    w1=layer.local1,
                    w2=layer.local2,
                    topk_weights=weights,
                    topk_ids=ids,
                    expert_map=layer.expert_map,
                    a1q_scale=None,
                    expert_tokens_meta=meta,
                    apply_router_weight_on_input=False,
                )
                sent = made.finalize_async(
                    outputs[number], out, weights, ids, False, experts.finalize_weight_and_reduce_impl()
                )
                finished.append(sent if isinstance(sent, tuple) else (lambda: None, sent))
            for hook, receiver in finished:
                hook()
                receiver()
            problems += [difference(outputs[number], step.expected) for number, step in enumerate(steps)]
    return [problem for problem in problems if problem]
