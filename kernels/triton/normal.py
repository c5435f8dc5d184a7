"""The normal-mode kernels for tensors on a device as one object."""

from __future__ import annotations

import functools

import torch

from ...config import Settings
from ...errors import ConfigError
from ...protocol.layout import WindowLayout
from ...protocol.message import LEAST_CHUNK_BYTES, META_LINE, NormalNotify, element_bytes
from ..blocks import normal_device as block
from ..blocks.normal_device import DeviceNormalState, NodeTensors, NormalFormat, NormalTensors
from .launch import Launch, Target, Variant, present_target
from .low_latency import MAX_TOPK
from .normal_finish import finish
from .normal_node_step import advance_nodes, finish_nodes, move_node_rows
from .normal_open import open_operation
from .normal_relay import count_marks, list_passed
from .normal_rows import move_rows, reduce_rows
from .normal_step import advance
from .routing import list_tokens, mark_tokens, report_ids

#: Words of a row that a program moves at a time, its warps, and the rows that it moves together: 32 KiB are on their
#: way to it. Between nodes words, or values that are summed: more of them take more registers than there are.
_BLOCK, _WARPS, _ROWS, _NODE_BLOCK = 2048, 8, 4, 1024
#: Values of a row that a program sums at a time, tokens, and ranks whose rows it asks for together: 16 KiB of BF16 are
#: on their way to it. Programs for each one that moves rows: of 64 registers and 256 threads, four share a
#: multiprocessor.
_SUMMED, _SUM_ROWS, _TOGETHER, _SUMMING = 1024, 2, 4, 4
#: Tokens that a program marks together; (token, rank) pairs that it holds.
_MARKED, _PAIRS = 128, 4096

#: Nanoseconds that a step of a combine waits for more once it has something to move: about what a step costs. In the
#: interpreter a step takes far longer than that.
_PATIENCE, _PATIENCE_INTERPRETED = 20_000, 200_000_000
#: Rows whose marks a program reads together.
_LISTED = 256


def _power_of_two(value: int) -> int:
    return 1 << max(value - 1, 0).bit_length()


class TritonNormalKernels:
    """Builds the launches of each step. Addresses are those of device memory; see the kernels for their meaning.

    Args:
        ranks: of the group.
        target: what to compile for; by default this process's.
    """

    name = "triton"

    def __init__(self, ranks: int, target: Target | None = None) -> None:
        self.ranks = ranks
        self.target = target or present_target()
        self._ranks = _power_of_two(ranks)
        # in the interpreter an operation costs the same for one row and for many, and programs take turns
        interpreted = self.target.interpreted
        self._rows = 16 if interpreted else _ROWS
        self._most_programs = 2 if interpreted else 1 << 16
        self._lanes = {"LANES": self.target.warp, "BACKEND": self.target.backend}
        self._reporting = Variant(report_ids, {"BACKEND": self.target.backend})
        # each is made once for its formats, of which an engine has a few
        self._of_mark = functools.cache(self._make_mark)
        self._of_list = functools.cache(self._make_list)
        self._of_open = functools.cache(self._make_open)
        self._of_exchange = functools.cache(self._make_exchange)
        self._of_nodes = functools.cache(self._make_nodes)
        self._of_reduce = functools.cache(self._make_reduce)

    def check(self, settings: Settings, topk: int) -> None:
        """Raise ConfigError for what these kernels cannot serve."""
        if topk > MAX_TOPK:
            raise ConfigError(f"normal mode: topk = {topk} exceeds {MAX_TOPK} on a device")
        needed = 2 * self.target.warp
        if needed > settings.ring_slots:
            raise ConfigError(
                f"normal mode on a device puts up to {needed} commands into a ring at once, which holds "
                f"{settings.ring_slots}. Next step: raise UCCL_EP_RING_SLOTS on all ranks"
            )

    def warm(self, form: NormalFormat, experts: int, biases: int) -> None:
        """Compile what an operation of this format launches, and load what is compiled."""
        for launch in self.ahead(form, experts, biases):
            launch.compile()

    def ahead(self, form: NormalFormat, experts: int, biases: int) -> tuple[Launch, ...]:
        """Launches of an operation of this format, to compile."""
        # any address that is a multiple of 16 like the real ones, and fits an int64 only
        at = 1 << 40
        tensors = NormalTensors(at, at, 1, at, at, at, at, at, at, at, 1)
        nodes = NodeTensors(at, at, 1, at, 1, at) if form.node_ranks else None
        found = self.open(at, at, form, at, at, at, at, at, at, at, 1, 0, at)
        found += self.exchange(at, at, form, tensors, nodes, 1, 1)
        if form.kind == NormalNotify.OPERATION_COMBINE:
            found += self.reduce(at, at, form, at, 1, at, at, 1, at, at, (at,) * biases, at, at, 1)
        elif form.kind == NormalNotify.OPERATION_DISPATCH:
            found += self.list(at, 1, 0, form.node_ranks, at, at, at, at)
            if form.topk:
                found += self.mark(at, at, at, 1, form.topk, experts, at, at, at, at)
        return found

    def new_state(self, layout: WindowLayout, device: torch.device) -> DeviceNormalState:
        """Counters at zero."""
        return DeviceNormalState(layout, device)

    def info_bytes(self, local_experts: int) -> int:
        """Bytes of what the opening tells the host."""
        return 8 * (block.INFO_WORDS + block.PEER_INFO_WORDS * self.ranks + local_experts)

    # -- routing ------------------------------------------------------------------------------------------------

    def mark(
        self,
        context: int,
        state: int,
        topk_idx: int,
        tokens: int,
        topk: int,
        experts: int,
        rank_counts: int,
        expert_counts: int,
        in_rank: int,
        bad: int,
    ) -> tuple[Launch, ...]:
        """Counts and marks of int64[tokens, topk] ids; ``context`` 0: whatever the ids are."""
        block = min(_MARKED, max(_PAIRS // self._ranks, 1))
        if self.target.interpreted:
            block = min(max(_PAIRS // self._ranks, 1), _power_of_two(tokens))
        first = Launch(
            self._of_mark(topk, block),
            (max(-(-tokens // block), 1), 1, 1),
            (topk_idx, tokens, experts, self.ranks, rank_counts, expert_counts, in_rank, bad),
        )
        if context == 0:
            return (first,)
        return first, Launch(self._reporting, (1, 1, 1), (context, state, bad, experts))

    def _make_mark(self, topk: int, block: int) -> Variant:
        return Variant(mark_tokens, {"TOPK": topk, "RANKS": self._ranks, "BLOCK": block}, warps=4)

    def list(
        self, in_rank: int, tokens: int, rank: int, node_ranks: int, rows: int, passing: int, lists: int, places: int
    ) -> tuple[Launch, ...]:
        """Lists of the tokens of each rank from bool[tokens, ranks] marks; see ``routing.list_tokens``."""
        block = min(1024, _power_of_two(tokens)) if self.target.interpreted else 1024
        arguments = (in_rank, tokens, self.ranks, rank, node_ranks, rows, passing, lists, places)
        return (Launch(self._of_list(node_ranks > 0, block), (self.ranks, 1, 1), arguments),)

    def _make_list(self, nodes: bool, block: int) -> Variant:
        return Variant(list_tokens, {"NODES": nodes, "BLOCK": block}, warps=4)

    # -- the exchange -------------------------------------------------------------------------------------------

    def open(
        self,
        context: int,
        state: int,
        form: NormalFormat,
        given: int,
        taken: int,
        expert_counts: int,
        origin: int,
        number_out: int,
        rows_out: int,
        info: int,
        ticket: int,
        capacity: int,
        passing: int,
    ) -> tuple[Launch, ...]:
        """Tell every peer what this rank is about to do, and hear every peer: ``normal_open.open_operation``."""
        arguments = (
            context,
            state,
            given,
            taken,
            expert_counts,
            origin,
            number_out,
            rows_out,
            info,
            ticket,
            capacity,
            form.shape,
            form.shape_step,
            form.kind << 16 | form.dtype,
            form.row_bytes,
            form.meta_bytes,
            form.local_experts,
            max(form.topk, 1),
            form.node_ranks,
            passing,
        )
        return (Launch(self._of_open(form.kind, form.node_ranks > 0), (1, 1, 1), arguments),)

    def _make_open(self, kind: int, nodes: bool) -> Variant:
        return Variant(open_operation, {"KIND": kind, "NODES": nodes, "RANKS": self._ranks, **self._lanes})

    def exchange(
        self,
        context: int,
        state: int,
        form: NormalFormat,
        tensors: NormalTensors,
        nodes: NodeTensors | None,
        steps: int,
        programs: int,
    ) -> tuple[Launch, ...]:
        """Move the rows of an opened operation in ``steps`` steps of ``programs`` programs, then what is left."""
        programs = max(min(programs, self._most_programs), 1)
        arguments = (context, state, *tensors, form.local_experts)
        kind = (form.kind, form.dtype, form.row_bytes, form.scale_bytes, form.topk)
        if nodes is not None:
            return self._exchange_nodes(context, state, arguments, nodes, steps, programs, kind)
        begin, move, rest = self._of_exchange(*kind)
        step = Launch(begin, (1, 1, 1), (context, state)), Launch(move, (programs, 1, 1), arguments)
        return step * steps + (Launch(rest, (1, 1, 1), arguments),)

    def _moving(self, kind: int, row_bytes: int, scale_bytes: int, topk: int, block: int) -> dict[str, int]:
        """Constants of ``normal_rows.move_rows``, without ROWS."""
        words, scale_words = row_bytes // 4, scale_bytes // 4
        return {
            "KIND": kind,
            "WORDS": words,
            "TOPK": topk,
            "SLOTS": _power_of_two(topk),
            "SCALE_WORDS": scale_words,
            "SCALES": _power_of_two(scale_words),
            "BLOCK": min(block, _power_of_two(words)),
        }

    def _make_exchange(
        self, kind: int, dtype: int, row_bytes: int, scale_bytes: int, topk: int
    ) -> tuple[Variant, Variant, Variant]:
        """What begins a step, moves its rows, and ends an exchange; all dtypes move alike."""
        constants = self._moving(kind, row_bytes, scale_bytes, topk, _BLOCK)
        rows = self._rows if self.target.interpreted else 1
        return (
            Variant(advance, self._lanes),
            Variant(move_rows, {**constants, "ROWS": self._rows}, _WARPS),
            Variant(finish, {**constants, "ROWS": rows, **self._lanes}),
        )

    def _exchange_nodes(
        self,
        context: int,
        state: int,
        arguments: tuple[int, ...],
        nodes: NodeTensors,
        steps: int,
        programs: int,
        kind: tuple[int, int, int, int, int],
    ) -> tuple[Launch, ...]:
        """The same between nodes; ``arguments``: of ``normal_rows.move_rows``; ``kind``: of :meth:`_make_nodes`."""
        begin, about, move, rest = self._of_nodes(*kind)
        arguments += (nodes.in_rank, nodes.passes, nodes.pass_rows, nodes.counts)
        first: tuple[Launch, ...] = ()
        step: tuple[Launch, ...] = (
            Launch(begin, (1, 1, 1), (context, state, nodes.counts)),
            Launch(move, (programs, 1, 1), arguments),
        )
        if kind[0] == NormalNotify.OPERATION_COMBINE:
            counted = (context, state, nodes.marks, nodes.room, nodes.counts)
            first = (Launch(about, (self.ranks, 1, 1), counted),)
        else:
            listed = (context, state, nodes.passes, nodes.pass_rows, nodes.marks, nodes.room)
            step = (step[0], Launch(about, (self.ranks, 1, 1), listed), step[1])
        return first + step * steps + (Launch(rest, (1, 1, 1), (*arguments, nodes.marks, nodes.room)),)

    def _make_nodes(
        self, kind: int, dtype: int, row_bytes: int, scale_bytes: int, topk: int
    ) -> tuple[Variant, Variant, Variant, Variant]:
        """Between nodes: what begins a step, counts the marks of a combine or lists what a dispatch passed, moves the
        rows of a step, and ends an exchange."""
        combine = kind == NormalNotify.OPERATION_COMBINE
        interpreted = self.target.interpreted
        patience = {"PATIENCE": _PATIENCE_INTERPRETED if interpreted else _PATIENCE}
        # a dispatch may have values of a byte, which nobody sums
        summed = {"HIDDEN": row_bytes // element_bytes(dtype) if combine else 0, "DTYPE": dtype}
        constants = self._moving(kind, row_bytes, scale_bytes, topk, _NODE_BLOCK)
        moving = {**constants, **summed, "BACKEND": self.target.backend}
        block = 32 if interpreted else _LISTED
        if combine:
            about = Variant(count_marks, {"BLOCK": block}, warps=4)
        else:
            about = Variant(list_passed, {"USED": 2 * topk + scale_bytes // 4, "BLOCK": block}, warps=4)
        return (
            Variant(advance_nodes, {"COMBINE": combine, **patience, **self._lanes}),
            about,
            Variant(move_node_rows, {**moving, "ROWS": self._rows}, _WARPS, fused=False),
            Variant(
                finish_nodes,
                {**moving, "ROWS": self._rows if interpreted else 1, **patience, **self._lanes},
                fused=False,
            ),
        )

    def reduce(
        self,
        context: int,
        state: int,
        form: NormalFormat,
        x: int,
        received: int,
        weights: int,
        places: int,
        tokens: int,
        gathered: int,
        gathered_weights: int,
        biases: tuple[int, ...],
        out: int,
        out_weights: int,
        programs: int,
    ) -> tuple[Launch, ...]:
        """Sum the rows of a combine that has been exchanged; ``received`` of them are this rank's experts'."""
        if tokens == 0:
            return ()
        summing, columns = self._of_reduce(form.dtype, form.row_bytes, form.topk, len(biases))
        bias_0, bias_1 = (*biases, 0, 0)[:2]
        return (
            Launch(
                summing,
                (-(-min(_SUMMING * programs, self._most_programs) // columns), columns, 1),
                (
                    context,
                    state,
                    x,
                    received,
                    weights,
                    places,
                    tokens,
                    gathered,
                    gathered_weights,
                    bias_0,
                    bias_1,
                    out,
                    out_weights,
                ),
            ),
        )

    def _make_reduce(self, dtype: int, row_bytes: int, topk: int, biases: int) -> tuple[Variant, int]:
        """Its kernel, and programs that a row has work for."""
        hidden = row_bytes // element_bytes(dtype)
        block = min(_SUMMED, _power_of_two(hidden))
        constants = {
            "HIDDEN": hidden,
            "DTYPE": dtype,
            "TOPK": topk,
            "SLOTS": _power_of_two(topk),
            "BIASES": biases,
            "TOGETHER": min(_TOGETHER, self._ranks),
            "ROWS": self._rows if self.target.interpreted else _SUM_ROWS,
            "BLOCK": block,
            "BACKEND": self.target.backend,
        }
        # 16 bytes of BF16 of a rank's rows to a lane
        variant = Variant(reduce_rows, constants, max(256 // self.target.warp, 1), fused=False)
        # one more sums the weights
        return variant, -(-hidden // block) + (topk > 0)

    # -- how much there is to launch ----------------------------------------------------------------------------

    def steps(
        self, layout: WindowLayout, channels: int, form: NormalFormat, rows: int, proxied: bool, fits: bool
    ) -> int:
        """Steps after which an exchange of ``rows`` rows between each two ranks is over.

        Args:
            rows: the most that one rank has for another.
            proxied: a peer is reached through proxies.
            fits: every rank is known to have room for all its rows; else they may land in rounds.

        A number too small costs time, not correctness: :func:`.normal_finish.finish` takes the rest.
        """
        if rows == 0:
            return 0
        plan = layout.normal
        row = form.row_bytes + form.meta_bytes
        most = max(plan.chunk // row, 1)
        least = max(LEAST_CHUNK_BYTES // form.row_bytes, 1)
        batch = max(plan.depth // 2, 1)

        def batches(chunk: int, slot_rows: int) -> int:
            grants, rest = divmod(rows, slot_rows)
            if not proxied:
                return grants + (rest > 0)
            return grants * -(-slot_rows // (chunk * batch)) + -(-rest // (chunk * batch))

        chunk = min(max(-(-rows // channels), least), most)
        found = batches(chunk, rows)
        if not fits or form.node_ranks:
            in_slot = self.slot_rows(layout, form) if form.node_ranks else max(plan.round_slot // row, 1)
            chunk = min(chunk, in_slot)
            found = max(found, batches(chunk, in_slot // chunk * chunk))
        if form.node_ranks and form.kind == NormalNotify.OPERATION_COMBINE:
            # a batch is summed a step later than laid out, and may miss parts: a step with nothing to do costs little
            found = 2 * found + 2
        # one to pack, one more to unpack
        return found + 1

    def slot_rows(self, layout: WindowLayout, form: NormalFormat) -> int:
        """Rows of one of the two landing slots of a rail peer: see ``normal_nodes.slot_bytes``."""
        lanes = form.node_ranks + self.ranks // form.node_ranks
        slot = layout.normal.round_slot * self.ranks // lanes // META_LINE * META_LINE
        return max(slot // (form.row_bytes + form.meta_bytes), 1)
