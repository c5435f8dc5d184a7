"""What rank processes run in the tests of normal mode's Triton kernels, in Triton's interpreter."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import random
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support import bodies, ll_cases, normal_cases
from tests.support.bits import same_bits
from tests.support.device_model import Device, begin_capture, install
from tests.support.interpreter import interpret
from tests.support.ll_replay import RecordingOrder
from tests.support.normal_cases import Case
from uccl_ep_serving.buffer import Buffer, Config
from uccl_ep_serving.control_plane.bootstrap import StoreExchange
from uccl_ep_serving.errors import ConfigError, UcclEpError
from uccl_ep_serving.gpu.streams import GpuOrder
from uccl_ep_serving.handles import MADE_ON_CPU, EventOverlap, wait_for
from uccl_ep_serving.kernels.blocks import normal_device as block
from uccl_ep_serving.kernels.blocks.normal_device import ROUTE_SEND
from uccl_ep_serving.modes.normal_gpu import NormalGpu
from uccl_ep_serving.modes.normal_gpu_outputs import Outputs
from uccl_ep_serving.modes.normal_gpu_route import Route


def opened(exchange: StoreExchange, overrides: dict[str, Any], device: str = "interpreter") -> Buffer:
    """A Buffer whose kernels are Triton's, interpreted, or the CPU's."""
    interpret()
    return bodies.opened(exchange, {"device": device, "timeout": 120.0, "connect_timeout": 120.0, **overrides})


def run_cases(buffer: Buffer, rank: int, cases: list[Case]) -> int:
    """Dispatch bit-exact, combine within DeepEP's tolerances, for every case on one Buffer, which is then closed."""
    for case in cases:
        inputs = case.inputs()
        outcome = normal_cases.round_trip(buffer, inputs, rank)
        normal_cases.check_rank(inputs, rank, outcome)
    buffer.destroy()
    return len(cases)


def against_the_oracle(exchange: StoreExchange, overrides: dict[str, Any], cases: list[Case]) -> int:
    """All ranks run Triton's kernels."""
    return run_cases(opened(exchange, overrides), exchange.rank, cases)


def after_months(exchange: StoreExchange, overrides: dict[str, Any], cases: list[Case], operations: int) -> int:
    """The same once so many operations more have run, by what the ranks count."""
    buffer, rank, inputs = opened(exchange, overrides), exchange.rank, cases[0].inputs()
    normal_cases.check_rank(inputs, rank, normal_cases.round_trip(buffer, inputs, rank))
    exchange.all_gather(b"all of them are over")
    normal: Any = buffer._backend.normal
    normal._session._present.state.words[block.NUMBER] += operations
    return run_cases(buffer, rank, cases)


def landed(buffer: Buffer) -> tuple[bool, bool]:
    """Whether rows have landed in the window in device memory, and in that in host memory."""
    space: Any = buffer._backend.gpu.space()  # type: ignore[union-attr]
    assert space.own_window
    assert not space.on_device
    twin = np.frombuffer((ctypes.c_uint8 * space._window.nbytes).from_address(space._window.own), np.uint8)
    begin = buffer.runtime.layout.normal_rounds
    return bool(twin[begin:].any()), bool(buffer.runtime.window_bytes[begin:].any())


def in_two_windows(exchange: StoreExchange, overrides: dict[str, Any], cases: list[Case]) -> list[tuple[bool, bool]]:
    """Near ranks write device memory, proxies host memory. Where rows have landed by the end of each case."""
    buffer, found = opened(exchange, overrides), []
    for case in cases:
        inputs = case.inputs()
        outcome = normal_cases.round_trip(buffer, inputs, exchange.rank)
        normal_cases.check_rank(inputs, exchange.rank, outcome)
        found.append(landed(buffer))
    buffer.destroy()
    return found


def between_low_latency(
    exchange: StoreExchange, overrides: dict[str, Any], case: Case
) -> tuple[int, tuple[bool, bool]]:
    """A round trip of normal mode after one of low latency, and once more after another; both in one epoch. Ranks of a
    node that rows crossed to once, and where rows have landed."""
    buffer, rank = opened(exchange, overrides), exchange.rank
    inputs, near = case.inputs(), ll_cases.Case(ranks=buffer.group_size, tokens=4, experts=4, topk=2, counts=(4, 3))
    for _ in range(2):
        in_low_latency(buffer, near)
        outcome = normal_cases.round_trip(buffer, inputs, rank)
        normal_cases.check_rank(inputs, rank, outcome)
    assert buffer.runtime.epoch == 1
    crossed, found = outcome.handle.about.node_ranks, landed(buffer)
    buffer.destroy()
    return crossed, found


def beside_the_cpu_kernels(exchange: StoreExchange, overrides: dict[str, Any]) -> str:
    """Rank 0 runs Numba's kernels and rank 1 Triton's, which is refused. What was raised."""
    buffer = mixed(exchange, overrides, exchange.rank == 0)
    with pytest.raises(ConfigError) as raised:
        normal_cases.dispatch(buffer, Case(tokens=(5, 3), experts=4, topk=2).inputs(), exchange.rank)
    buffer.destroy()
    return str(raised.value)


def mixed(exchange: StoreExchange, overrides: dict[str, Any], cpu: bool) -> Buffer:
    """A Buffer of a group of which some ranks run Numba's kernels (``cpu``) and the others Triton's."""
    buffer = opened(exchange, overrides, "cpu")
    if not cpu:
        from uccl_ep_serving.gpu.context import GpuContext

        buffer._backend = buffer._backend._replace(
            normal=NormalGpu(buffer.runtime, GpuContext(buffer.runtime, torch.device("cpu")))
        )
    return buffer


def failed_launch(exchange: StoreExchange, overrides: dict[str, Any], phase: str) -> str:
    """A kernel of ``phase`` cannot be launched. In a capture that is nothing to the group; what the next call is told
    after any other."""
    buffer, rank = opened(exchange, overrides), exchange.rank
    # after the choice of the interpreter
    from uccl_ep_serving.kernels.triton.launch import Launch

    inputs = Case(tokens=(5, 3), experts=4, topk=2).inputs()
    layout = buffer.get_dispatch_layout(inputs.topk_idx[rank], inputs.case.experts)
    first = normal_cases.round_trip(buffer, inputs, rank, num_worst_tokens=8)

    def step() -> None:
        if phase == "combine":
            buffer.combine(first.rows, first.handle)
        elif phase == "cached dispatch":
            buffer.dispatch(inputs.x[rank], handle=first.handle)
        else:
            per_rank, _, per_expert, in_rank, _ = layout
            given: dict[str, Any] = {"topk_idx": inputs.topk_idx[rank], "topk_weights": inputs.topk_weights[rank]}
            buffer.dispatch(
                inputs.x[rank],
                num_tokens_per_rank=per_rank,
                is_token_in_rank=in_rank,
                num_tokens_per_expert=per_expert,
                num_worst_tokens=8,
                **given,
            )

    def refused(one: Launch) -> None:
        raise RuntimeError("out of resources")

    normal: Any = buffer._backend.normal
    step()
    for capturing in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Launch, "run", refused)
            patch.setattr(normal._gpu.order, "capturing", capturing, raising=False)
            with pytest.raises(RuntimeError, match="out of resources"):
                step()
        if capturing:
            step()
    with pytest.raises(UcclEpError) as caught:
        step()
    buffer.destroy()
    return str(caught.value)


def without_a_look(exchange: StoreExchange, overrides: dict[str, Any]) -> None:
    """``num_worst_tokens`` and cached dispatches give what an ordinary dispatch gives."""
    buffer, rank = opened(exchange, overrides), exchange.rank
    case = Case(tokens=(9, 6), experts=4, topk=2)
    inputs = case.inputs()
    worst = normal_cases.round_trip(buffer, inputs, rank, num_worst_tokens=18)
    normal_cases.check_rank(inputs, rank, worst, worst=18)
    plain = normal_cases.round_trip(buffer, inputs, rank)
    rows = len(plain.rows)
    assert same_bits(worst.rows[:rows], plain.rows)
    assert same_bits(worst.combined, plain.combined)
    for outcome in (worst, plain):
        again, idx, _, counts, _, _ = buffer.dispatch(inputs.x[rank], handle=outcome.handle)
        assert idx is None
        assert counts == []
        assert same_bits(again[:rows], plain.rows)
        back, _, _ = buffer.combine(normal_cases.expert_outputs(again, rank), outcome.handle)
        assert same_bits(back, plain.combined)
    with pytest.raises(ConfigError, match="arrived where num_worst_tokens promised fewer"):
        normal_cases.dispatch(buffer, inputs, rank, num_worst_tokens=2)
    normal_cases.check_rank(inputs, rank, normal_cases.round_trip(buffer, inputs, rank))
    buffer.destroy()


def broken_promise(exchange: StoreExchange, overrides: dict[str, Any]) -> None:
    """More rows come than ``num_worst_tokens`` promised, and the combine is launched before the host knows, as on a
    device: what lies behind its rows and weights, which are part of larger tensors, is not summed."""
    buffer, rank = opened(exchange, overrides), exchange.rank
    inputs = Case(tokens=(4, 4), experts=4, topk=2, lost=0.0, hidden=128).inputs()
    for own, ids in enumerate(inputs.topk_idx):
        ids[:] = torch.tensor([2 * own, 2 * own + 1])
    normal: Any = buffer._backend.normal
    combined, factors = normal_cases.combine_unaware(buffer, normal._session, inputs, rank, 4)
    assert combined.tolist() == [[1.0] * 128] + [[0.0] * 128] * 3
    assert factors.tolist() == [[0.5] * 2] + [[0.0] * 2] * 3
    with pytest.raises(ConfigError, match="arrived where num_worst_tokens promised fewer"):
        normal_cases.dispatch(buffer, inputs, rank)
    normal_cases.check_rank(inputs, rank, normal_cases.round_trip(buffer, inputs, rank))
    buffer.destroy()


def without_ids(exchange: StoreExchange, overrides: dict[str, Any]) -> None:
    """A layout and rows only."""
    buffer, rank = opened(exchange, overrides), exchange.rank
    inputs = Case(tokens=(5, 3), experts=4, topk=2).inputs()
    inputs.topk_idx[0][1] = 3  # a token may name an expert twice
    per_rank, nodes, per_expert, in_rank, _ = buffer.get_dispatch_layout(inputs.topk_idx[rank], 4)
    assert nodes is None
    received, idx, weights, counts, handle, _ = buffer.dispatch(
        inputs.x[rank], num_tokens_per_rank=per_rank, is_token_in_rank=in_rank, num_tokens_per_expert=per_expert
    )
    there = inputs.delivered[rank]
    copies = in_rank.sum(dim=1, keepdim=True)
    in_rank.logical_not_()  # the caller counts its next batch into the same tensors
    assert idx is None
    assert weights is None
    assert same_bits(received, there.rows(inputs.x))
    assert counts == list(there.expert_counts)
    combined, none, _ = buffer.combine(received, handle)
    assert none is None
    assert torch.equal(combined.float(), (inputs.x[rank].float() * copies).bfloat16().float())
    assert same_bits(buffer.dispatch(inputs.x[rank], handle=handle)[0], received)
    buffer.destroy()


def handles(exchange: StoreExchange, overrides: dict[str, Any]) -> None:
    """The tensors of a handle are the handle, copied or not, also for another Buffer; those of the CPU's are not."""
    buffer, rank = opened(exchange, overrides), exchange.rank
    inputs = Case(tokens=(5, 3), experts=4, topk=2).inputs()
    first = normal_cases.round_trip(buffer, inputs, rank)
    copies = tuple(one.clone() for one in first.handle)
    sums = buffer.combine(first.rows, first.handle)[0]
    again, *_, handle, _ = buffer.dispatch(inputs.rows(rank), handle=copies)
    assert same_bits(again, first.rows)
    assert all(same_bits(buffer.combine(again, one)[0], sums) for one in (copies, tuple(handle)))
    other = opened(exchange, overrides)
    assert same_bits(other.combine(again, first.handle)[0], sums)
    about = torch.tensor(first.handle.about._replace(kind=MADE_ON_CPU))
    with pytest.raises(ConfigError, match="handle must come from a normal-mode dispatch on"):
        other.combine(again, (about, *copies[1:]))
    buffer.destroy()
    other.destroy()


def layouts(exchange: StoreExchange, overrides: dict[str, Any]) -> dict[str, int]:
    """How often each of some dispatches counts its layout; all of them get what their ids say."""
    buffer, rank = opened(exchange, overrides), exchange.rank
    # after the choice of the interpreter
    from uccl_ep_serving.kernels.triton.launch import Launch

    inputs, others = (Case(tokens=(5, 3), experts=4, topk=2, seed=seed).inputs() for seed in range(2))
    ids, counted = inputs.topk_idx[rank].clone(), dict[str, int]()

    def dispatch(name: str, layout: Any, wanted: normal_cases.Inputs = inputs) -> None:
        per_rank, _, per_expert, in_rank, _ = layout
        with pytest.MonkeyPatch.context() as patch:
            launched: list[Launch] = []
            run = Launch.run
            patch.setattr(Launch, "run", lambda launch: (launched.append(launch), run(launch)))
            rows, topk_idx, _, counts, _, _ = buffer.dispatch(
                inputs.x[rank],
                num_tokens_per_rank=per_rank,
                is_token_in_rank=in_rank,
                num_tokens_per_expert=per_expert,
                topk_idx=ids,
                topk_weights=inputs.topk_weights[rank],
            )
        opening, moving = launched
        assert (opening.kernel.__name__, moving.kernel.__name__) == ("open_rows", "dispatch_rows")
        counted[name] = int(opening.arguments[-2:] != (0, 0))
        there = wanted.delivered[rank]
        assert same_bits(rows, there.rows(inputs.x))
        assert same_bits(topk_idx, there.topk_idx)
        assert counts == list(there.expert_counts)

    last = buffer.get_dispatch_layout(ids, 4)
    dispatch("of the last layout", last)
    dispatch("of it again", last)
    last = buffer.get_dispatch_layout(ids, 4)
    last[2].fill_(100)
    last[3].fill_(False)
    dispatch("of one that was written to", last)
    last = buffer.get_dispatch_layout(ids, 4)
    ids.copy_(others.topk_idx[rank])
    dispatch("of ids that were written to", last, others)
    with torch.inference_mode():
        ids = ids.clone()
        last = buffer.get_dispatch_layout(ids, 4)
        dispatch("of ids whose writes are not counted", last, others)
    buffer.destroy()
    return counted


def biases(exchange: StoreExchange, overrides: dict[str, Any]) -> None:
    """One bias and two, alignment of the counts, and a handle that belongs to somebody else."""
    buffer, rank = opened(exchange, overrides), exchange.rank
    inputs = Case(tokens=(5, 3), experts=4, topk=2, dtype=torch.float32).inputs()
    received, _, _, counts, handle, _ = normal_cases.dispatch(buffer, inputs, rank, expert_alignment=8)
    assert counts == [-(-count // 8) * 8 for count in inputs.delivered[rank].expert_counts]
    first, second = torch.ones_like(inputs.x[rank]), torch.full_like(inputs.x[rank], 2.0)
    plain, _, _ = buffer.combine(received, handle)
    one, _, _ = buffer.combine(received, handle, bias=first)
    two, _, _ = buffer.combine(received, handle, bias=(first, second))
    assert torch.equal(one, plain + first)
    assert torch.equal(two, plain + first + second)
    with pytest.raises(ConfigError, match="rows that the dispatch of this handle returned"):
        buffer.combine(received[:-1], handle)
    buffer.destroy()


def different(exchange: StoreExchange, overrides: dict[str, Any]) -> str:
    """Rank 1 dispatches another hidden size; then both go on. Returns what was raised."""
    buffer, rank = opened(exchange, overrides), exchange.rank
    case = Case(tokens=(4, 3), experts=4, topk=2)
    wrong = replace(case, hidden=512).inputs() if rank else case.inputs()
    with pytest.raises(ConfigError) as raised:
        normal_cases.dispatch(buffer, wrong, rank)
    run_cases(buffer, rank, [case])
    return str(raised.value)


def parted(exchange: StoreExchange, overrides: dict[str, Any]) -> list[str]:
    """Rank 1 dispatches to other experts, and nobody reads that back: a host that is ahead combines from the handle.
    What dispatch and combine raise. Then both go on."""
    buffer, rank = opened(exchange, overrides), exchange.rank
    case = Case(tokens=(4, 3), experts=4, topk=2)
    wrong = replace(case, experts=8).inputs() if rank else case.inputs()
    handles, new_handle = [], Route.new_handle

    def stale(route: Route, *arguments: Any) -> Any:
        """Its number is what another dispatch has left in the same memory, on all ranks."""
        handles.append(new_handle(route, *arguments))
        handles[-1].number.fill_(1)
        return handles[-1]

    said = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Route, "new_handle", stale)
        with pytest.raises(ConfigError) as raised:
            normal_cases.dispatch(buffer, wrong, rank, num_worst_tokens=8)
    said.append(str(raised.value))
    with pytest.raises(ConfigError) as raised:
        buffer.combine(torch.zeros(8, case.hidden, dtype=case.dtype), handles[0])
    said.append(str(raised.value))
    run_cases(buffer, rank, [case])
    return said


def short_of_memory(exchange: StoreExchange, overrides: dict[str, Any]) -> None:
    """Rank 1 has no memory for what a dispatch returns, and calls again. Then the ranks build other windows, for which
    all must have begun as many operations."""
    buffer, rank = opened(exchange, overrides), exchange.rank
    case = Case(tokens=(4, 3), experts=4, topk=2)
    inputs = case.inputs()
    if rank:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Outputs, "allocate", Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory")))
            with pytest.raises(torch.OutOfMemoryError):
                normal_cases.dispatch(buffer, inputs, rank, num_worst_tokens=8)
    outcome = normal_cases.round_trip(buffer, inputs, rank, num_worst_tokens=8)
    normal_cases.check_rank(inputs, rank, outcome, worst=8)
    near = ll_cases.Case(ranks=buffer.group_size, tokens=4, experts=4, topk=2, counts=(4, 3))
    in_low_latency(buffer, near)
    buffer.destroy()


def in_low_latency(buffer: Buffer, case: ll_cases.Case) -> None:
    """A dispatch and its combine."""
    inputs = case.inputs()
    combined = ll_cases.run_rank(case, ll_cases.mode_of(buffer), buffer.rank, inputs)
    ll_cases.check_combined(case, inputs, buffer.rank, combined)


def other_rows(exchange: StoreExchange, overrides: dict[str, Any]) -> tuple[str, int]:
    """Rank 1 tells of one row more than the handle knows. What rank 0 raises, and whom it names."""
    buffer, rank = opened(exchange, {**overrides, "timeout": 15.0}), exchange.rank
    inputs = Case(tokens=(4, 3), experts=4, topk=2).inputs()
    handle = normal_cases.dispatch(buffer, inputs, rank)[4]
    if rank == 1:
        handle.route[ROUTE_SEND, 0, 0] += 1
    try:
        buffer.dispatch(inputs.x[rank], handle=handle)
        buffer.dispatch(inputs.x[rank], handle=handle)
    except UcclEpError as error:
        return type(error).__name__, getattr(error, "peer", -1)
    finally:
        buffer.destroy()
    return "", -1


def silent_peer(exchange: StoreExchange, overrides: dict[str, Any]) -> tuple[str, int, str]:
    """Rank 1 does not make the second dispatch."""
    buffer = opened(exchange, {**overrides, "timeout": 6.0})
    inputs = Case(tokens=(4, 3), experts=4, topk=2).inputs()
    normal_cases.dispatch(buffer, inputs, exchange.rank)
    if exchange.rank == 1:
        time.sleep(15)
        buffer.runtime.close(0.1)
        return "", -1, ""
    found = "", -1, ""
    try:
        normal_cases.dispatch(buffer, inputs, exchange.rank)
    except UcclEpError as error:
        found = type(error).__name__, getattr(error, "peer", -1), str(error)
    buffer.destroy()
    return found


def bad_ids(exchange: StoreExchange, overrides: dict[str, Any], worst: int, counted: bool) -> str:
    """Rank 0 has expert ids that do not exist, which count as -1. What was raised; everybody goes on.

    Args:
        counted: by the layout.
    """
    buffer, rank = opened(exchange, overrides), exchange.rank
    case = Case(tokens=(4, 3), experts=4, topk=2, lost=0.0)
    inputs = case.inputs()
    given = inputs.topk_idx[rank].clone()
    if rank == 0:
        given[1, 1], given[2, 0] = 4, (1 << 33) + 1
    inputs.topk_idx[0][1, 1] = inputs.topk_idx[0][2, 0] = -1
    text, received = "", None
    try:
        mine = replace(inputs, topk_idx=[given] * len(case.tokens))
        received = normal_cases.dispatch(buffer, mine, rank, counted=counted, num_worst_tokens=worst)[0]
    except ConfigError as error:
        text = str(error)
    if received is not None:
        there = inputs.delivered[rank]
        assert same_bits(received[: len(there.source)], there.rows(inputs.x))
    run_cases(buffer, rank, [case])
    return text


def random_case(dice: random.Random, ranks: int, most: int) -> Case:
    """Up to ``most`` tokens a rank, often none or one."""
    topk = dice.randint(1, 4)
    local = dice.randint(1, 4)
    while ranks * local < topk:
        local += 1
    return Case(
        tokens=tuple(dice.choice((0, 1, dice.randint(2, most))) for _ in range(ranks)),
        hidden=128 * dice.randint(1, 3),
        experts=ranks * local,
        topk=topk,
        dtype=dice.choice((torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn)),
        lost=dice.choice((0.0, 0.2, 0.9)),
        hot=dice.choice((-1, dice.randrange(ranks))) if local >= topk else -1,
        seed=dice.randrange(1 << 30),
    )


def digest(tensor: torch.Tensor) -> str:
    """Hash of a tensor's bytes."""
    return hashlib.blake2b(tensor.contiguous().view(torch.uint8).numpy().tobytes(), digest_size=16).hexdigest()


def soak(exchange: StoreExchange, overrides: dict[str, Any], steps: int, seed: int, most: int) -> int:
    """Random round trips, with a look and without, and from handles; what is received hashes like the oracle's rows,
    and what this rank keeps has its bytes as long as it is kept."""
    buffer, rank = opened(exchange, overrides), exchange.rank
    dice, mine = random.Random(seed), random.Random(100 * seed + rank)
    kept: list[tuple[torch.Tensor, str]] = []
    for step in range(steps):
        inputs = random_case(dice, exchange.size, most).inputs()
        worst = sum(inputs.case.tokens) + dice.randrange(3) if dice.random() < 0.4 else 0
        again = dice.random() < 0.3
        outcome = normal_cases.round_trip(buffer, inputs, rank, num_worst_tokens=worst)
        normal_cases.check_rank(inputs, rank, outcome, worst=worst)
        there = inputs.delivered[rank]
        rows = outcome.rows[: len(there.source)]
        expected = digest(there.rows(inputs.x))
        assert digest(rows) == expected, step
        if again:
            received, *_ = buffer.dispatch(inputs.rows(rank), handle=outcome.handle)
            cached = received[0] if isinstance(received, tuple) else received
            assert digest(cached[: len(rows)]) == expected, step
            back, _, _ = buffer.combine(normal_cases.expert_outputs(cached, rank), outcome.handle)
            assert digest(back) == digest(outcome.combined), step
        for tensor in (rows, outcome.combined):
            if mine.random() < 0.4:
                kept.append((tensor, digest(tensor)))
        while len(kept) > 8 or (kept and mine.random() < 0.3):
            tensor, before = kept.pop(mine.randrange(len(kept)))
            assert digest(tensor) == before, step
    assert all(digest(tensor) == before for tensor, before in kept)
    buffer.destroy()
    return steps


class Watch(TorchFunctionMode):
    """Notes every call that reads a tensor's content on the host."""

    _READS = ("item", "tolist", "numpy", "cpu", "nonzero", "equal", "allclose", "masked_select", "unique")
    _READS += ("__bool__", "__int__", "__float__", "__index__", "__contains__", "is_nonzero")

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        picked = args[1] if name == "__getitem__" else None
        if name in self._READS or (isinstance(picked, torch.Tensor) and picked.dtype == torch.bool):
            self.seen.append(name)
        return function(*args, **(kwargs or {}))


def looks(exchange: StoreExchange, overrides: dict[str, Any]) -> dict[str, list[str]]:
    """What each operation reads on the host, by its name."""
    buffer, rank = opened(exchange, overrides), exchange.rank
    inputs = Case(tokens=(5, 3), experts=4, topk=2).inputs()
    normal: Any = buffer._backend.normal
    found: dict[str, list[str]] = {}

    def watched(name: str, call: Callable[[], Any]) -> Any:
        with Watch() as watch, pytest.MonkeyPatch.context() as patch:
            for owner, method in ((normal._session, "wait_reply"), (normal._gpu.memory, "synchronize")):
                honest = getattr(owner, method)

                def noted(*args: Any, method: str = method, honest: Any = honest) -> Any:
                    watch.seen.append(method)
                    return honest(*args)

                patch.setattr(owner, method, noted)
            result = call()
        found[name] = watch.seen
        return result

    layout = watched("layout", lambda: buffer.get_dispatch_layout(inputs.topk_idx[rank], 4))
    options = {
        "num_tokens_per_rank": layout[0],
        "num_tokens_per_expert": layout[2],
        "is_token_in_rank": layout[3],
        "topk_idx": inputs.topk_idx[rank],
        "topk_weights": inputs.topk_weights[rank],
    }
    watched("ordinary", lambda: buffer.dispatch(inputs.x[rank], **options))
    rows, _, weights, _, handle, _ = watched(
        "worst", lambda: buffer.dispatch(inputs.x[rank], num_worst_tokens=9, **options)
    )
    watched("cached", lambda: buffer.dispatch(inputs.x[rank], handle=handle))
    watched("combine", lambda: buffer.combine(rows, handle, topk_weights=weights))
    buffer.destroy()
    return found


class LateOrder:
    """A stream as a thread: launches run later, in order, and who does not wait for their event sees no result."""

    capturing = False
    captures = 0

    def __init__(self) -> None:
        self.stream = object()
        self._work = ThreadPoolExecutor(1)
        self.asked: list[bool] = []

    @contextlib.contextmanager
    def operation(self, previous: EventOverlap | None, *, own_stream: bool) -> Iterator[None]:
        """See :class:`StreamOrder`."""
        with torch.cuda.stream(self.stream) if own_stream else contextlib.nullcontext():
            wait_for(previous)
            yield

    def run(
        self, launch: Callable[[], None], tensors: Sequence[torch.Tensor], *, own_stream: bool, finish: bool
    ) -> EventOverlap:
        """See :class:`StreamOrder`."""

        def late() -> None:
            time.sleep(0.05)
            launch()

        event = LateEvent(self._work.submit(late))
        if finish:
            event.wait()
        self.asked.append(finish)
        return EventOverlap(event, None if finish else tuple(tensors))

    def look(self) -> None:
        """No driver knows of anything that failed."""

    def settle(self) -> None:
        """Wait for all that was launched, as a device does at the end."""
        self._work.submit(int).result()


class LateEvent:
    """The end of what a :class:`LateOrder` was given."""

    def __init__(self, future: Future[None]) -> None:
        self.future, self.waits = future, 0

    def wait(self) -> None:
        """Wait for it, and raise what went wrong there."""
        self.waits += 1
        self.future.result()


class Allocations(TorchFunctionMode):
    """Notes what torch allocates, and whether the communication stream was the current one then."""

    def __init__(self) -> None:
        super().__init__()
        self.current: Any = None
        self.made: dict[int, Any] = {}

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        if getattr(function, "__name__", "") in ("empty", "full", "zeros"):
            self.made[found.data_ptr()] = self.current
        return found

    @contextlib.contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        """In place of ``torch.cuda.stream``."""
        before, self.current = self.current, stream
        yield
        self.current = before


def asynchronous(
    exchange: StoreExchange, overrides: dict[str, Any], tokens: tuple[int, ...], where: tuple[bool, ...]
) -> None:
    """Dispatch, cached dispatch and combine that nobody waits for but by their events, outputs allocated on the stream
    that is asked for (``where``: the communication stream), and counts rounded up."""
    rank = exchange.rank
    buffer = opened(exchange, overrides)
    gpu: Any = buffer._gpu
    order = gpu.order = LateOrder()
    inputs = Case(tokens=tokens, experts=2 * len(tokens), topk=2, dtype=torch.float8_e4m3fn).inputs()
    there = inputs.delivered[rank]
    for allocating in where:
        options: dict[str, Any] = {"async_finish": True, "allocate_on_comm_stream": allocating}
        with Allocations() as notes, pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda, "stream", notes.on)
            order.asked.clear()
            before = LateEvent(order._work.submit(time.sleep, 0.05))
            received, idx, weights, counts, handle, first = normal_cases.dispatch(
                buffer, inputs, rank, expert_alignment=8, previous_event=EventOverlap(before), **options
            )
            again, *_, second = buffer.dispatch(inputs.rows(rank), handle=handle, previous_event=first, **options)
            assert before.waits == 1
            assert first.event.waits == 1
            assert not second.event.future.done()
            second.current_stream_wait()
            outputs = normal_cases.expert_outputs(again[0], rank)
            combined, back, third = buffer.combine(
                outputs, handle, topk_weights=weights, previous_event=second, **options
            )
            assert second.event.waits == 2
            assert not third.event.future.done()
            third.current_stream_wait()
            # the layout was asked to finish, and a first dispatch is opened before its size is known
            assert order.asked == [True, False, False, False, False]
            assert all(event.extra_tensors for event in (first, second, third))
            streams = {notes.made.get(one.data_ptr()) for one in (*received, idx, *again, combined) if one.numel()}
            assert streams <= {order.stream if allocating else None}
        outcome = normal_cases.Outcome(received, idx, weights, counts, handle, combined, back)
        normal_cases.check_rank(inputs, rank, outcome, alignment=8)
        assert counts == [-(-count // 8) * 8 for count in there.expert_counts]
        assert all(same_bits(one, two) for one, two in zip(again, received, strict=True))
    order.settle()
    buffer.destroy()


class NotedOrder(GpuOrder):
    """Streams of a model of a device, which notes what runs where."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"), lambda stream: Device.capturing)
        self.launched = 0

    def run(
        self, launch: Callable[[], None], tensors: Sequence[torch.Tensor], *, own_stream: bool, finish: bool
    ) -> EventOverlap:
        """See :class:`StreamOrder`."""

        def noted() -> None:
            Device.kernel(f"launch {self.launched}")
            self.launched += 1
            launch()

        return super().run(noted, tensors, own_stream=own_stream, finish=finish)


class Noted(TorchDispatchMode):
    """Notes on which stream torch does what it does, and for which capture."""

    def __init__(self) -> None:
        super().__init__()
        self.where: list[tuple[Any, int]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.where.append((Device.current, Device.current.captured))
        return function(*args, **(kwargs or {}))


def beside_other_work(exchange: StoreExchange, overrides: dict[str, Any]) -> None:
    """Two-batch overlap, as SGLang does it in prefill: an event is captured, the other batch's work is given to the
    same stream, then the operation is called with the event. It runs beside that work, with all that it allocates and
    fills, also in a captured graph, of which all that is part."""
    buffer = opened(exchange, overrides)
    inputs = Case(tokens=(5,), experts=4, topk=2, hidden=128).inputs()
    with pytest.MonkeyPatch.context() as patch:
        install(patch)
        gpu: Any = buffer._gpu
        order = gpu.order = NotedOrder()
        kept: set[tuple[int, Any]] = set()
        patch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: kept.add((tensor.data_ptr(), stream)))
        # columns of a wider tensor, which are copied
        strided = torch.cat([inputs.topk_idx[0], inputs.topk_idx[0]], 1)[:, :2]
        # compiled, and the windows in use
        normal_cases.check_rank(inputs, 0, normal_cases.round_trip(buffer, inputs, 0, num_worst_tokens=5), worst=5)
        for capture in (0, 1):
            begin_capture(capture)
            begun = order.launched

            def event(name: str) -> EventOverlap:
                Device.kernel(name)
                found = EventOverlap(torch.cuda.Event())
                found.event.record(Device.current)  # type: ignore[union-attr]
                Device.kernel(f"other work after {name}")
                return found

            options: dict[str, Any] = {"async_finish": True, "allocate_on_comm_stream": True}
            with Noted() as notes:
                per_rank, _, per_expert, in_rank, laid_out = buffer.get_dispatch_layout(
                    strided, 4, previous_event=event("router"), **options
                )
                received, idx, weights, counts, handle, sent = buffer.dispatch(
                    inputs.x[0],
                    topk_idx=inputs.topk_idx[0],
                    topk_weights=inputs.topk_weights[0],
                    num_tokens_per_rank=per_rank,
                    is_token_in_rank=in_rank,
                    num_tokens_per_expert=per_expert,
                    num_worst_tokens=5 * capture,
                    previous_event=laid_out,
                    **options,
                )
            assert set(notes.where) == {(order.stream, capture)}
            assert (strided.data_ptr(), order.stream) in kept or capture
            sent_by = order.launched
            sent.current_stream_wait()
            outputs = normal_cases.expert_outputs(received, 0)
            with Noted() as notes:
                combined, back, done = buffer.combine(
                    outputs, handle, topk_weights=weights, previous_event=event("experts"), **options
                )
            assert set(notes.where) == {(order.stream, capture)}
            after = [Device.kernels[f"launch {number}"] for number in range(begun, order.launched)]
            assert all("router" in one for one in after)
            assert not any("other work after router" in one for one in after[: sent_by - begun])
            assert all("experts" in one and "other work after experts" not in one for one in after[sent_by - begun :])
            done.current_stream_wait()
            Device.kernel("end")
            assert f"launch {order.launched - 1}" in Device.kernels["end"]
            case = normal_cases.Outcome(received, idx, weights, counts, handle, combined, back)
            normal_cases.check_rank(inputs, 0, case, worst=5 * capture)
    buffer.destroy()


def replay_in_windows_that_are_gone(exchange: StoreExchange, overrides: dict[str, Any]) -> None:
    """A graph that is replayed after the windows were rebuilt reaches no memory that others have by then, what
    tells the host included, and sums nothing."""
    buffer = opened(exchange, overrides)
    gpu: Any = buffer._gpu
    order = gpu.order = RecordingOrder()
    inputs = Case(tokens=(5,), experts=4, topk=2, hidden=128).inputs()
    outcome = normal_cases.round_trip(buffer, inputs, 0, num_worst_tokens=5)
    normal: Any = buffer._backend.normal
    present = normal._session._present
    looked_at = [weakref.ref(one) for one in (present.reply, present.state, *present.space._tensors)]
    del present
    order.eager = True
    buffer.check()
    buffer.runtime.rebuild(None)
    normal_cases.check_rank(inputs, 0, normal_cases.round_trip(buffer, inputs, 0))
    with pytest.raises(ConfigError, match="capture the graphs again"):
        buffer.check()
    assert all(one() is not None for one in looked_at)
    order.replay()
    assert not outcome.combined.any()
    normal_cases.check_rank(inputs, 0, normal_cases.round_trip(buffer, inputs, 0))
    buffer.destroy()


def programs(exchange: StoreExchange, overrides: dict[str, Any]) -> list[int]:
    """Programs of a dispatch, its cached one and its combine, by what the caller allows and what is set."""
    buffer, rank = opened(exchange, overrides), exchange.rank
    inputs = Case(tokens=(16, 16), experts=4, topk=2, lost=0.0).inputs()
    settings, found = buffer.runtime.settings, []
    for allowed, chosen in ((24, 0), (2, 0), (2, 1)):
        buffer.runtime.settings = replace(settings, programs=chosen)
        rows, _, _, _, handle, _ = normal_cases.dispatch(buffer, inputs, rank, config=Config(num_sms=allowed))
        found.append(handle.about.channels)
        buffer.dispatch(inputs.x[rank], handle=handle, config=Config(num_sms=24))
        buffer.combine(rows, handle, config=Config(num_sms=24))
    buffer.runtime.settings = settings
    buffer.destroy()
    return found


def both_modes(exchange: StoreExchange, overrides: dict[str, Any]) -> None:
    """Normal mode before and after low latency has rebuilt the windows."""
    buffer = opened(exchange, overrides)
    inputs = Case(tokens=(4, 3), experts=4, topk=2).inputs()
    for _ in range(2):
        outcome = normal_cases.round_trip(buffer, inputs, exchange.rank)
        normal_cases.check_rank(inputs, exchange.rank, outcome)
        bodies.round_trip(buffer, tokens=4)
    buffer.destroy()
