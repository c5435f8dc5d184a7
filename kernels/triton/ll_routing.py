"""Routing of low latency: from the expert ids of tokens to ranks, rows and places, without a kernel of its own.

Expert ``e`` lives on rank ``e // (E / R)``; -1 means "no expert", and what cannot be an id counts as -1.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .context import is_live
from .target import lanes
from .words import int64s

#: No position of a wrong id.
NOWHERE = tl.constexpr(1 << 30)
#: Of a count of rows beside one of pairs, of as many tokens as a warp has lanes, with up to 64 slots each.
_ROWS_BITS, _ROWS = tl.constexpr(16), tl.constexpr((1 << 16) - 1)


@triton.jit
def expert_ids(
    topk_idx: tl.tensor, token: tl.tensor, slot: tl.tensor, tokens: tl.tensor, experts: tl.tensor, TOPK: tl.constexpr
) -> tuple[tl.tensor, ...]:
    """(Expert of each slot as int32, -1 for none; whether the id is one that cannot be.)"""
    given = (token < tokens) & (slot < TOPK)
    ids = tl.load(int64s(topk_idx + 8 * (token * TOPK + slot)), mask=given, other=-1)
    # rule: low latency: an expert id is compared before it is cut to 32 bits
    right = (ids >= 0) & (ids < experts)
    return tl.where(right, ids, -1).to(tl.int32), (right == 0) & (ids != -1)


@triton.jit
def ranks_of(context: tl.tensor, ids: tl.tensor, local: tl.tensor) -> tl.tensor:
    """Rank of each expert, int32, -1 for none and for a masked one."""
    rank = tl.where(ids >= 0, ids // local.to(tl.int32), -1)
    return tl.where((rank >= 0) & is_live(context, tl.where(rank >= 0, rank, 0).to(tl.int64)), rank, -1)


@triton.jit
def earlier_equal(values: tl.tensor, SLOTS: tl.constexpr) -> tl.tensor:
    """Of each element of ``values`` [rows, SLOTS], how many before it in its row are the same."""
    slot = tl.arange(0, SLOTS)
    before = slot[None, None, :] < slot[None, :, None]
    return tl.sum(((values[:, :, None] == values[:, None, :]) & before).to(tl.int32), axis=2)


@triton.jit
def pairs_before(rank: tl.tensor, ids: tl.tensor, SLOTS: tl.constexpr) -> tl.tensor:
    """Of each slot [rows, SLOTS], how many pairs its token has with the same rank before it. Slots that name one expert
    are one pair, the first of them."""
    slot = tl.arange(0, SLOTS)
    new = (earlier_equal(ids, SLOTS) == 0)[:, None, :]
    before = new & (rank[:, :, None] == rank[:, None, :]) & (slot[None, None, :] < slot[None, :, None])
    ahead = tl.sum(before.to(tl.int32), axis=2)[:, None, :]
    return tl.sum(tl.where(new & (ids[:, :, None] == ids[:, None, :]), ahead, 0), axis=2)


@triton.jit
def _apart(counts: tl.tensor) -> tl.tensor:
    """Pairs in the upper half of 64 bits, rows in the lower."""
    return ((counts >> _ROWS_BITS).to(tl.int64) << 32) | (counts & _ROWS).to(tl.int64)


@triton.jit
def list_rows(
    topk_idx: tl.tensor,
    tokens: tl.tensor,
    lowest: tl.tensor,
    local: tl.tensor,
    experts: tl.tensor,
    earlier: tl.tensor,
    TOPK: tl.constexpr,
    ONCE: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """Of the ``local`` experts from ``lowest`` on, store at ``earlier`` what tokens before each have. (Rows, and in the
    upper half pairs, of all; smallest position of a wrong id of any expert, int32.)"""
    all_ = tl.full((), 0, tl.int64)
    wrong = tl.full([lanes()], NOWHERE, tl.int32)
    for first in range(0, tokens, lanes()):
        token = first + tl.arange(0, lanes()).to(tl.int64)
        pairs, seen = tl.zeros([lanes()], tl.int32), ()
        for slot in tl.static_range(TOPK):
            ids, bad = expert_ids(topk_idx, token, slot, tokens, experts, TOPK)
            at_home = ids - lowest.to(tl.int32)
            here = (at_home >= 0) & (at_home < local.to(tl.int32))
            if ONCE:
                for before in tl.static_range(slot):
                    here &= seen[before] != ids
                seen += (ids,)  # type: ignore[assignment]
            pairs += here.to(tl.int32)
            wrong = tl.minimum(wrong, tl.where(bad, (token * TOPK + slot).to(tl.int32), NOWHERE))
        # of so few tokens both counts fit in 32 bits, of which a scan takes half the shuffles
        some = (pairs << _ROWS_BITS) | (pairs > 0).to(tl.int32)
        tl.store(int64s(earlier + 8 * token), all_ + _apart(tl.cumsum(some, axis=0) - some), mask=token < tokens)
        all_ += _apart(tl.sum(some, axis=0))
    return all_, tl.min(wrong, axis=0)


@triton.jit
def named_before(
    topk_idx: tl.tensor,
    tokens: tl.tensor,
    experts: tl.tensor,
    token: tl.tensor,
    ids: tl.tensor,
    TOPK: tl.constexpr,
    SLOTS: tl.constexpr,
    ROWS: tl.constexpr,
) -> tl.tensor:
    """Of each own slot [ROWS, SLOTS], how many tokens before name the same expert."""
    seen = tl.zeros([ROWS, SLOTS, lanes()], tl.int32)
    for first in range(0, tl.max(token, axis=0), lanes()):
        other = first + tl.arange(0, lanes()).to(tl.int64)
        found = tl.zeros([ROWS, SLOTS, lanes()], tl.int1)
        for slot in range(TOPK):
            named, _ = expert_ids(topk_idx, other, slot, tokens, experts, TOPK)
            found |= named[None, None, :] == ids[:, :, None]
        seen += (found & (other[None, None, :] < token[:, None, None])).to(tl.int32)
    return tl.sum(seen, axis=2)
