"""Low-latency dispatch. Sending: every token is cast once and written to the message of each of its ranks; the message
space is free and the rows are numbered (:mod:`.routing`), and the last program adds headers and publishes. Receiving:
count the rows of each expert, then unpack them into DeepEP's layout.

The rows of a local expert are contiguous: those of source 0 in its token order, then those of source 1, and so on,
whatever order messages arrive in. Two kernels, because a row's place depends on the counts of all earlier sources.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...protocol.message import DTYPE_F32, DTYPE_FP8, DTYPE_FP8_UE8M0, FORM_REDUCED, SCALE_BLOCK
from ...protocol.streams import LL_DISPATCH
from .blocks import (
    P_EXPERTS,
    P_META,
    P_ROUTE_BEFORE,
    P_ROUTE_COUNTS,
    P_ROUTE_PLACES,
    P_ROUTE_SENDS,
    P_ROUTE_WEIGHTS,
    P_ROW,
    P_TOKENS,
    R_COUNTS,
    R_RECEIVED,
    R_RETURN_BASE,
    R_RETURN_FORM,
    R_RETURN_ROWS,
    R_RETURN_TO,
    S_ARRIVALS,
    S_COMBINE_RECV_STEP,
    S_DISPATCH_AHEAD,
    S_DISPATCH_NUMBER,
    S_DISPATCH_READ,
    S_DISPATCH_RECV,
    S_DISPATCH_SLOT,
    T_MESSAGE_AT,
    route_table,
    state_table,
)
from .context import has_failed, has_failed_now, landing_window, own_rank, rank_count, stream_of
from .kernel import kernel
from .ll_counts import mark_read
from .ll_message import DISPATCH_TAG, WEIGHTED, send_messages
from .quant import load_floats, quantise_blocks
from .routing import HEADER
from .wait import FAILURE_PROTOCOL, fail
from .words import aligned, arrives_last, floats, int32s, int64s, peek, poke, uint8s, uniform

_DISPATCH = tl.constexpr(LL_DISPATCH)
_F32, _FP8, _UE8M0 = tl.constexpr(DTYPE_F32), tl.constexpr(DTYPE_FP8), tl.constexpr(DTYPE_FP8_UE8M0)
_GROUP = tl.constexpr(SCALE_BLOCK)


@triton.jit
def _row_addresses(
    context: tl.tensor, state: tl.tensor, route: tl.tensor, entry: tl.tensor, chosen: tl.tensor, row_bytes: tl.tensor
) -> tl.tensor:
    """(addresses of the rows, addresses of the metas) that entries of ``sends`` name."""
    rank = tl.where(chosen, entry >> 32, 0)
    row = tl.where(chosen, entry & 0xFFFFFFFF, 0)
    first = peek(state_table(context, state, T_MESSAGE_AT, rank)) + HEADER
    meta = peek(route + P_META)
    rows = first + peek(route_table(context, route, R_COUNTS, rank)) * meta + row * row_bytes
    return rows, first + row * meta


@triton.jit
def _write_metas(
    context: tl.tensor,
    state: tl.tensor,
    route: tl.tensor,
    topk_idx: tl.tensor,
    weights: tl.tensor,
    token: tl.tensor,
    tokens: tl.tensor,
    row_bytes: tl.tensor,
    REDUCED: tl.constexpr,
    TOPK: tl.constexpr,
    SLOTS: tl.constexpr,
) -> None:
    """Token index, the expert ids of the destination, and the router weights of each ``token`` [rows]. Its arguments
    are those of the kernel that it is a part of."""
    sends = route + peek(route + P_ROUTE_SENDS)
    local = peek(route + P_EXPERTS) // rank_count(context)
    slot = tl.arange(0, SLOTS)[None, :]
    given = (token[:, None] < tokens) & (slot < TOPK)
    at = token[:, None] * TOPK + slot
    ids = tl.load(int64s(topk_idx + 8 * at), mask=given, other=-1)
    if REDUCED:
        factors = tl.load(floats(weights + 4 * at), mask=given, other=0.0)
    for index in range(TOPK):
        entry = tl.load(int64s(sends + 8 * (token * TOPK + index)), mask=token < tokens, other=-1)
        chosen = entry >= 0
        _, meta = _row_addresses(context, state, route, entry, chosen, row_bytes)
        rank = (entry >> 32)[:, None]
        tl.store(int32s(meta), token.to(tl.int32), mask=chosen)
        here = (ids >= 0) & (ids // local == rank)
        place = meta[:, None] + 4 + 4 * slot
        wanted = chosen[:, None] & (slot < TOPK)
        tl.store(int32s(place), tl.where(here, ids, -1).to(tl.int32), mask=wanted)
        if REDUCED:
            tl.store(floats(place + 4 * TOPK), factors, mask=wanted)


# what the caller may pass with any alignment or length has one compiled code: none is compiled amid an operation
@kernel(do_not_specialize=["topk_idx", "weights", "tokens"])
def pack_dispatch(
    context: tl.int64,
    state: tl.int64,
    route: tl.int64,
    x: tl.int64,
    topk_idx: tl.int64,
    weights: tl.int64,
    tokens: tl.int64,
    row_bytes: tl.int64,
    HIDDEN: tl.constexpr,
    SOURCE: tl.constexpr,
    CODING: tl.constexpr,
    ROUND: tl.constexpr,
    FNUZ: tl.constexpr,
    REDUCED: tl.constexpr,
    TOPK: tl.constexpr,
    SLOTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
    BACKEND: tl.constexpr,
) -> None:
    """Pack and publish the next dispatch message for every rank; grid (ceil(tokens / ROWS), at least 1; any), the
    second for the blocks of a row. Eight arguments of a launch, twelve constants.

    Args:
        x: [tokens, HIDDEN] of dtype SOURCE, contiguous, on a multiple of 16 bytes.
        weights: float32[tokens, TOPK], or 0 when not REDUCED.
        CODING: DTYPE_* of the rows. ROUND: scales are powers of two. FNUZ: gfx942's FP8.
        BLOCK: values cast at a time, a power of two, at least 128. LANES: peers published to at a time.
    """
    tokens = tokens.to(tl.int64)
    if has_failed(context) == 0:
        token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS).to(tl.int64)
        sends = route + peek(route + P_ROUTE_SENDS)
        column, step = tl.program_id(1) * BLOCK, tl.num_programs(1) * BLOCK
        if column == 0:
            _write_metas(context, state, route, topk_idx, weights, token, tokens, row_bytes, REDUCED, TOPK, SLOTS)
        if (CODING == _FP8) | (CODING == _UE8M0):
            width: tl.constexpr = 4 if SOURCE == _F32 else 2
            groups: tl.constexpr = BLOCK // _GROUP
            value = tl.arange(0, BLOCK)[None, :]
            for first in range(column, HIDDEN, step):
                inside = (token[:, None] < tokens) & (first + value < HIDDEN)
                given = load_floats(x + token * (HIDDEN * width), first + value, inside, SOURCE)
                given = tl.reshape(given, [ROWS, groups, _GROUP])
                codes, scales = quantise_blocks(given, ROUND, FNUZ, BACKEND)
                codes = tl.reshape(codes, [ROWS, BLOCK])
                group = first // _GROUP + tl.arange(0, groups)[None, :]
                for index in range(TOPK):
                    entry = tl.load(int64s(sends + 8 * (token * TOPK + index)), mask=token < tokens, other=-1)
                    chosen = entry >= 0
                    rows, _ = _row_addresses(context, state, route, entry, chosen, row_bytes)
                    wanted = chosen[:, None] & inside
                    tl.store(aligned(rows, tl.uint8)[:, None] + (first + value), codes, mask=wanted)
                    wanted_scales = chosen[:, None] & (group < HIDDEN // _GROUP)
                    if CODING == _FP8:
                        tl.store(int32s(rows[:, None] + HIDDEN) + group, scales, mask=wanted_scales)
                    else:
                        exponents = (scales >> 23).to(tl.uint8)
                        tl.store(uint8s(rows[:, None] + HIDDEN + group), exponents, mask=wanted_scales)
        else:
            words: tl.constexpr = HIDDEN * (4 if SOURCE == _F32 else 2) // 4
            for first in range(column, words, step):
                word = first + tl.arange(0, BLOCK)[None, :]
                inside = (token[:, None] < tokens) & (word < words)
                given = tl.load(aligned(x + token * (4 * words), tl.int32)[:, None] + word, mask=inside, other=0)
                for index in range(TOPK):
                    entry = tl.load(int64s(sends + 8 * (token * TOPK + index)), mask=token < tokens, other=-1)
                    chosen = entry >= 0
                    rows, _ = _row_addresses(context, state, route, entry, chosen, row_bytes)
                    tl.store(aligned(rows, tl.int32)[:, None] + word, given, mask=chosen[:, None] & inside)
        if arrives_last(state + S_ARRIVALS, tl.num_programs(0) * tl.num_programs(1), BACKEND):
            number = peek(state + S_DISPATCH_NUMBER)
            ranks = rank_count(context)
            for first_peer in range(0, ranks, LANES):
                peers = first_peer + tl.arange(0, LANES).to(tl.int64)
                inside = peers < ranks
                counts = tl.load(int64s(route_table(context, route, R_COUNTS, peers)), mask=inside, other=0)
                base = tl.load(int64s(route_table(context, route, R_RETURN_BASE, peers)), mask=inside, other=0)
                coding: tl.constexpr = (WEIGHTED if REDUCED else 0) | CODING
                send_messages(
                    context, state, route, peers, _DISPATCH, number, DISPATCH_TAG, counts, coding, base, BACKEND
                )
            # rule: low latency: the send kernel counts its message
            poke(state + S_DISPATCH_NUMBER, number + 1)


_REDUCED = tl.constexpr(FORM_REDUCED)
#: A place is expert << PLACE_EXPERT | position among the source's rows of that expert.
PLACE_EXPERT, PLACE_POSITION = tl.constexpr(16), tl.constexpr(0xFFFF)


@triton.jit
def _message(context: tl.tensor, state: tl.tensor, number: tl.tensor, source: tl.tensor) -> tl.tensor:
    slot = (number & 1) * rank_count(context) + source
    return landing_window(context, source) + peek(state + S_DISPATCH_RECV) + slot * peek(state + S_DISPATCH_SLOT)


@triton.jit
def _lay_out(
    context: tl.tensor,
    route: tl.tensor,
    recv_count: tl.tensor,
    layout_range: tl.tensor,
    stats: tl.tensor,
    RANKS: tl.constexpr,
    EXPERTS: tl.constexpr,
) -> None:
    """Where each source's rows of an expert begin, and how many there are."""
    ranks = rank_count(context)
    local = peek(route + P_EXPERTS) // ranks
    counts = route + peek(route + P_ROUTE_COUNTS)
    rank = tl.arange(0, RANKS)[None, :].to(tl.int64)
    for first in range(0, local, EXPERTS):
        expert = first + tl.arange(0, EXPERTS)[:, None].to(tl.int64)
        inside = (expert < local) & (rank < ranks)
        count = tl.load(int32s(counts + 4 * (rank * local + expert)), mask=inside, other=0).to(tl.int64)
        begin = tl.cumsum(count, axis=1) - count
        tl.store(int64s(layout_range + 8 * (expert * ranks + rank)), (begin << 32) | count, mask=inside)
        each = first + tl.arange(0, EXPERTS).to(tl.int64)
        total = tl.sum(count, axis=1).to(tl.int32)
        tl.store(int32s(recv_count + 4 * each), total, mask=each < local)
        if stats != 0:
            sums = int32s(stats + 4 * each)
            tl.store(sums, tl.load(sums, mask=each < local, other=0) + total, mask=each < local)


@kernel(do_not_specialize=["stats"])
def count_rows(
    context: tl.int64,
    state: tl.int64,
    route: tl.int64,
    recv_count: tl.int64,
    layout_range: tl.int64,
    stats: tl.int64,
    TOPK: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    RANKS: tl.constexpr,
    EXPERTS: tl.constexpr,
    BACKEND: tl.constexpr,
) -> None:
    """Number the rows of each local expert from each source; grid (L, R), one warp. Six arguments of a launch, six
    constants.

    Args:
        recv_count: int32[L], zero at first; layout_range: int64[L, R]; stats: int32[L] to which counts are added, or 0.
        BLOCK: tokens read together. EXPERTS: experts laid out together, a power of two.
    """
    if has_failed_now(context, BACKEND) == 0:
        expert, source = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
        ranks, me, number = rank_count(context), own_rank(context), peek(route)
        local, most = peek(route + P_EXPERTS) // ranks, peek(route + P_TOKENS)
        meta_size = peek(route + P_META)
        tokens = peek(route_table(context, route, R_RECEIVED, source))
        metas = _message(context, state, number, source) + HEADER
        places = route + peek(route + P_ROUTE_PLACES) + 4 * source * most * TOPK
        before = route + peek(route + P_ROUTE_BEFORE) + 4 * source * most
        count = tl.full((), 0, tl.int32)
        pairs = tl.full((), 0, tl.int32)
        strange = tl.full((), 0, tl.int32)
        for first in range(0, tokens, BLOCK):
            index = first + tl.arange(0, BLOCK).to(tl.int64)
            token = index[:, None]
            slot = tl.arange(0, SLOTS)[None, :]
            given = (token < tokens) & (slot < TOPK)
            ids = tl.load(int32s(metas + token * meta_size + 4 + 4 * slot), mask=given, other=-1)
            mine = ids - (me * local).to(tl.int32)
            here = given & (mine == expert.to(tl.int32))
            # an expert that was named twice gets the row once, and both slots find it there
            chosen = tl.max(here.to(tl.int32), axis=1)
            position = (count + tl.cumsum(chosen, axis=0) - chosen)[:, None]
            at = int32s(places + 4 * (token * TOPK + slot))
            tl.store(
                at, (expert.to(tl.int32) << PLACE_EXPERT) | (position + tl.zeros([BLOCK, SLOTS], tl.int32)), mask=here
            )
            count += tl.sum(chosen, axis=0)
            if expert == 0:
                valid = (given & (ids != -1)).to(tl.int32)
                tl.store(at, tl.full([BLOCK, SLOTS], -1, tl.int32), mask=given & (valid == 0))
                each = tl.sum(valid, axis=1)
                tl.store(int32s(before + 4 * index), pairs + tl.cumsum(each, axis=0) - each, mask=index < tokens)
                pairs += tl.sum(each, axis=0)
                origin = tl.load(int32s(metas + index * meta_size), mask=index < tokens, other=0)
                foreign = (valid != 0) & ((mine < 0) | (mine >= local.to(tl.int32)))
                wrong = tl.max(foreign.to(tl.int32), axis=1) | ((origin < 0) | (origin >= most.to(tl.int32))).to(
                    tl.int32
                )
                strange = strange | tl.max(wrong, axis=0)
        poke_count = int32s(route + peek(route + P_ROUTE_COUNTS) + 4 * (source * local + expert))
        tl.store(poke_count, count)
        if expert == 0:
            back = tokens
            if peek(route_table(context, route, R_RETURN_FORM, source)) != _REDUCED:
                back = pairs.to(tl.int64)
            poke(route_table(context, route, R_RETURN_ROWS, source), back)
            room = peek(state + S_COMBINE_RECV_STEP) - peek(route_table(context, route, R_RETURN_TO, source))
            needed = back * peek(route + P_ROW) + HEADER
            stream = stream_of(_DISPATCH, number)
            if uniform(strange, BACKEND) != 0:
                fail(context, state, FAILURE_PROTOCOL, source, stream, strange, 0, BACKEND)
            if needed > room:
                fail(context, state, FAILURE_PROTOCOL, source, stream, needed, room, BACKEND)
        if arrives_last(state + S_ARRIVALS, ranks * local, BACKEND):
            # the verdict of another program of this kernel: counts stay zero
            if has_failed(context) == 0:
                _lay_out(context, route, recv_count, layout_range, stats, RANKS, EXPERTS)


@kernel()
def unpack_rows(
    context: tl.int64,
    state: tl.int64,
    route: tl.int64,
    recv_x: tl.int64,
    scales: tl.int64,
    src_info: tl.int64,
    layout_range: tl.int64,
    row_bytes: tl.int64,
    PAYLOAD: tl.constexpr,
    CODING: tl.constexpr,
    TOPK: tl.constexpr,
    SLOTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BACKEND: tl.constexpr,
) -> None:
    """Copy the rows of every source to their experts; any grid (programs, R).

    Eight arguments of a launch, seven constants.

    Args:
        recv_x: [L, R * T, H], rows of PAYLOAD bytes without gaps.
        scales: FP8: float32 [L, H / 128, R * T]; UE8M0: int32 [L, H / 512, R * T], four exponents a word; else 0.
        src_info: int32[L, R * T], token index at the source.
    """
    if has_failed(context) == 0:
        source = tl.program_id(1).to(tl.int64)
        ranks, most, number = rank_count(context), peek(route + P_TOKENS), peek(route)
        meta_size, capacity = peek(route + P_META), ranks * most
        tokens = peek(route_table(context, route, R_RECEIVED, source))
        metas = _message(context, state, number, source) + HEADER
        for lowest in range(tl.program_id(0).to(tl.int64) * ROWS, tokens, tl.num_programs(0).to(tl.int64) * ROWS):
            index = lowest + tl.arange(0, ROWS).to(tl.int64)
            inside = index < tokens
            row = metas + tokens * meta_size + index * row_bytes
            places = route + peek(route + P_ROUTE_PLACES) + 4 * source * most * TOPK
            # checked by count_rows; whatever became of it since, it stays a token
            origin = tl.load(int32s(metas + index * meta_size), mask=inside, other=0)
            origin = tl.minimum(tl.maximum(origin, 0), most.to(tl.int32) - 1)
            if peek(route_table(context, route, R_RETURN_FORM, source)) == _REDUCED:
                slot = tl.arange(0, SLOTS)[None, :]
                given = inside[:, None] & (slot < TOPK)
                factors = tl.load(floats(metas + index[:, None] * meta_size + 4 + 4 * TOPK + 4 * slot), mask=given)
                weights = route + peek(route + P_ROUTE_WEIGHTS) + 4 * source * most * TOPK
                tl.store(floats(weights + 4 * (index[:, None] * TOPK + slot)), factors, mask=given)
            words: tl.constexpr = PAYLOAD // 4
            scale_words: tl.constexpr = 1 if CODING == _FP8 else 4
            quantised: tl.constexpr = (CODING == _FP8) | (CODING == _UE8M0)
            groups: tl.constexpr = PAYLOAD // (scale_words * _GROUP) if quantised else 0
            # rows are padded to 16 bytes: with the padding, every load is 16 bytes wide
            readable: tl.constexpr = (words + groups + 3) // 4 * 4
            for first in range(0, words + groups, BLOCK):
                word = first + tl.arange(0, BLOCK)[None, :]
                part = tl.load(
                    aligned(row, tl.int32)[:, None] + word, mask=inside[:, None] & (word < readable), other=0
                )
                for slot_index in range(TOPK):
                    place = tl.load(int32s(places + 4 * (index * TOPK + slot_index)), mask=inside, other=-1)
                    here = place >= 0
                    expert = tl.where(here, place >> PLACE_EXPERT, 0).to(tl.int64)
                    begin = peek(layout_range + 8 * (expert * ranks + source)) >> 32
                    position = begin + (place & PLACE_POSITION).to(tl.int64)
                    target = recv_x + (expert * capacity + position) * PAYLOAD
                    tl.store(aligned(target, tl.int32)[:, None] + word, part, mask=here[:, None] & (word < words))
                    if groups > 0:
                        group = word - words
                        column = scales + 4 * ((expert[:, None] * groups + group) * capacity + position[:, None])
                        tl.store(int32s(column), part, mask=here[:, None] & (group >= 0) & (group < groups))
                    if first == 0:
                        tl.store(int32s(src_info + 4 * (expert * capacity + position)), origin, mask=here)
        if arrives_last(state + S_ARRIVALS, tl.num_programs(0) * tl.num_programs(1), BACKEND):
            mark_read(state, S_DISPATCH_READ, S_DISPATCH_AHEAD, number)
