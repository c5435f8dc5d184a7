"""Rows and their meta: gathered into a message by the sender, unpacked by the receiver.

Meta of a dispatched row: int32 [topk] local expert at the destination or -1, float32 [topk] router weights (0 where the
id is -1), the row's scales, and MARK_BYTES. A row to be forwarded has the ids that the *node* of its destination counts
for its experts, and in the mark bytes bit i % 8 of byte i // 8 for rank i of the node. Meta of a combined row: float32
[topk] weights. Both are padded with zeros to META_BYTES. A row's bytes are copied once, never interpreted.
"""

from __future__ import annotations

from ...native.atomics import copy, peek, peek8, peek32, poke, poke8, poke32, zero
from ...native.copy import stream, stream_fence
from ...native.jit import compiled
from ...protocol.message import NormalNotify
from ..blocks import normal as block
from .context import own_rank
from .normal_nodes import is_far
from .words import get

_COMBINE = NormalNotify.OPERATION_COMBINE


@compiled
def _source_row(state: int, index: int) -> int:
    """Index in X of row ``index`` for the peer."""
    rows = get(state, block.SEND_LIST)
    if rows != 0:
        return peek32(rows + 4 * index)
    return get(state, block.SEND_FIRST) + index


@compiled
def pack_rows(operation: int, state: int, first: int, rows: int, at: int, streamed: bool) -> None:
    """Gather rows ``first`` … of a peer (``state``: its block) to address ``at``.

    ``streamed``: past the caches, because nobody reads them soon. Either way they may be published on return.
    """
    nbytes = get(operation, block.ROW_BYTES)
    x = get(operation, block.X)
    if streamed:
        for index in range(rows):
            stream(at + index * nbytes, x + _source_row(state, first + index) * nbytes, nbytes)
        stream_fence()
        return
    if get(state, block.SEND_LIST) == 0:
        copy(at, x + _source_row(state, first) * nbytes, rows * nbytes)
        return
    for index in range(rows):
        copy(at + index * nbytes, x + _source_row(state, first + index) * nbytes, nbytes)


@compiled
def _mark(operation: int, token: int, first_rank: int, at: int) -> None:
    """Write to address ``at`` which ranks of the node that begins with ``first_rank`` get ``token``."""
    marks = get(operation, block.MARKS) + token * get(operation, block.RANKS) + first_rank
    zero(at, get(operation, block.MARK_BYTES))
    for index in range(get(operation, block.NODE_RANKS)):
        if peek8(marks + index) != 0:
            poke8(at + index // 8, peek8(at + index // 8) | 1 << index % 8)


@compiled
def is_marked(marks: int, index: int) -> bool:
    """True when the mark bytes at address ``marks`` name rank ``index`` of the node."""
    return peek8(marks + index // 8) >> index % 8 & 1 != 0


@compiled
def pack_meta(context: int, operation: int, state: int, peer: int, first: int, rows: int, at: int) -> None:
    """Write the meta of rows ``first`` … for ``peer``, or for its node, to address ``at``."""
    stride, topk = get(operation, block.META_BYTES), get(operation, block.TOPK)
    weights = get(operation, block.WEIGHTS)
    if get(operation, block.KIND) == _COMBINE:
        for index in range(rows):
            row = _source_row(state, first + index)
            copy(at + index * stride, weights + 4 * topk * row, 4 * topk)
            zero(at + index * stride + 4 * topk, stride - 4 * topk)
        return
    ids = get(operation, block.TOPK_IDX)
    scales, scale_bytes = get(operation, block.SCALES), get(operation, block.SCALE_BYTES)
    local = get(operation, block.LOCAL_EXPERTS)
    used = 8 * topk + scale_bytes
    begin, end, first_rank = peer * local, peer * local + local, -1
    if is_far(operation, own_rank(context), peer):
        first_rank = peer - peer % get(operation, block.NODE_RANKS)
        begin = first_rank * local
        end = begin + get(operation, block.NODE_RANKS) * local
    for index in range(rows):
        token = _source_row(state, first + index)
        meta = at + index * stride
        for slot in range(topk):
            expert = peek(ids + 8 * (token * topk + slot))
            weight = peek32(weights + 4 * (token * topk + slot))
            if expert < begin or expert >= end:
                expert, weight = begin - 1, 0
            poke32(meta + 4 * slot, expert - begin)
            poke32(meta + 4 * (topk + slot), weight)
        copy(meta + 8 * topk, scales + token * scale_bytes, scale_bytes)
        zero(meta + used, stride - used)
        if first_rank >= 0:
            _mark(operation, token, first_rank, meta + used)


@compiled
def unpack_meta(operation: int, meta: int, row: int) -> bool:
    """Spread the meta of a dispatched row at address ``meta`` to row ``row`` of the outputs.

    False when an id is not a local expert of this rank: the sender broke the format.
    """
    topk, local = get(operation, block.TOPK), get(operation, block.LOCAL_EXPERTS)
    scale_bytes = get(operation, block.SCALE_BYTES)
    ids = get(operation, block.OUT_IDX) + 8 * topk * row
    weights = get(operation, block.OUT_WEIGHTS) + 4 * topk * row
    for slot in range(topk):
        # the 32 bits come unsigned: move the sign bit up
        expert = (peek32(meta + 4 * slot) << 32) >> 32
        if expert < -1 or expert >= local:
            return False
        poke(ids + 8 * slot, expert)
        poke32(weights + 4 * slot, peek32(meta + 4 * (topk + slot)))
    copy(get(operation, block.OUT_SCALES) + scale_bytes * row, meta + 8 * topk, scale_bytes)
    return True


@compiled
def unpack_passed_meta(operation: int, meta: int, row: int, index: int) -> bool:
    """The same on rank ``index`` of a node for a row that its forwarder got for all of it: other ranks' ids drop out.

    False when an id is not an expert of this node.
    """
    topk, local = get(operation, block.TOPK), get(operation, block.LOCAL_EXPERTS)
    scale_bytes = get(operation, block.SCALE_BYTES)
    ids = get(operation, block.OUT_IDX) + 8 * topk * row
    weights = get(operation, block.OUT_WEIGHTS) + 4 * topk * row
    end = get(operation, block.NODE_RANKS) * local
    for slot in range(topk):
        expert = (peek32(meta + 4 * slot) << 32) >> 32
        weight = peek32(meta + 4 * (topk + slot))
        if expert < -1 or expert >= end:
            return False
        expert -= index * local
        if expert < 0 or expert >= local:
            expert, weight = -1, 0
        poke(ids + 8 * slot, expert)
        poke32(weights + 4 * slot, weight)
    copy(get(operation, block.OUT_SCALES) + scale_bytes * row, meta + 8 * topk, scale_bytes)
    return True


@compiled
def copy_own(context: int, operation: int, state: int, first: int, rows: int) -> None:
    """Dispatch rows ``first`` … of this rank to itself: straight into the outputs, through no message.

    The meta passes through SCRATCH, so that ids, weights and scales have one definition.
    """
    nbytes, meta = get(operation, block.ROW_BYTES), get(operation, block.META_BYTES)
    base = get(state, block.RECV_FIRST)
    at = get(operation, block.OUT) + (base + first) * nbytes
    pack_rows(operation, state, first, rows, at, get(operation, block.STREAMED) != 0)
    if meta == 0:
        return
    scratch = get(operation, block.SCRATCH)
    for index in range(first, first + rows):
        pack_meta(context, operation, state, own_rank(context), index, 1, scratch)
        unpack_meta(operation, scratch, base + index)
