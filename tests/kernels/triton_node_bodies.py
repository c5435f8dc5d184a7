"""What rank processes run in the tests of normal mode between nodes on a device, in Triton's interpreter."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.kernels import triton_normal_bodies as plain
from tests.support import node_cases, normal_cases
from tests.support.bits import same_bits
from tests.support.normal_cases import Case, Inputs, Outcome
from uccl_ep_serving import oracle
from uccl_ep_serving.buffer import Buffer
from uccl_ep_serving.control_plane.bootstrap import StoreExchange
from uccl_ep_serving.errors import ConfigError, PeerLost, PeerTimeout, UcclEpError
from uccl_ep_serving.kernels.blocks import normal_device as block
from uccl_ep_serving.modes.normal_gpu import _on_its_way
from uccl_ep_serving.protocol import pipe
from uccl_ep_serving.protocol.streams import NORMAL_CHANNELS


def checked(buffer: Buffer, rank: int, inputs: Inputs, **options: Any) -> Outcome:
    """A round trip whose rows crossed once to a node, equal to the oracle."""
    outcome = normal_cases.round_trip(buffer, inputs, rank, **options)
    normal_cases.check_rank(inputs, rank, outcome, worst=options.get("num_worst_tokens", 0))
    assert outcome.handle.about.node_ranks
    return outcome


def against_the_oracle(exchange: StoreExchange, overrides: dict[str, Any], cases: list[Case]) -> int:
    """How many cases were right."""
    buffer = plain.opened(exchange, overrides)
    for case in cases:
        checked(buffer, exchange.rank, case.inputs())
    buffer.destroy()
    return len(cases)


def without_a_look(exchange: StoreExchange, overrides: dict[str, Any]) -> None:
    """``num_worst_tokens`` and cached dispatches give what an ordinary dispatch gives."""
    buffer, rank = plain.opened(exchange, overrides), exchange.rank
    case = Case(tokens=(9, 6, 0, 4), experts=8, topk=2)
    inputs = case.inputs()
    worst = checked(buffer, rank, inputs, num_worst_tokens=36)
    ordinary = checked(buffer, rank, inputs)
    rows = len(ordinary.rows)
    assert same_bits(worst.rows[:rows], ordinary.rows)
    assert same_bits(worst.combined, ordinary.combined)
    for outcome in (worst, ordinary):
        again, idx, _, counts, handle, _ = buffer.dispatch(inputs.x[rank], handle=outcome.handle)
        assert (idx, counts) == (None, [])
        assert same_bits(again[:rows], ordinary.rows)
        back, _, _ = buffer.combine(normal_cases.expert_outputs(again, rank), handle)
        assert same_bits(back, ordinary.combined)
    with pytest.raises(ConfigError, match="arrived where num_worst_tokens promised fewer"):
        normal_cases.dispatch(buffer, inputs, rank, num_worst_tokens=1)
    checked(buffer, rank, inputs)
    buffer.destroy()


def broken_promise(exchange: StoreExchange, overrides: dict[str, Any], tokens: int) -> None:
    """More rows come than ``num_worst_tokens`` promised, more of which marks are to be kept than there is room for."""
    buffer, rank = plain.opened(exchange, overrides), exchange.rank
    normal: Any = buffer._backend.normal
    empty = torch.empty

    def used_before(*size: int, dtype: Any = None, device: Any = None) -> torch.Tensor:
        # memory comes as others have left it: of marks, everything is marked behind them
        if dtype != torch.uint8:
            return empty(*size, dtype=dtype, device=device)
        return torch.full((size[0] + 2 * tokens, *size[1:]), 255, dtype=dtype)[: size[0]]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", used_before)
        inputs = node_cases.broken_promise(buffer, normal._session, rank, tokens)
    with pytest.raises(ConfigError, match="arrived where num_worst_tokens promised fewer"):
        normal_cases.dispatch(buffer, inputs, rank)
    checked(buffer, rank, inputs)
    buffer.destroy()


def exact_sums(exchange: StoreExchange, overrides: dict[str, Any]) -> None:
    """Bits of a combine."""
    buffer = plain.opened(exchange, overrides)
    node_cases.exact_sums(buffer, exchange.rank)
    buffer.destroy()


def without_ids(exchange: StoreExchange, overrides: dict[str, Any]) -> None:
    """A layout and rows only, with a bias."""
    buffer, rank = plain.opened(exchange, overrides), exchange.rank
    inputs = Case(tokens=(5, 3, 7, 0), experts=8, topk=3).inputs()
    per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(inputs.topk_idx[rank], 8)
    assert per_node is not None
    assert per_node.tolist() == in_rank.unflatten(1, (2, 2)).any(dim=2).sum(dim=0).tolist()
    received, idx, weights, counts, handle, _ = buffer.dispatch(
        inputs.x[rank], num_tokens_per_rank=per_rank, is_token_in_rank=in_rank, num_tokens_per_expert=per_expert
    )
    there = inputs.delivered[rank]
    assert (idx, weights) == (None, None)
    assert same_bits(received, there.rows(inputs.x))
    assert counts == list(there.expert_counts)
    combined, _, _ = buffer.combine(received, handle, bias=inputs.x[rank])
    copies = in_rank.sum(dim=1, keepdim=True) + 1
    assert oracle.calc_diff(combined, inputs.x[rank].float() * copies) < 5e-6
    buffer.destroy()


def slow_rank(exchange: StoreExchange, overrides: dict[str, Any], case: Case, slow: int) -> None:
    """One rank naps before each kernel: nobody overtakes it, and it holds nobody for ever."""
    buffer, rank = plain.opened(exchange, overrides), exchange.rank
    if rank == slow:
        normal: Any = buffer._backend.normal
        for name in ("dispatch", "combine"):
            launches = getattr(normal._kernels, name)
            setattr(normal._kernels, name, functools.partial(_napping, launches))
    for _ in range(2):
        checked(buffer, rank, case.inputs())
    buffer.destroy()


def _napping(launches: Callable[..., Any], *arguments: Any) -> tuple[Napping, ...]:
    return tuple(Napping(launch) for launch in launches(*arguments))


class Napping:
    """A launch that comes late."""

    def __init__(self, launch: Any) -> None:
        self._launch = launch

    def run(self) -> None:
        time.sleep(0.1)
        self._launch.run()

    def compile(self) -> None:
        self._launch.compile()


def after_a_mask(exchange: StoreExchange, overrides: dict[str, Any]) -> None:
    """A handle outlives the nodes it was made with: rank 3 is masked, and rows go to each rank."""
    buffer, rank = plain.opened(exchange, {**overrides, "timeout": 12.0}), exchange.rank
    inputs = Case(tokens=(6, 5, 4, 3), experts=8, topk=3).inputs()
    first = checked(buffer, rank, inputs)
    if rank == 3:
        buffer.runtime.close(0.1)
        return
    with pytest.raises((PeerLost, PeerTimeout)):
        _until_lost(buffer, rank, inputs)
    buffer.low_latency_update_mask_buffer(3, True)
    rows, _, _, _, handle, _ = buffer.dispatch(inputs.rows(rank), handle=first.handle)
    there = inputs.delivered[rank]
    kept = there.source != 3
    assert same_bits(rows[kept], there.rows(inputs.x)[kept])
    normal: Any = buffer._backend.normal
    assert not _on_its_way(handle, normal._session.node_ranks("normal combine"))
    copies = oracle.in_rank(inputs.topk_idx[rank], 8, 4)[:, :3].sum(dim=1, keepdim=True)
    for received, way in ((rows, handle), (first.rows, first.handle)):
        back, _, _ = buffer.combine(received, way)
        assert oracle.calc_diff(back, inputs.x[rank].float() * copies) < 5e-6
    buffer.destroy()


def _until_lost(buffer: Buffer, rank: int, inputs: Inputs) -> None:
    for _ in range(100):
        normal_cases.round_trip(buffer, inputs, rank)


def silent(exchange: StoreExchange, overrides: dict[str, Any], who: int) -> tuple[str, int, str]:
    """Rank ``who`` opens a dispatch and does not exchange its rows. What a rank raises, and whom it names."""
    buffer, rank = plain.opened(exchange, {**overrides, "timeout": 8.0}), exchange.rank
    inputs = Case(tokens=(4, 3, 5, 4), experts=4, topk=4, lost=0.0).inputs()
    checked(buffer, rank, inputs)
    if rank == who:
        only_open(buffer)
        normal_cases.dispatch(buffer, inputs, rank)
        time.sleep(20)
        buffer.runtime.close(0.1)
        return "", -1, ""
    try:
        normal_cases.dispatch(buffer, inputs, rank)
    except UcclEpError as error:
        return type(error).__name__, getattr(error, "peer", -1), str(error)
    finally:
        buffer.destroy()
    return "", -1, ""


def only_open(buffer: Buffer) -> None:
    """From now on dispatches are opened, and their rows do not move."""
    normal: Any = buffer._backend.normal
    normal._kernels.dispatch = lambda *_: ()
    normal._session.end = lambda *_, **__: None


def forged_word(exchange: StoreExchange, overrides: dict[str, Any], word: int, rows: int) -> tuple[str, int, str]:
    """Rank 0 falls silent, and rank 1 finds a word of its pipe that cannot be. What that one raises, whom it names, and
    what it says."""
    buffer, rank = plain.opened(exchange, {**overrides, "timeout": 8.0}), exchange.rank
    inputs = Case(tokens=(4, 3, 5, 4), experts=4, topk=4, lost=0.0).inputs()
    # the windows and counters in use
    checked(buffer, rank, inputs)
    if rank == 0:
        only_open(buffer)
        normal_cases.dispatch(buffer, inputs, rank)
        time.sleep(20)
        buffer.runtime.close(0.1)
        return "", -1, ""
    if rank == 1:
        normal: Any = buffer._backend.normal
        number = int(normal._session._present.state.words[block.NUMBER])
        words = buffer.runtime.space.window_bytes[buffer.runtime.layout.pipe_words :].view(np.int64)
        words[word * NORMAL_CHANNELS * pipe.pipe_count(4)] = (number + 1) << pipe.STAMP_SHIFT | rows
    try:
        normal_cases.dispatch(buffer, inputs, rank)
    except UcclEpError as error:
        return type(error).__name__, getattr(error, "peer", -1), str(error)
    finally:
        buffer.destroy()
    return "", -1, ""


def random_steps(exchange: StoreExchange, overrides: dict[str, Any], steps: int, seed: int) -> int:
    """Operations of random sizes: what boards and lines say of one never speaks for another."""
    generator = torch.Generator().manual_seed(seed)
    buffer, rank = plain.opened(exchange, overrides), exchange.rank
    dtypes = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn)
    for step in range(steps):
        case = Case(
            tuple(torch.randint(0, 14, (exchange.size,), generator=generator).tolist()),
            experts=4 * exchange.size,
            topk=int(torch.randint(1, 5, (1,), generator=generator)),
            dtype=dtypes[step % 4],
            lost=0.4,
            seed=step,
        )
        checked(buffer, rank, case.inputs())
    buffer.destroy()
    return steps
